"""Linear attention in float64, token by token, as its definition says; and its gradients, token by token backwards."""

import itertools

import numpy as np

EPSILON = 1e-6  # of the norms of normalize_qk


def wide(array):
    return None if array is None else np.asarray(array).astype(np.float64)


def _normalized(x):
    inverse = 1 / np.sqrt((x * x).sum(-1, keepdims=True) + EPSILON)
    return x * inverse, inverse


def _normalized_back(y, inverse, dy):
    return inverse * (dy - y * (y * dy).sum(-1, keepdims=True))


def factors(decay, shape):
    """exp(decay) for each token, head and row of the state: [B, T, H, K]."""
    batch, tokens, heads, _ = shape
    if decay is None:
        return np.ones(shape)
    if decay.ndim == 1:
        decay = np.broadcast_to(decay, (batch, tokens, heads))
    return np.broadcast_to(np.exp(decay if decay.ndim == 4 else decay[..., None]), shape)


def _decayed(factor, state):
    """A factor of 0 forgets NaN and Inf too."""
    return np.where(factor[:, None] == 0, 0, factor[:, None] * state)


def sequences_of(batch, tokens, cu_seqlens):
    """(batch row, first token, end) of each sequence."""
    if cu_seqlens is None:
        return [(b, 0, tokens) for b in range(batch)]
    return [(0, int(a), int(b)) for a, b in itertools.pairwise(cu_seqlens)]


class Linear:
    """One problem; arrays as of `attnmask.linear_attention`."""

    def __init__(
        self,
        query,
        key,
        value,
        *,
        decay=None,
        beta=None,
        scale=None,
        initial_state=None,
        cu_seqlens=None,
        normalize_qk=False,
    ):
        self.query, self.key, self.value = wide(query), wide(key), wide(value)
        self.decay, self.beta, self.initial = wide(decay), wide(beta), wide(initial_state)
        self.scale = max(self.query.shape[-1], 1) ** -0.5 if scale is None else scale
        self.normalize = normalize_qk
        batch, tokens, self.heads, self.channels = self.value.shape
        self.rows = self.query.shape[-1]
        self.shared = self.heads // self.query.shape[2] if self.query.shape[2] else 1
        self.sequences = sequences_of(batch, tokens, cu_seqlens)
        self.factor = factors(self.decay, (batch, tokens, self.heads, self.rows))
        q, k = (np.repeat(x, self.shared, 2) for x in (self.query, self.key))
        self.q, self.k = q, k
        if normalize_qk:
            (self.q, self.q_inverse), (self.k, self.k_inverse) = _normalized(q), _normalized(k)

    def start(self, sequence, head):
        if self.initial is None:
            return np.zeros((self.rows, self.channels))
        return self.initial[sequence, head].copy()

    def token(self, state, at):
        """The decayed state, what is added for the key, and the state that follows."""
        decayed = _decayed(self.factor[at], state)
        error = self.value[at] - (0 if self.beta is None else self.k[at] @ decayed)
        u = error if self.beta is None else self.beta[at] * error
        return decayed, error, u, decayed + np.outer(self.k[at], u)

    def forward(self):
        out = np.zeros(self.value.shape)
        states = np.zeros((len(self.sequences), self.heads, self.rows, self.channels))
        for s, (b, begin, end) in enumerate(self.sequences):
            for h in range(self.heads):
                state = self.start(s, h)
                for t in range(begin, end):
                    state = self.token(state, (b, t, h))[3]
                    out[b, t, h] = self.scale * (self.q[b, t, h] @ state)
                states[s, h] = state
        return out, states

    def backward(self, dout, dstate=None):
        """Gradients by name; and `decay_size`, the largest Σ |q·dq| + |k·dk|, by which errors of decay are judged."""
        dout = wide(dout)
        dq, dk, dv = np.zeros(self.q.shape), np.zeros(self.q.shape), np.zeros(self.value.shape)
        ddecay, dbeta = np.zeros(self.q.shape), np.zeros(self.value.shape[:3])
        dinitial = np.zeros((len(self.sequences), self.heads, self.rows, self.channels))
        for s, (b, begin, end) in enumerate(self.sequences):
            for h in range(self.heads):
                states = [self.start(s, h)]
                for t in range(begin, end):
                    states.append(self.token(states[-1], (b, t, h))[3])
                d = np.zeros_like(states[0]) if dstate is None else wide(dstate)[s, h].copy()
                for t in reversed(range(begin, end)):
                    at = b, t, h
                    decayed, error, u, state = self.token(states[t - begin], at)
                    dq[at] = self.scale * (state @ dout[at])
                    d += self.scale * np.outer(self.q[at], dout[at])
                    dk[at] = d @ u
                    du = self.k[at] @ d
                    if self.beta is None:
                        dv[at] = du
                    else:
                        dbeta[at] = du @ error
                        dv[at] = self.beta[at] * du
                        dk[at] -= decayed @ dv[at]
                        d -= np.outer(self.k[at], dv[at])
                    with np.errstate(invalid="ignore"):
                        ddecay[at] = np.where(self.factor[at] == 0, 0, (d * decayed).sum(1))
                    d = _decayed(self.factor[at], d)
                dinitial[s, h] = d
        size = (np.abs((self.q * dq).sum(-1)) + np.abs((self.k * dk).sum(-1))).max(initial=0)
        if self.normalize:
            dq = _normalized_back(self.q, self.q_inverse, dq)
            dk = _normalized_back(self.k, self.k_inverse, dk)
        batch, tokens, key_heads, _ = self.query.shape
        shape = batch, tokens, key_heads, self.shared, self.rows
        if self.decay is not None and self.decay.ndim < 4:
            ddecay = ddecay.sum(-1)
        if self.decay is not None and self.decay.ndim == 1:
            ddecay = ddecay.sum((0, 1))
        return {
            "query": dq.reshape(shape).sum(3),
            "key": dk.reshape(shape).sum(3),
            "value": dv,
            "decay": None if self.decay is None else ddecay,
            "beta": None if self.beta is None else dbeta,
            "initial_state": None if self.initial is None else dinitial,
            "decay_size": size,
        }
