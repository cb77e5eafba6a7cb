"""The operator of calls that ask for little: in C, of tensors that are read and made by DLPack's table of functions."""

import ctypes
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from environment import ROOT
from headers import check_declarations

import attnmask
from attnmask import _core

HEADER = ROOT / "csrc/bind/dlpack/dlpack.h"
STRUCTS = {
    "am_dl_version": "DLPackVersion; major minor",
    "am_dl_device": "DLDevice; kind=device_type index=device_id",
    "am_dl_type": "DLDataType; kind=code bits lanes",
    "am_dl_tensor": "DLTensor; data device axes=ndim type=dtype shape strides byte_offset",
    "am_dl_managed": "DLManagedTensorVersioned; version context=manager_ctx release=deleter flags tensor=dl_tensor",
    "am_dl_exchange": "DLPackExchangeAPI; version=header.version previous=header.prev_api "
    "allocate=managed_tensor_allocator share=managed_tensor_from_py_object_no_sync "
    "to_object=managed_tensor_to_py_object_no_sync look=dltensor_from_py_object_no_sync stream=current_work_stream",
}
VALUES = {"CPU": "kDLCPU", "FLOAT": "kDLFloat", "BFLOAT": "kDLBfloat", "MAJOR": "DLPACK_MAJOR_VERSION"}
TYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture
def operator(torch):
    return torch.ops.attnmask.flash_attention_plain.default


@pytest.fixture
def no_python(torch, monkeypatch):
    """The function that the operator has in Python calls this one of NumPy."""

    def fail(*_, **__):
        raise AssertionError("attention was called in Python")

    from attnmask._faces.attention import ATTENTION

    monkeypatch.setattr(ATTENTION, "entry", fail)


