"""What gradients of linear attention come as. Annotations are types here, which programs can read."""

from typing import NamedTuple

from attnmask._common.types import Array


class LinearAttentionGrads(NamedTuple):
    """The gradients of `linear_attention`, each in the shape and dtype of its argument; None for what was not given.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.LinearAttentionGrads._fields
    ('query', 'key', 'value', 'decay', 'beta', 'initial_state')
    """

    query: Array
    key: Array
    value: Array
    decay: Array | None
    beta: Array | None
    initial_state: Array | None
