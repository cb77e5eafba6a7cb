"""Fixtures for tests of the C library."""

import c_library as c
import pytest

from attnmask import _core


@pytest.fixture
def level_of_the_library():
    """Lets the package compute at the level of the library, which is that of the processor."""
    own = c.struct("configuration")
    c.call("config", own)
    before = _core.use_isa(own.level.decode())
    yield
    _core.use_isa(before)
