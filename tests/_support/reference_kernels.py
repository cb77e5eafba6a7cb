"""The kernels of attention in NumPy; each number has a bound on the error of a kernel that computes it.

The arithmetic is wider than that of the kernels, and `Bounded` follows the roundings of the kernels: the code below
states the equations, and the bound of a result follows from them. Sums may be taken in any order.
"""

import math
from dataclasses import dataclass

import numpy as np

WIDE = {4: np.float64, 8: np.longdouble}  # wide type by the size of the kernels' numbers
BF16_ROUNDING = 2.0**-8
MOST_I16 = 2**15 - 1

# Multiples of 1/8 have products that are multiples of 1/64, and sums of these below 2^16 fit float32.
COARSE, COARSE_SUM = 8, 2**16

# The errors of functions, in roundings. A power of two rounds the last sum and product of its polynomial, and where the
# other factor is in a table, one more product; the errors of coefficients and of earlier steps together count less than
# one more. tanh divides by a power and subtracts, which adds more than half of the power's error where that is large,
# and is a polynomial near 0.
EXP2_ROUNDINGS, TANH_ROUNDINGS = 4, 8
# The errors of the polynomials themselves, as stated in kernels/attention/common.h.
EXP2_ERROR = {4: 2e-9, 8: 2e-17}
EXP2_ERROR_BF16X2 = 4e-7


@dataclass
class Bounded:
    """Numbers, and how far a kernel that rounds each result to `size` bytes may deviate from them."""

    value: np.ndarray
    error: np.ndarray  # 0 for NaN and Inf, which must be equal
    size: int

    def __post_init__(self):
        self.error = np.where(np.isfinite(self.value), self.error, 0)

    @classmethod
    def exact(cls, values, size: int) -> "Bounded":
        value = np.asarray(values).astype(WIDE[size])
        return cls(value, np.zeros_like(value), size)

    @property
    def unit(self) -> float:
        """The relative error of one rounding; `tiny` is the absolute one where numbers are subnormal or become 0."""
        return {4: 2.0**-24, 8: 2.0**-53}[self.size]

    @property
    def tiny(self) -> float:
        return {4: 2.0**-126, 8: 2.0**-1022}[self.size]

    def of(self, value, error, roundings: float = 1) -> "Bounded":
        """A result that has an error already, and is rounded unless it is exact."""
        held = value.astype(np.float32) if self.size == 4 else value.astype(np.float64)
        rounding = self.unit * (abs(value) + error) + self.tiny
        return Bounded(
            value, error + np.where((error == 0) & (held == value), 0, roundings * rounding), self.size
        )

    def constant(self, number: float) -> "Bounded":
        """A double that the kernel rounds to its own type."""
        held = np.float32(number) if self.size == 4 else number
        return Bounded(WIDE[self.size](number), abs(WIDE[self.size](held) - number), self.size)

    def __add__(self, other: "Bounded") -> "Bounded":
        return self.of(self.value + other.value, self.error + other.error)

    def __sub__(self, other: "Bounded") -> "Bounded":
        return self.of(self.value - other.value, self.error + other.error)

    def __mul__(self, other: "Bounded") -> "Bounded":
        a, b = self, other
        return self.of(a.value * b.value, abs(a.value) * b.error + abs(b.value) * a.error + a.error * b.error)

    def __getitem__(self, index) -> "Bounded":
        return Bounded(self.value[index], self.error[index], self.size)

    @property
    def T(self) -> "Bounded":
        return Bounded(self.value.T, self.error.T, self.size)

    @property
    def is_coarse(self) -> bool:
        """Products of such numbers, and sums of these, need no rounding."""
        return not self.error.any() and bool((self.value * COARSE == np.rint(self.value * COARSE)).all())

    def where(self, chosen) -> "Bounded":
        """Sets all other elements to zero, whatever they were."""
        return Bounded(np.where(chosen, self.value, 0), np.where(chosen, self.error, 0), self.size)

    def sum(self) -> "Bounded":
        """The sum of each row."""
        size = (abs(self.value) + self.error).sum(-1)
        rounding = self.value.shape[-1] * (self.unit * size + self.tiny)
        return Bounded(self.value.sum(-1), self.error.sum(-1) + rounding, self.size)

    def dot(self, other: "Bounded", live=None, onto: "Bounded | None" = None) -> "Bounded":
        """The product of matrices, added to `onto`; restricted to pairs of `live` if others may be NaN."""
        a, b, count = self, other, self.value.shape[1]
        if live is not None and not np.isfinite(b.value).all():
            terms = (a[:, :, None] * b[None]).where(live[:, :, None])
            value, error, size = terms.value.sum(1), terms.error.sum(1), abs(terms.value).sum(1)
        else:
            value, size = a.value @ b.value, abs(a.value) @ abs(b.value)
            error = abs(a.value) @ b.error + a.error @ (abs(b.value) + b.error)
        if a.is_coarse and b.is_coarse and onto is None and size.max(initial=0) < COARSE_SUM:
            return Bounded(value, np.zeros_like(value), self.size)
        if onto is not None:
            value, error, size = value + onto.value, error + onto.error, size + abs(onto.value) + onto.error
        return Bounded(value, error + (count + 1) * (self.unit * (size + error) + self.tiny), self.size)

    def exp2(self, polynomial: float | None = None) -> "Bounded":
        value, more = np.exp2(self.value), EXP2_ERROR[self.size] if polynomial is None else polynomial
        return self.of(value, value * (np.expm1(math.log(2) * self.error) + more), EXP2_ROUNDINGS)

    def tanh(self) -> "Bounded":
        return self.of(np.tanh(self.value), self.error + EXP2_ERROR[self.size], TANH_ROUNDINGS)

    def to_bf16(self) -> "Bounded":
        rounding = BF16_ROUNDING * (abs(self.value) + self.error)
        return Bounded(self.value, self.error + rounding + self.tiny, self.size)

    def to_i16(self, most: float, factors: float | np.ndarray = 1) -> "Bounded":
        """Rounds numbers times `factors` to multiples of a unit, of which the greatest of each row has `most`."""
        greatest = (abs(self.value * factors) + self.error * factors).max(-1, initial=0, keepdims=True)
        rounding = (0.5 + 4 * most * self.unit) * greatest / most / factors
        return Bounded(self.value, self.error + np.where(self.value == 0, 0, rounding), self.size)

    def check(self, got: np.ndarray, case) -> None:
        """The bound is extended by the rounding of the wider arithmetic."""
        assert got.shape == self.value.shape, (got.shape, self.value.shape)
        exact = got.astype(self.value.dtype)
        allowed = self.error * (1 + np.finfo(self.value.dtype).eps / self.unit)
        same = (exact == self.value) | (np.isnan(exact) & np.isnan(self.value))
        wrong = ~same & ~(abs(exact - self.value) <= allowed)
        first = tuple(index[0] for index in np.nonzero(wrong)) if wrong.any() else ()
        assert not wrong.any(), (
            f"{wrong.sum()} of {wrong.size} numbers differ, the first at {first}: {got[first]!r}, not "
            f"{self.value[first]!r} ± {self.error[first]!r}: {case}"
        )


