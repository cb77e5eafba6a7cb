"""The handlers that attnmask.jax gives to XLA: their binary interface, and that JAX takes them."""

import ctypes
import re

import numpy as np
import pytest
from environment import ROOT
from headers import check_declarations

from attnmask import _core

HEADER = ROOT / "csrc/bind/xla/ffi.h"
STRUCTS = {
    "extension": "Extension_Base; struct_size type next",
    "version": "Api_Version; extensions=extension_start major=major_version minor=minor_version",
    "metadata": "Metadata; struct_size version=api_version traits",
    "metadata_extension": "Metadata_Extension; base=extension_base metadata",
    "error_args": "Error_Create_Args; extensions=extension_start message code=errc",
    "api": "Api; version=api_version internal=internal_api create_error=XLA_FFI_Error_Create",
    "buffer": "Buffer; extensions=extension_start dtype data rank shape=dims",
    "buffers": "Args; extensions=extension_start count=size types buffers=args",
    "array": "Array; dtype size data",
    "name": "ByteSpan; text=ptr length=len",
    "attributes": "Attrs; extensions=extension_start count=size types names values=attrs",
    "call_frame": "CallFrame; extensions=extension_start api context=ctx stage arguments=args results=rets "
    "attributes=attrs",
}
BEGINNINGS = {"metadata", "api", "call_frame"}  # of structs that have more
VALUES = {
    "METADATA": "Extension_Metadata", "INVALID_ARGUMENT": "Error_Code_INVALID_ARGUMENT",
    "RESOURCE_EXHAUSTED": "Error_Code_RESOURCE_EXHAUSTED", "ABORTED": "Error_Code_ABORTED",
    "BUFFER": "ArgType_BUFFER", "ARRAY": "AttrType_ARRAY", "EXECUTE": "ExecutionStage_EXECUTE", "MAJOR": "API_MAJOR",
}  # fmt: skip
TYPES = ("PRED", "S8", "S16", "S32", "S64", "U8", "U16", "U32", "U64", "F16", "F32", "F64", "BF16")
VALUES |= {name: f"DataType_{name}" for name in TYPES}
FORMATS = HEADER.parents[2] / "core/cache/formats.c"  # types that only caches have
FLOAT8 = {"float8_e4m3fn": "F8E4M3FN", "float8_e5m2": "F8E5M2"}


def test_the_header_is_jaxlibs(tmp_path):
    jax = pytest.importorskip("jax")
    declared = set(re.findall(r"\bAM_XLA_([A-Z0-9_]+)(?= = )", HEADER.read_text()))
    assert declared == VALUES.keys() | {"MINOR"}
    numbers = dict(re.findall(r'"(float8\w+)",.* \.xla = (\d+)\}', FORMATS.read_text()))
    assert numbers.keys() == FLOAT8.keys()
    check_declarations(
        tmp_path,
        jax.ffi.include_dir(),
        ['"xla/ffi/api/c_api.h"', f'"{HEADER}"'],
        {f"am_xla_{ours}": f"struct XLA_FFI_{theirs}" for ours, theirs in STRUCTS.items()},
        {f"AM_XLA_{ours}": f"XLA_FFI_{theirs}" for ours, theirs in VALUES.items()},
        [f"{number} == (int)XLA_FFI_DataType_{FLOAT8[name]}" for name, number in numbers.items()]
        + ["AM_XLA_MINOR <= XLA_FFI_API_MINOR"],
        {f"am_xla_{ours}" for ours in BEGINNINGS},
    )


HEAD = [("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p)]


class Extension(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p)]


class Version(ctypes.Structure):
    _fields_ = [*HEAD, ("major", ctypes.c_int), ("minor", ctypes.c_int)]


class Metadata(ctypes.Structure):
    _fields_ = [HEAD[0], ("version", Version), ("traits", ctypes.c_uint32), ("state_type_id", ctypes.c_int64)]


class MetadataExtension(ctypes.Structure):
    _fields_ = [("base", Extension), ("metadata", ctypes.POINTER(Metadata))]


class CallFrame(ctypes.Structure):
    _fields_ = [*HEAD, ("rest", ctypes.c_char * 256)]


@pytest.mark.parametrize("name", _core.xla_handlers())
def test_metadata(name):
    """The version is one that every jaxlib takes; what is not ours is left alone, as older ones have no such field."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(
        get_pointer(_core.xla_handlers()[name], None)
    )
    metadata = Metadata(state_type_id=77, traits=5, version=Version(major=9, minor=9))
    extension = MetadataExtension(
        Extension(ctypes.sizeof(MetadataExtension), 1, None), ctypes.pointer(metadata)
    )
    frame = CallFrame(ctypes.sizeof(CallFrame), ctypes.addressof(extension))
    assert handler(ctypes.addressof(frame)) is None
    assert (metadata.version.major, metadata.version.minor, metadata.traits) == (0, 1, 0)
    assert metadata.state_type_id == 77


def test_a_runtime_that_refuses(monkeypatch):
    """Then there is a warning, and the callback, with the same results."""
    jax = pytest.importorskip("jax")
    import attnmask.jax
    from attnmask.jax import _call as _jax_call

    def refuse(*_, **__):
        raise ValueError("unsupported version")

    x = np.random.default_rng(0).random((1, 4, 1, 8), np.float32)
    right = attnmask.flash_attention(x, x, x, causal=True)
    monkeypatch.setattr(_jax_call, "_accepted", None)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    attend = jax.jit(lambda x: attnmask.jax.flash_attention(x, x, x, causal=True))
    with pytest.warns(RuntimeWarning, match=r"refuses its handlers \(unsupported version\)"):
        text = attend.lower(x).as_text()
    assert "callback" in text
    assert "attnmask" not in text
    np.testing.assert_array_equal(attend(x), right)


def test_the_callback_where_asked_for():
    jax = pytest.importorskip("jax")
    import attnmask.jax

    x = np.random.default_rng(0).random((1, 4, 1, 8), np.float32)
    for callback in (False, True):
        attend = jax.jit(
            lambda x, callback=callback: attnmask.jax.flash_attention(x, x, x, callback=callback)
        )
        text = attend.lower(x).as_text()
        assert ("callback" in text) == callback
        assert ("attnmask_flash_forward" in text) != callback
        np.testing.assert_array_equal(attend(x), attnmask.flash_attention(x, x, x))
    ids = np.array([[0, 0, 1, 1]], np.int32)
    info = attnmask.MaskInfo.from_segments(ids).apply_causal()

    def loss(x, bias, info, seed, callback):
        more = {"dropout_prob": 0.3, "dropout_seed": seed, "callback": callback}
        out, lse = attnmask.jax.flash_attention(
            x, x, x, info, bias, softmax_aux=bias[0], return_lse=True, **more
        )
        return (out**2).sum() + lse.sum()

    bias = x[0, :, 0, :4]
    found = []
    for callback in (False, True):
        grad = jax.grad(lambda *given, callback=callback: loss(*given, callback), argnums=(0, 1))
        mapped = jax.vmap(grad, in_axes=(0, None, None, None))
        found.append((jax.jit(grad)(x, bias, info, 5), jax.jit(mapped)(np.stack([x, 2 * x]), bias, info, 5)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    with pytest.raises(TypeError, match="callback must be True or False"):
        jax.jit(lambda x: attnmask.jax.flash_attention(x, x, x, callback=1))(x)
