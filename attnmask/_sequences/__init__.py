"""Packed sequences and running sums."""
