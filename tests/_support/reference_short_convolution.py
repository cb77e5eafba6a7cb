"""Short convolutions and their gradients in float64, token by token, as the recurrence says them."""

from itertools import pairwise

import numpy as np


def sequences_of(x, cu_seqlens) -> list:
    """The tokens of each sequence, float64."""
    x = np.asarray(x).astype(np.float64)
    if cu_seqlens is None:
        return list(x)
    return [x[0, begin:end] for begin, end in pairwise(cu_seqlens)]


def joined(parts, x, cu_seqlens):
    """The tokens of sequences as an array like x."""
    if cu_seqlens is None:
        return np.stack(parts) if parts else np.zeros(np.shape(x))
    return np.concatenate([np.zeros((0, np.shape(x)[2])), *parts])[None]


def with_history(tokens, before, width: int):
    """[W - 1 + T, C]: the state, or zeros, and the tokens."""
    history = np.zeros((width - 1, tokens.shape[1])) if before is None else before.astype(np.float64).T
    return np.concatenate([history, tokens])


def sums(rows, weight, bias):
    width = weight.shape[1]
    z = np.zeros((len(rows) - width + 1, rows.shape[1]))
    z += 0 if bias is None else bias
    for j in range(width):
        z = z + weight[:, j] * rows[j : j + len(z)]
    return z


def sigmoid(z):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-z))


def wide(array):
    return None if array is None else np.asarray(array).astype(np.float64)


def short_convolution(x, weight, bias=None, *, activation=None, cu_seqlens=None, initial_state=None):
    """The result and the states at the end."""
    weight, bias, states = map(wide, (weight, bias, initial_state))
    width, outs, after = weight.shape[1], [], []
    for n, tokens in enumerate(sequences_of(x, cu_seqlens)):
        rows = with_history(tokens, None if states is None else states[n], width)
        z = sums(rows, weight, bias)
        outs.append(z * sigmoid(z) if activation == "silu" else z)
        after.append(rows[len(tokens) :].T)
    shape = (0, weight.shape[0], width - 1)
    return joined(outs, x, cu_seqlens), np.stack(after) if after else np.zeros(shape)


def gradients(
    dout, dstate, x, weight, bias=None, *, activation=None, cu_seqlens=None, initial_state=None
) -> tuple:
    """The gradients of x, weight, bias and initial_state."""
    weight, bias, states, dstate = map(wide, (weight, bias, initial_state, dstate))
    width, dx, before = weight.shape[1], [], []
    dweight, dbias = np.zeros_like(weight), np.zeros(len(weight))
    douts = sequences_of(dout, cu_seqlens)
    for n, tokens in enumerate(sequences_of(x, cu_seqlens)):
        rows, dz = with_history(tokens, None if states is None else states[n], width), douts[n]
        if activation == "silu":
            z = sums(rows, weight, bias)
            s = sigmoid(z)
            dz = dz * s * (1 + z * (1 - s))
        drows = np.zeros_like(rows)
        if dstate is not None:
            drows[len(tokens) :] += dstate[n].T
        for j in range(width):
            drows[j : j + len(dz)] += weight[:, j] * dz
            dweight[:, j] += (dz * rows[j : j + len(dz)]).sum(0)
        dbias += dz.sum(0)
        dx.append(drows[width - 1 :])
        before.append(drows[: width - 1].T)
    before = np.stack(before) if before else np.zeros((0, len(weight), width - 1))
    return (
        joined(dx, x, cu_seqlens),
        dweight,
        None if bias is None else dbias,
        None if states is None else before,
    )
