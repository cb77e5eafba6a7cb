"""Attention over caches of keys and values."""
