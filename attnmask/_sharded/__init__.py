"""Sequences divided among processes."""
