"""Linear attention, and the short convolution before it."""