def as_numpy(torch, tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


def assert_right(torch, tensors, more, got):
    """The bits that NumPy gets, in a tensor that is laid out like a new one."""
    causal, offset, scale = more
    arrays = [as_numpy(torch, x) for x in tensors]
    right = attnmask.flash_attention(*arrays, causal=causal, causal_offset=offset, softmax_scale=scale)
    assert got.shape == right.shape
    assert got.dtype == tensors[0].dtype
    assert got.is_contiguous()
    assert as_numpy(torch, got).tobytes() == right.tobytes()


def test_the_header_is_dlpacks(torch, tmp_path):
    assert {*re.findall(r"\bAM_DL_([A-Z]+)(?= = )", HEADER.read_text())} == {*VALUES, "MINOR"}
    check_declarations(
        tmp_path,
        Path(torch.__file__).parent / "include",
        ["<ATen/dlpack.h>", f'"{HEADER}"'],
        STRUCTS,
        {f"AM_DL_{ours}": theirs for ours, theirs in VALUES.items()},
        ["(int)AM_DL_MINOR <= (int)DLPACK_MINOR_VERSION"],
    )


# Results

SHAPES = {
    "usual": ((2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8)),
    "shared heads": ((1, 9, 6, 16), (1, 9, 2, 16), (1, 9, 2, 3)),
    "one query": ((3, 1, 2, 8), (3, 40, 2, 8), (3, 40, 2, 8)),
    "no queries": ((2, 0, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8)),
    "no keys": ((2, 5, 4, 8), (2, 0, 4, 8), (2, 0, 4, 8)),
    "no batch rows": ((0, 5, 4, 8),) * 3,
    "no heads": ((2, 5, 0, 8), (2, 7, 0, 8), (2, 7, 0, 8)),
    "no channels": ((2, 5, 4, 0), (2, 7, 4, 0), (2, 7, 4, 0)),
    "more than a megabyte": ((1, 70, 64, 64), (1, 70, 64, 64), (1, 70, 64, 128)),
}
MORE = ((False, 0, None), (True, 0, None), (True, 2, 0.25), (True, -3, 2.0), (False, 1, -1.0))


@pytest.mark.usefixtures("no_python")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_bits(torch, operator, monkeypatch, shapes, dtype):
    tensors = [torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes]
    results = [operator(*tensors, *more) for more in MORE]
    monkeypatch.undo()
    for more, got in zip(MORE, results, strict=True):
        assert_right(torch, tensors, more, got)


LAYOUTS = {
    "swapped": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels apart": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "every second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "within a larger one": lambda x: x.new_zeros(4, *x.shape).copy_(x)[2],
    "shared": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.usefixtures("no_python")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(torch, operator, monkeypatch, layout):
    results = []
    for place in range(3):
        tensors = [torch.randn(2, 5, 4, 8) for _ in range(3)]
        tensors[place] = layout(tensors[place])
        results.append((tensors, operator(*tensors, True, 0, None)))
    monkeypatch.undo()
    for tensors, got in results:
        assert_right(torch, tensors, (True, 0, None), got)


@pytest.mark.usefixtures("no_python")
def test_what_a_result_is(torch, operator):
    """A tensor like any other, which lives as long as it is of use, and keeps nothing else alive."""
    query = torch.randn(1, 5, 2, 8)
    for more in MORE[:3]:
        torch.library.opcheck(operator, (query, query, query, *more))
    out = operator(query, query, query, True, 0, None)
    assert type(out) is torch.Tensor
    assert not out.requires_grad
    assert out.device.type == "cpu"
    row, right = out[0, 3], out[0, 3].clone()
    out = None
    for _ in range(50):  # these would take its memory
        operator(query + 1, query, query, True, 0, None)
    torch.testing.assert_close(row, right, rtol=0, atol=0)
    row.mul_(2)
    torch.testing.assert_close(row, 2 * right, rtol=0, atol=0)
    learned = torch.randn(8, requires_grad=True)
    (operator(query, query, query, True, 0, None) * learned).sum().backward()
    assert learned.grad is not None


# Calls that are left to Python


def test_what_is_unusual_goes_to_the_other_function(torch):
    calls = []

    def other(*arguments):
        calls.append(arguments)
        return "other"

    attend = _core.tensor_attention(torch.Tensor.__dlpack_c_exchange_api__, other)
    x = torch.randn(1, 4, 2, 8)
    usual = x, x, x, True, 0, None
    assert isinstance(attend(*usual), torch.Tensor)
    assert calls == []
    raw = torch.zeros(4 * x.numel() + 1, dtype=torch.uint8)
    misaligned = torch.from_numpy(np.frombuffer(raw.numpy(), np.uint8)[1:].view(np.float32).reshape(x.shape))
    negated, zeros = torch._neg_view(-x), torch._efficientzerotensor(x.shape)
    changes = {
        0: (x.double(), x.int(), x[0], x.numpy(), None, x[:, :, :1], x.clone().requires_grad_(), misaligned),
        1: (x[..., :4], x.bfloat16(), x.repeat(2, 1, 1, 1), x.to("meta"), negated),
        2: (x[:, :3], x[:, :, :1], x.to(torch.float8_e4m3fn), zeros),
        3: (None, 1, "True"),
        4: (True, "bottom-left", 2**60, 2**70, torch.tensor(1), 1.0),
        5: (1, "1", float("nan"), float("inf"), 1e31),
    }
    for place, values in changes.items():
        for value in values:
            arguments = [*usual]
            arguments[place] = value
            assert attend(*arguments) == "other", (place, value)
            assert len(calls) == 1
            assert all(got is given for got, given in zip(calls.pop(), arguments, strict=True))
    assert attend(x) == "other"
    assert attend(*usual, 1) == "other"

    def failing(*_):
        raise LookupError("said by the other")

    with pytest.raises(LookupError, match="said by the other"):
        _core.tensor_attention(torch.Tensor.__dlpack_c_exchange_api__, failing)(x[0], x, x, True, 0, None)


def test_errors(torch, operator):
    """Of the operator, and of the function that comes before it."""
    x = torch.randn(1, 4, 1, 8)
    for tensors, more, error, message in (
        ((x, x.double(), x), {}, TypeError, "key must be float32 as query, got float64"),
        ((x[0], x[0], x[0]), {}, ValueError, r"query must be \[B, Tq, H, D\], got float32 array"),
        ((x, x[..., :4], x), {}, ValueError, "key must have D = 8 as query"),
        ((x.int(), x.int(), x.int()), {}, TypeError, "query must be of float16, bfloat16"),
        ((x, x, x), {"causal_offset": 2**62}, ValueError, "causal_offset must be at most"),
        ((x, x, x), {"softmax_scale": float("nan")}, ValueError, "softmax_scale must be a number, got nan"),
        ((x, x, x), {"softmax_scale": float("inf")}, ValueError, "softmax_scale must be finite, got inf"),
    ):
        given = {"causal": True, "causal_offset": 0, "softmax_scale": None} | more
        for call in (
            lambda tensors=tensors, given=given: operator(*tensors, *given.values()),
            lambda tensors=tensors, given=given: attnmask.torch.flash_attention(*tensors, **given),
        ):
            with pytest.raises(error, match=message):
                call()
    with pytest.raises(TypeError, match="query must be a tensor that needs no gradient"):
        operator(x.clone().requires_grad_(), x, x, True, 0, None)
    long = torch.zeros(1, 1, 1, 1).expand(1, 2**20, 1, 1)
    wide = torch.zeros(1, 1, 1, 1).expand(1, 1, 1, 2**38)
    with pytest.raises(MemoryError):
        operator(long, long[:, :1], wide, False, 0, None)


class Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


def of_table(table, function):
    """What the core makes of a table of functions."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return _core.tensor_attention(new(ctypes.addressof(table), b"dlpack_exchange_api", None), function)


@pytest.mark.parametrize(("major", "taken"), [(1, True), (2, False), (0, False)])
def test_tables_of_other_versions(torch, major, taken):
    find = ctypes.pythonapi.PyCapsule_GetPointer
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    place = find(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    table = ctypes.create_string_buffer(ctypes.string_at(place, 56), 56)
    Version.from_buffer(table).major = major
    assert (of_table(table, print) is not print) == taken


def test_without_a_table():
    assert _core.tensor_attention(None, print) is print


# Where it is called


@pytest.mark.usefixtures("no_python")
def test_threads(torch, operator):
    """With and without other calls at the same time, each gets its own result."""
    cases = [[torch.randn(1, 8 * (i + 1), 2, 8) for _ in range(3)] for i in range(4)]
    right = [operator(*tensors, True, 0, None) for tensors in cases]
    start = threading.Barrier(4, timeout=60)

    def work(i):
        start.wait()
        return [operator(*cases[i], True, 0, None) for _ in range(200)]

    with ThreadPoolExecutor(4) as pool:
        for results, one in zip(pool.map(work, range(4)), right, strict=True):
            assert all(torch.equal(got, one) for got in results)


def test_an_interrupt_ends_a_long_call(torch, operator):
    query = torch.randn(1, 60000, 8, 64)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            operator(query, query, query, False, 0, None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def attend(query, key, value):
    return attnmask.torch.flash_attention(query, key, value, causal=True, causal_offset=1, softmax_scale=0.5)


@pytest.mark.usefixtures("no_python")
@pytest.mark.parametrize("mode", ["enable_grad", "no_grad", "inference_mode"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(torch, operator, monkeypatch, mode, dynamic):
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    kept = []
    with getattr(torch, mode)():
        for length in 5, 6:
            tensors = [torch.randn(1, length, 2, 8) for _ in range(3)]
            got = compiled(*tensors)
            assert got.is_inference() == (mode == "inference_mode")
            kept.append((tensors, got))
    monkeypatch.undo()
    for tensors, got in kept:
        assert_right(torch, tensors, (True, 1, 0.5), got)


@pytest.mark.usefixtures("no_python")
@pytest.mark.parametrize("dtype", TYPES)
def test_eager(torch, monkeypatch, dtype):
    """Calls that ask for little go to the same function, past the dispatcher."""
    tensors = [torch.randn(shape).to(getattr(torch, dtype)) for shape in SHAPES["shared heads"]]
    results = [
        attnmask.torch.flash_attention(*tensors, causal=causal, causal_offset=offset, softmax_scale=scale)
        for causal, offset, scale in MORE
    ]
    default = attnmask.torch.flash_attention(*tensors, causal=True)
    monkeypatch.undo()
    for more, got in zip((*MORE, (True, 0, None)), (*results, default), strict=True):
        assert_right(torch, tensors, more, got)


def test_eager_calls_that_are_wrong(torch):
    x = torch.randn(1, 4, 1, 8)
    for more, error, message in (
        ({"out": None}, TypeError, "unexpected keyword argument 'out'"),
        ({"nonsense": None}, TypeError, "unexpected keyword argument 'nonsense'"),
        ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
        ({"causal": None}, TypeError, "causal must be True or False, got None"),
        ({"causal_offset": True}, TypeError, "causal_offset must be an integer"),
        ({"causal_offset": "bottom_right"}, ValueError, "did you mean 'bottom-right'"),
    ):
        with pytest.raises(error, match=message):
            attnmask.torch.flash_attention(x, x, x, **more)
    for place, name in enumerate(("query", "key", "value")):
        tensors = [x, x, x]
        for wrong, message in (
            (x.numpy(), f"{name} must be a tensor, got float32 array"),
            (None, f"{name} must be a tensor, got None"),
            (x.to("meta"), f"{'key' if name == 'query' else name} must be on (cpu|meta) as query"),
        ):
            tensors[place] = wrong
            with pytest.raises(TypeError, match=message):
                attnmask.torch.flash_attention(*tensors)


# Without PyTorch: a table of our own


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("axes", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Look = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
Give = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Table(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("before", ctypes.c_void_p * 3),
        ("to_object", Give),
        ("look", Look),
        ("stream", ctypes.c_void_p),
    ]


class Plain:
    """A tensor of ones that the table below describes."""

    requires_grad = False
    shape = (ctypes.c_int64 * 4)(1, 3, 2, 4)
    numbers = (ctypes.c_float * 24)(*[1] * 24)

    def __init__(self, *strides):
        self.strides = (ctypes.c_int64 * 4)(*strides) if strides else None

    def is_neg(self):
        return False


@pytest.mark.parametrize("strides", [(), (24, 8, 4, 1)], ids=["without strides", "with strides"])
def test_a_tensor_without_strides(strides):
    """DLPack allowed that for compact ones before version 1.2: they are left to the other function."""
    given = []

    @Look
    def look(plain, to):
        to[0] = Tensor(
            data=ctypes.addressof(plain.numbers),
            device=(1, 0),
            axes=4,
            kind=2,
            bits=32,
            lanes=1,
            shape=plain.shape,
        )
        if plain.strides is not None:
            to[0].strides = plain.strides
        return 0

    @Give
    def give(managed, to):
        given.append(managed)
        ctypes.c_void_p.from_address(to).value = id(None)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(None))
        return 0

    table = Table(version=(1, 3), to_object=give, look=look)
    attend = of_table(table, lambda *_: "the other")
    tensor = Plain(*strides)
    assert attend(tensor, tensor, tensor, False, 0, None) == (None if strides else "the other")
    assert len(given) == (1 if strides else 0)