# Attention of a block of rows to a tile of keys


@dataclass
class Terms:
    """The terms of logits, and the pairs that count. Arrays are [rows, keys]."""

    factor: float
    unit: float
    cap: float = 0.0
    bias: np.ndarray | None = None
    live: np.ndarray | None = None
    kept: np.ndarray | None = None

    def logits(self, q: Bounded, k: Bounded) -> Bounded:
        s = q.dot(k.T) * q.constant(self.factor)
        if self.bias is not None:
            s += Bounded.exact(self.bias, s.size)
        return s.constant(self.cap) * self.bent(s) if self.cap else s

    def bent(self, s: Bounded) -> Bounded:
        return (s * s.constant(1 / self.cap)).tanh()


@dataclass
class State:
    """The accumulators of a block: those of a kernel, or the expected ones."""

    out: np.ndarray | Bounded
    running_max: np.ndarray
    sum: np.ndarray | Bounded
    row_max: np.ndarray | None
    exact_sum: np.ndarray | Bounded | None = None  # of weights before they are rounded to bfloat16


SLACK = 8  # how far a logit may exceed running_max before the row is rescaled


def check_maxima(old: State, new: State, s: Bounded, terms: Terms, case) -> None:
    """`running_max` stays, or becomes the greatest logit if that is far above it; `row_max` is the greatest logit."""
    chosen = s if terms.live is None else s.where(terms.live)
    highest = np.where(True if terms.live is None else terms.live, s.value, -np.inf).max(1)
    for r in np.flatnonzero(~np.isnan(chosen.value).any(1)):
        error = chosen.error[r].max() + s.unit * (abs(highest[r]) + SLACK)
        excess = highest[r] - SLACK - old.running_max[r] if highest[r] > old.running_max[r] else -SLACK
        rose = new.running_max[r] != old.running_max[r]
        assert rose or not excess > error, (r, "kept", new.running_max[r], highest[r], case)
        assert not rose or not excess < -error, (r, "rose", old.running_max[r], highest[r], case)
        near = Bounded(highest[r : r + 1], np.full(1, error), s.size)
        if rose:
            near.check(new.running_max[r : r + 1], (r, case))
        if new.row_max is not None and highest[r] > old.row_max[r] + error:
            near.check(new.row_max[r : r + 1], (r, case))
        elif new.row_max is not None and highest[r] < old.row_max[r] - error:
            assert new.row_max[r] == old.row_max[r], (r, case)


