"""How calls of attention are divided among threads, as plain data that builds for tests return."""

from typing import Any

from attnmask import _core
from attnmask._attention.arguments import FLASH_ATTENTION
from attnmask._attention.problem import read_problem


def forward_schedule(threads: int, /, **arguments: Any) -> dict[str, Any]:
    """Return as plain data how a call of `flash_attention` is divided among threads:

    sections
        A dict for each sequence or batch row: ``row``, ``queries`` and ``keys`` (begin and end), ``tiles`` of keys,
        ``strategy``, the most ``block_rows``, ``items`` of each of its ``splits``, and ``task_items``.
    tasks
        For each task the index of its section, and the rows and tiles of its items.
    waves
        For each parallel loop the number of tasks, and how many of them one thread takes in order if it can.
    scratch
        Bytes of memory besides the results.
    """
    return _core.attention_schedule(read_problem(FLASH_ATTENTION.bind((), arguments))[0], threads)


def backward_schedule(threads: int, /, **arguments: Any) -> dict[str, Any]:
    """Return as plain data how the gradients of a call of `flash_attention` are divided among threads:

    sections
        A dict for each sequence or batch row: ``sum_tiles``, the tiles of keys of one sum of d_q; ``split_visits``, the
        visits to a block of one query head of one split of d_k (or a number above all of them); and ``blocks``,
        the first tile that each block of queries sees and the end of these.
    tasks
        For each the batch row, and of each section that it has tiles of its index, the first tile and their end; then
        the visits that it takes, which split of these tiles it is, and their number, which is 0 if it takes all visits.
        In the order in which they begin, each for one key head after the other.
    row_tasks
        The number of tasks of a batch row.
    """
    return _core.backward_schedule(read_problem(FLASH_ATTENTION.bind((), arguments))[0], threads)
