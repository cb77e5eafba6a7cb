"""Counts what attnmask computes for a client."""

import importlib

import pytest
from model_packages import DOORS


@pytest.fixture
def served(monkeypatch):
    """How often each door has called the core."""
    counts = dict.fromkeys(DOORS, 0)

    def counted(door, function):
        def call(*given, **more):
            counts[door] += 1
            return function(*given, **more)

        return call

    for door, (module, *names) in DOORS.items():
        module = importlib.import_module(module)
        for name in names:
            monkeypatch.setattr(module, name, counted(door, getattr(module, name)))
    return counts
