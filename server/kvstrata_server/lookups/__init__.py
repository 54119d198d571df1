"""Questions: which nodes hold these keys, or save how much of this prompt."""
