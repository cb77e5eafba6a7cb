"""Masks as descriptions, and the functions between masks, ids and lengths."""
