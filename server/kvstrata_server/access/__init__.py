"""Who may ask what, how much and how often, and the record of what was changed."""
