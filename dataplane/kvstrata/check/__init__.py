"""Looking into stores from outside, beside the nodes that use them: `kvstrata fsck` and `du`."""
