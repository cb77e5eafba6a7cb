"""The rows of linear attention and short convolutions."""

from attnmask._common.loading import _core
from attnmask._faces.arrays import with_gradient
from attnmask._faces.rows import Result, Row
from attnmask._linear.grads import LinearAttentionGrads, ShortConvolutionGrads

# Linear attention

_ATTENTION = """
query, key : learned [B, T, Hk, K]
    Read in place, whatever their strides. float16, bfloat16, float32 or float64.
value : learned [B, T, H, V]
    Same dtype as `query`. `H` is a multiple of `Hk`: value head `h` uses key head ``h // (H // Hk)``.
decay : learned [H], [B, T, H] or [B, T, H, K] = None
    The logarithm of what the state is multiplied by before each token: per head, per token, or per token and row
    of the state. ``-inf`` forgets all that came before. float32, or the dtype of `query`.
beta : learned [B, T, H] = None
    The strength of the delta rule. Without it the values themselves are added. float32, or the dtype of `query`.
scale : scale = None
    Multiplied into the queries; ``1 / sqrt(K)`` if not given.
initial_state : learned [N, H, K, V] = None
    The state before each of `N` sequences (the batch rows, without `cu_seqlens`). float32; float64 for float64.
    float16 and bfloat16 are copied to that type, and gradients of them are rounded to their own.
cu_seqlens : starts [N + 1] = None
    The batch is one row of packed sequences. Each starts from its own state.
normalize_qk : flag = False
    Divide each query and key by ``sqrt(sum(x**2) + 1e-6)`` first.
chunk_size : size = 64
    A hint, a power of two up to 256; below 16 it is 16. It changes rounding only.
return_state : all = False
    Return the state after each sequence as well.
out : out = None
    Takes the result, and is returned. Of the result's shape and dtype, sharing no memory with the inputs.
"""
LINEAR_ATTENTION = Row(
    "linear_attention",
    _ATTENTION,
    (Result("out", "[B, T, H, V]"), Result("state", "[N, H, K, V]", wide=True)),
    places=3,
    entry=_core.linear_attention,
    check=_core.check_linear_attention,
    keep=_core.linear_forward_vjp,
    backward=_core.linear_backward,
    grads=LinearAttentionGrads,
    cast=("query", "key", "value"),
    wide="initial_state",
    handler="attnmask_linear",
    examples={
        "torch": """
>>> query = torch.ones(1, 3, 1, 1)
>>> value = torch.tensor([10.0, 20.0, 30.0]).reshape(1, 3, 1, 1).requires_grad_()
>>> decay = torch.tensor([0.5]).log()
>>> out = attnmask.torch.linear_attention(query, query, value, decay=decay)
>>> [round(x, 3) for x in out.flatten().tolist()]
[10.0, 25.0, 42.5]
>>> out.sum().backward()
>>> [round(x, 3) for x in value.grad.flatten().tolist()]
[1.75, 1.5, 1.0]
""",
        "jax": """
>>> query, value = jnp.ones((1, 3, 1, 1)), jnp.array([10.0, 20.0, 30.0]).reshape(1, 3, 1, 1)
>>> decay = jnp.log(jnp.array([0.5]))
>>> attend = jax.jit(lambda value: attnmask.jax.linear_attention(query, query, value, decay=decay))
>>> attend(value).ravel().tolist()
[10.0, 25.0, 42.5]
>>> jax.grad(lambda value: attend(value).sum())(value).ravel().tolist()
[1.75, 1.5, 1.0]
""",
    },
)
LINEAR_ATTENTION_VJP = with_gradient(LINEAR_ATTENTION)
LINEAR_ATTENTION_STEP = Row(
    "linear_attention_step",
    """
query, key : learned [B, Hk, K]
    float16, bfloat16, float32 or float64.
value : learned [B, H, V]
    Same dtype as `query`. Value head `h` uses key head ``h // (H // Hk)``.
state : state [slots, H, K, V]
    Updated in place. float32; float64 for float64.
decay : learned [H], [B, H] or [B, H, K] = None
    See `linear_attention`.
beta : learned [B, H] = None
    See `linear_attention`.
scale : scale = None
    ``1 / sqrt(K)`` if not given.
normalize_qk : flag = False
    Divide each query and key by ``sqrt(sum(x**2) + 1e-6)`` first.
state_indices : slots [B] = None
    The slot of each batch row, each at most once. -1 leaves a row out: its result is 0. Without them there are as
    many slots as batch rows.
out : out = None
    Takes the result, and is returned.
""",
    (Result("out", "[B, H, V]"),),
    places=4,
    entry=_core.linear_attention_step,
    check=_core.check_linear_attention_step,
    trained="linear_attention",
    cast=("query", "key", "value"),
    wide="state",
    handler="attnmask_linear_step",
    examples={
        "torch": """
>>> state = torch.zeros(1, 1, 2, 1)
>>> key = torch.tensor([[[1.0, 0.0]]])
>>> for number in (10.0, 20.0):
...     value = torch.full((1, 1, 1), number)
...     out = attnmask.torch.linear_attention_step(key, key, value, state, scale=1.0)
>>> out.item(), state.flatten().tolist()
(30.0, [30.0, 0.0])
""",
        "jax": """
>>> step = jax.jit(lambda *given: attnmask.jax.linear_attention_step(*given, scale=1.0), donate_argnums=3)
>>> state, key = jnp.zeros((1, 1, 2, 1)), jnp.array([[[1.0, 0.0]]])
>>> for number in (10.0, 20.0):
...     out, state = step(key, key, jnp.full((1, 1, 1), number), state)
>>> out.item(), state.ravel().tolist()
(30.0, [30.0, 0.0])
""",
    },
)

