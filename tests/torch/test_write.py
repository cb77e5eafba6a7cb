"""attnmask.torch.write_kvcache in graphs, with slots of any kind, and its errors."""

import numpy as np
import pytest
from flash_cases import F32
from slot_cases import BAD, DV, HKV, PAGES, SIZE, D, cache_of, copied, good, tokens_of
from tensors import tensor

import attnmask

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
NAMES = ("k_cache", "v_cache", "k_scale", "v_scale")
SLOTS = np.array([19, -1, 3, 4, 0])


def tensors(torch, arguments) -> dict:
    return {name: tensor(torch, x) for name, x in copied(arguments).items()}


def written(arguments) -> dict:
    return {
        name: attnmask._common.arguments.as_array(arguments[name], name).tobytes()
        for name in NAMES
        if name in arguments
    }


@pytest.mark.parametrize("kind", [F32, np.dtype(np.int8), "int4"], ids=str)
@pytest.mark.parametrize("rotate", [False, True])
def test_written_and_attended_to_in_a_graph(torch, kind, rotate):
    """A graph that writes, then attends, gives the bits of a call that appends; slots are an input."""
    rng = np.random.default_rng(0)
    cache, new = cache_of(rng, kind), tokens_of(rng, 2, F32)
    query = rng.standard_normal((1, 2, 4, D)).astype(F32)
    table = np.array([[3, 1]], np.int32)
    expected = copied(cache)
    right = attnmask.flash_attention_with_kvcache(
        query,
        **expected,
        **{name: x[None] for name, x in new.items()},
        cache_seqlens=3,
        block_table=table,
        rotate=rotate,
    )

    def step(cache, key, value, slots, query, table):
        attnmask.torch.write_kvcache(**cache, key=key, value=value, slot_mapping=slots, rotate=rotate)
        return attnmask.torch.flash_attention_with_kvcache(
            query, **cache, cache_seqlens=5, block_table=table, rotate=rotate
        )

    given = tensors(torch, {**new, "slots": np.array([3 * SIZE + 3, SIZE]), "query": query, "table": table})
    backends = ["aot_eager", "inductor"][: 1 + (kind == F32 and not rotate)]
    for run in (step, *(torch.compile(step, backend=backend, fullgraph=True) for backend in backends)):
        held = tensors(torch, cache)
        assert run(held, **given).numpy().tobytes() == right.tobytes()
        assert written(held) == written(expected)


def test_exported(torch):
    """With caches as buffers, for any number of tokens."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("k_cache", torch.zeros(PAGES, SIZE, HKV, D))
            self.register_buffer("v_cache", torch.zeros(PAGES, SIZE, HKV, DV))

        def forward(self, key, value, slots):
            attnmask.torch.write_kvcache(self.k_cache, self.v_cache, key, value, slots)
            return self.k_cache.sum()

    rng = np.random.default_rng(0)
    tokens = torch.export.Dim("tokens", min=2, max=16)
    inputs = tuple(tensor(torch, x) for x in (*tokens_of(rng, 5).values(), SLOTS))
    program = torch.export.export(Module(), inputs, dynamic_shapes=({0: tokens},) * 3)
    for module in (program.module(), program.run_decompositions().module()):
        key, value = tokens_of(rng, 7).values()
        slots = rng.permutation(PAGES * SIZE)[:7]
        module(*(tensor(torch, x) for x in (key, value, slots)))
        assert module.k_cache.flatten(0, 1)[slots].numpy().tobytes() == key.tobytes()
        assert module.v_cache.flatten(0, 1)[slots].numpy().tobytes() == value.tobytes()


def test_a_latent_cache_in_a_graph(torch):
    """Values are a view of the keys, in the operator too."""

    def write(latent, key, slots):
        attnmask.torch.write_kvcache(latent, latent[..., :16], key, None, slots)
        return latent.sum()

    key, slots = torch.ones(2, 1, 24), torch.tensor([5, -1])
    for run in (write, torch.compile(write, backend="aot_eager", fullgraph=True)):
        latent = torch.zeros(2, 4, 1, 24)
        assert run(latent, key, slots) == 24
        assert latent.flatten(0, 2).any(-1).nonzero().tolist() == [[5]]


def test_slots_of_any_kind(torch):
    for slots in ([5, -1], (5, -1), np.array([5, -1], np.int8), torch.tensor([5, -1], dtype=torch.int32)):
        caches = [torch.zeros(3, 4, 1, 8) for _ in "kv"]
        attnmask.torch.write_kvcache(*caches, torch.ones(2, 1, 8), torch.ones(2, 1, 8), slots)
        assert caches[1].flatten(0, 2).any(-1).nonzero().tolist() == [[5]]


# Bad input


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        case
        for case in BAD
        if all(x is None or isinstance(x, (bool, int, np.ndarray)) for x in case[0].values())
        and not any(
            isinstance(x, np.ndarray) and not (x.dtype.isnative and x.flags.writeable)
            for x in case[0].values()
        )
    ],
)
def test_bad_input(torch, wrong, error, message):
    """NumPy's errors, eager and from the operator; nothing is written."""
    if "key" in wrong and wrong["key"] is None:
        message = "key must be a tensor, got None"
    arguments = tensors(torch, good() | wrong)
    with pytest.raises(error, match=message):
        attnmask.torch.write_kvcache(**arguments)
    compiled = torch.compile(attnmask.torch.write_kvcache, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=message.split(", got")[0]):
        compiled(**arguments)
    for name in ("k_cache", "v_cache"):
        assert (arguments[name] == tensors(torch, good() | wrong)[name]).all()


def test_the_other_function_in_a_graph(torch):
    """It ends the graph, or says what goes into one."""

    def write(*arguments):
        attnmask.write_kvcache(*arguments)

    arguments = list(tensors(torch, good()).values())
    with pytest.raises(Exception, match=r"call attnmask\.torch\.write_kvcache, which goes into graphs"):
        torch.compile(write, backend="eager", fullgraph=True)(*arguments)
    assert (arguments[0] == 7).all()
    torch.compile(write, backend="eager")(*arguments)
    assert (arguments[0] == 0).any()
