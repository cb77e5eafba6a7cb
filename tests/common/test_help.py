"""What `help` shows of everything public: soon what it is for, with types that a reader knows."""

import inspect
import pydoc
import re
import sys
import typing

import numpy as np
import pytest
from public_names import public

import attnmask

pytestmark = pytest.mark.levels("once")

PUBLIC = [pytest.param(thing, id=f"{module.__name__}.{name}") for module, name, thing in public()]


def shown(thing) -> str:
    return pydoc.plain(pydoc.render_doc(thing))


@pytest.mark.parametrize("thing", PUBLIC)
def test_help_begins_with_what_it_is_for(thing):
    """Within 40 lines of a terminal that is 80 columns wide, below the signature. Since Python 3.13 each parameter has
    a line of its own.
    """
    text, sentence = shown(thing), inspect.getdoc(thing).splitlines()[0]
    above = text[: text.index(sentence)].splitlines()
    in_lines = inspect.isfunction(thing) and sys.version_info >= (3, 13)
    most = 7 + len(inspect.signature(thing).parameters) if in_lines else 0
    assert sum(max(1, -(-len(line) // 80)) for line in above) <= max(39, most)


@pytest.mark.parametrize("thing", PUBLIC)
def test_help_names_types_as_numpy_documents_them(thing):
    assert not re.findall(r"numpy\._\w+|_NestedSequence|_Buffer", shown(thing))


@pytest.mark.parametrize("thing", PUBLIC)
def test_types_can_be_read_by_a_program(thing):
    typing.get_type_hints(thing.fget if isinstance(thing, property) else thing)


def drawn(queries: int, keys: int, **arguments) -> list[str]:
    """The live pairs as the docstring of `flash_attention` draws them."""
    query, key = np.zeros((1, queries, 1, 1)), np.zeros((1, keys, 1, 1))
    weights = attnmask.flash_attention(query, key, np.eye(keys)[None, :, None], **arguments)[0, :, 0]
    return [" ".join("#" if weight else "." for weight in row) for row in weights]


def test_the_drawings_of_flash_attention():
    """Each shows what the function does, and they are narrow."""
    bottom_right = {"causal_offset": "bottom-right"}
    packed = {"cum_seqlens_q": [0, 2, 5], "cum_seqlens_k": [0, 3, 5]}
    cases = [
        (3, 5, {"causal": True}),
        (3, 5, {"causal": True} | bottom_right),
        (3, 5, {"sliding_window": 1}),
        (3, 5, {"sliding_window": (1, 0)} | bottom_right),
        (5, 3, {"causal": True}),
        (5, 3, {"causal": True} | bottom_right),
        (5, 5, packed),
        (5, 5, packed | {"causal": True}),
        (5, 5, packed | {"causal": True} | bottom_right),
        (5, 5, packed | {"causal": True, "causal_offset": [0, -1]}),
    ]
    rows = [
        line for line in inspect.getdoc(attnmask.flash_attention).splitlines() if re.search(r"\d [.#]", line)
    ]
    assert max(map(len, rows)) <= 72
    cells = [re.findall(r"\d ((?:[.#] ?)+)", line) for line in rows]
    for of_a_line in ([*range(4)], [4, 5], [*range(6, 10)]):
        expected = [drawn(queries, keys, **more) for queries, keys, more in (cases[i] for i in of_a_line)]
        for row in zip(*expected, strict=True):
            assert [cell.strip() for cell in cells.pop(0)] == list(row)
    assert not cells
