"""What gradients of linear attention come as. Annotations are types here, which programs can read."""

from typing import Any, NamedTuple

from numpy.typing import NDArray


class LinearAttentionGrads(NamedTuple):
    """The gradients of `linear_attention`, each in the shape and dtype of its argument; None for what was not given.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.LinearAttentionGrads._fields
    ('query', 'key', 'value', 'decay', 'beta', 'initial_state')
    """

    query: NDArray[Any]
    key: NDArray[Any]
    value: NDArray[Any]
    decay: NDArray[Any] | None
    beta: NDArray[Any] | None
    initial_state: NDArray[Any] | None
