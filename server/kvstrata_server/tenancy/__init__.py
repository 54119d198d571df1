"""Tenants: what they hold and move, what they may, and what becomes of the rest."""