# Short convolutions

SHORT_CONVOLUTION = Row(
    "short_convolution",
    """
x : learned [B, T, C]
    float16, bfloat16, float32 or float64, read in place whatever its strides. Sums are float32, or float64 for
    float64.
weight : learned [C, W]
    Same dtype as `x`, or float32. The last column multiplies the token itself.
bias : learned [C] = None
    Same dtype as `x`, or float32.
activation : choice None, "silu" = None
    "silu" makes a result z into ``z / (1 + exp(-z))``.
cu_seqlens : starts [N + 1] = None
    The batch is one row of N packed sequences. From 0 to T, never decreasing.
initial_state : learned [N, C, W - 1] = None
    The W - 1 tokens before each sequence (each batch row, without `cu_seqlens`), oldest first. Same dtype as `x`.
    Zeros if not given.
return_state : all = False
    Return the state at the end of each sequence as well: its last W - 1 tokens, and those of `initial_state` if
    it is shorter.
out : out = None
    Takes the result, and is returned. Of the shape and type of `x`, sharing no memory with the inputs.
""",
    (Result("out", "[B, T, C]"), Result("state", "[N, C, W - 1]")),
    places=3,
    entry=_core.short_convolution,
    check=_core.check_short_convolution,
    backward=_core.short_convolution_backward,
    grads=ShortConvolutionGrads,
    cast=("x", "initial_state"),
    handler="attnmask_convolution",
    examples={
        "torch": """
>>> x = torch.arange(1.0, 6).reshape(1, 5, 1)
>>> weight = torch.tensor([[100.0, 10, 1]], requires_grad=True)
>>> out = attnmask.torch.short_convolution(x, weight, cu_seqlens=[0, 2, 5])
>>> out.flatten().tolist()
[1.0, 12.0, 3.0, 34.0, 345.0]
>>> out.sum().backward()
>>> weight.grad.tolist()
[[3.0, 8.0, 15.0]]
""",
        "jax": """
>>> x, weight = jnp.arange(1.0, 6).reshape(1, 5, 1), jnp.array([[100.0, 10, 1]])
>>> convolve = jax.jit(lambda weight: attnmask.jax.short_convolution(x, weight, cu_seqlens=[0, 2, 5]))
>>> convolve(weight).ravel().tolist()
[1.0, 12.0, 3.0, 34.0, 345.0]
>>> jax.grad(lambda weight: convolve(weight).sum())(weight).tolist()
[[3.0, 8.0, 15.0]]
""",
    },
)
SHORT_CONVOLUTION_VJP = with_gradient(SHORT_CONVOLUTION)
SHORT_CONVOLUTION_STEP = Row(
    "short_convolution_step",
    """
x : learned [B, C]
weight : learned [C, W]
state : state [slots, C, W - 1]
    The last W - 1 tokens of each sequence, the oldest first, of the type of `x`. It is written to: the oldest
    token goes, and `x` comes in. Without `state_indices` there are B slots, one for each row.
bias : learned [C] = None
activation : choice None, "silu" = None
state_indices : slots [B] = None
    The slot of each row; two rows may not share one. -1 leaves the row out, and its result is 0.
out : out = None
    Takes the result, and is returned.
""",
    (Result("out", "[B, C]"),),
    places=4,
    entry=_core.short_convolution_step,
    check=_core.check_short_convolution_step,
    trained="short_convolution",
    cast=("x",),
    handler="attnmask_convolution_step",
    examples={
        "torch": """
>>> weight, state = torch.tensor([[100.0, 10, 1]]), torch.zeros(1, 1, 2)
>>> [
...     attnmask.torch.short_convolution_step(torch.tensor([[token]]), weight, state).item()
...     for token in (1.0, 2.0, 3.0)
... ]
[1.0, 12.0, 123.0]
>>> state
tensor([[[2., 3.]]])
""",
        "jax": """
>>> weight, state = jnp.array([[100.0, 10, 1]]), jnp.zeros((1, 1, 2))
>>> for token in (1.0, 2.0, 3.0):
...     out, state = attnmask.jax.short_convolution_step(jnp.array([[token]]), weight, state)
>>> out.item(), state.ravel().tolist()
(123.0, [2.0, 3.0])
""",
    },
)
