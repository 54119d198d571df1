"""Who holds which chunk: nodes and what they report, the index of it, and what follows from it."""