def forward(
    old: State,
    running_max: np.ndarray,
    s: Bounded,
    v: Bounded,
    terms: Terms,
    exp2_error: float | None,
    to_bf16: bool,
    scales=None,
    offsets: Bounded | None = None,
) -> State:
    """The expected accumulators after the step, given the `running_max` that the kernel has chosen. P is rounded to
    bfloat16 if `to_bf16`; or times `scales`, those of values, to sixteen-bit integers, but not as it is multiplied by
    `offsets` that are added to values.
    """
    size, unit = s.size, s.constant(terms.unit)
    exact = Bounded.exact(running_max, size)
    base = Bounded.exact(np.maximum(running_max, np.finfo(running_max.dtype).min), size)
    p = ((s - base[:, None]) * unit).exp2(exp2_error)
    if terms.live is not None:
        p = p.where(terms.live)
    rose = (running_max != old.running_max) & (old.running_max > -np.inf)
    factor = ((Bounded.exact(old.running_max, size) - exact) * unit).exp2()
    factor = Bounded(np.where(rose, factor.value, 1), np.where(rose, factor.error, 0), size)
    rescaled = Bounded.exact(old.out, size) * factor[:, None]
    exact_total = None
    if old.exact_sum is not None:
        exact_total = Bounded.exact(old.exact_sum, size) * factor + p.sum()
    if to_bf16:
        p = p.to_bf16()
    total = Bounded.exact(old.sum, size) * factor + p.sum()
    if terms.kept is not None:
        p = p.where(terms.kept)
    if offsets is not None:
        rescaled = p.dot(offsets, terms.live, rescaled)
    if scales is not None:
        p = p.to_i16(MOST_I16, scales)
    out = p.dot(v, terms.live, rescaled)
    return State(out, running_max, total, None, exact_total)


@dataclass
class Gradients:
    d_bias: Bounded
    d_q: Bounded
    d_k: Bounded
    d_v: Bounded


def backward(
    q: Bounded, k: Bounded, v: Bounded, d_out: Bounded, terms: Terms, stats, old, scale, kept_factor, bf16x2
) -> Gradients:
    """What the step adds to gradients. `stats` are base, rest, add and share of the rows; share may be None."""
    size, live = q.size, terms.live
    base, rest, add = (Bounded.exact(array, size)[:, None] for array in stats[:3])
    s = terms.logits(q, k)
    p = ((s - base) * q.constant(terms.unit) + rest).exp2()
    dp, weights = d_out.dot(v.T), p
    if terms.kept is not None:
        dp = (dp * q.constant(kept_factor)).where(terms.kept)
        weights = (p * q.constant(kept_factor)).where(terms.kept)
    ds = p * (dp + add)
    if stats[3] is not None:
        ds -= Bounded.exact(np.where(s.value < base.value, 0, stats[3][:, None]), size)
    if terms.cap:
        plain = Terms(terms.factor, terms.unit, bias=terms.bias)
        bent, one = terms.bent(plain.logits(q, k)), q.constant(1)
        ds *= (one - bent) * (one + bent)
    if live is not None:
        ds, weights = ds.where(live), weights.where(live)
    scaled = ds * q.constant(scale)
    if bf16x2:
        scaled, weights = scaled.to_bf16(), weights.to_bf16()
    across = None if live is None else live.T
    d_q, d_k, d_v = (Bounded.exact(array, size) for array in old)
    return Gradients(
        ds, scaled.dot(k, live, d_q), scaled.T.dot(q, across, d_k), weights.T.dot(d_out, across, d_v)
    )


# Packing: a lane holds one number, or two bfloat16


def lanes_of(numbers: np.ndarray, width: int) -> np.ndarray:
    """Rows of numbers as rows of lanes; an odd row is padded with zero."""
    if width == 1:
        return numbers
    even = np.zeros((len(numbers), -(-numbers.shape[1] // 2) * 2), numbers.dtype)
    even[:, : numbers.shape[1]] = numbers
    return even.view(np.float32)


def unwritten(shape, dtype) -> np.ndarray:
    """Memory that a kernel must not write, or whose contents must not matter: all bits are set, as in NaN."""
    made = np.empty(shape, dtype)
    made.view(np.uint8)[...] = 0xFF
    return made


def padded(rows: np.ndarray, panel: int, columns: int) -> np.ndarray:
    """A whole tile: missing columns are zero, and so are missing rows up to whole panels."""
    made = unwritten((64, columns), rows.dtype)
    made[: -(-len(rows) // panel) * panel] = 0
    made[: len(rows), : rows.shape[1]] = rows
    return made


def packed_keys(keys: np.ndarray, panel: int, width: int = 1) -> np.ndarray:
    """[panel of rows][depth][row]"""
    lanes = lanes_of(keys, width)
    whole = padded(lanes, panel, lanes.shape[1])
    return whole.reshape(64 // panel, panel, -1).swapaxes(1, 2).ravel()


def packed_values(values: np.ndarray, panel: int, width: int = 1) -> np.ndarray:
    """[panel of columns][row][column]; two rows per lane: [panel of columns][two rows][column][row of the two]"""
    whole = padded(values, panel, -(-values.shape[1] // panel) * panel)
    split = whole.reshape(64 // width, width, -1, panel).transpose(2, 0, 3, 1)
    return np.ascontiguousarray(split).ravel().view(np.float32 if width == 2 else whole.dtype)
