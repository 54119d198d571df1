"""What nodes are told to do: transfers, prefetches and evictions, from request to outcome."""
