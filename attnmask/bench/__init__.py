"""Measure what each instruction set of this processor gives: ``python -m attnmask.bench``."""
