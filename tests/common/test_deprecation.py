"""What a deprecated name does."""

import inspect

import pytest

from attnmask._common.deprecation import deprecated


@deprecated("new(x)", since="0.2", removal="0.4")
def old(x: int, *, y: int = 1) -> int:
    """Add."""
    return x + y


def test_a_deprecated_name_works_and_warns_where_it_is_called():
    with pytest.warns(
        DeprecationWarning, match=r"^old will be removed in attnmask 0\.4: write new\(x\)$"
    ) as caught:
        assert old(2, y=3) == 5
    assert caught[0].filename == __file__


def test_a_deprecated_name_says_so_in_its_docs():
    assert inspect.getdoc(old) == (
        "Add.\n\n.. deprecated:: 0.2\n   Will be removed in 0.4. Write ``new(x)``."
    )
    assert str(inspect.signature(old)) == "(x: int, *, y: int = 1) -> int"
