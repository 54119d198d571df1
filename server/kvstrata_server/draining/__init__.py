"""Nodes that are to be stopped are emptied of what only they hold."""
