"""Calls with two batch axes, and biases that these share, for PyTorch and JAX."""

BATCH, TQ, TK, H = (2, 3), 9, 11, 4
BIASES = {
    "triangle": (2, 1, H, TQ, TK),
    "one for all": (1, 1, H, TQ, TK),
    "each its own": (2, 3, H, TQ, TK),
    "first axis shared": (1, 3, 1, TQ, TK),
    "heads": (H, TQ, TK),
}
