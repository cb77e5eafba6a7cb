"""Programs of C and C++ that use the C library, its header under strict compilers, its symbols and its sizes."""

import ctypes
import os
import re
import shutil
import subprocess
import sys

import c_library as c
import numpy as np
import pytest
from environment import ROOT

import attnmask
from attnmask import MaskInfo, _core

pytestmark = c.needs_make

CC, CXX = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
STRICT = ["-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{ROOT}/include"]
ASAN = ["-fsanitize=address,undefined"] if "address" in c.BUILD.name else []


def run(*command, env=os.environ, **options):
    own = {
        name: value for name, value in env.items() if name != "LD_PRELOAD"
    }  # programs have their own sanitizer
    command = list(map(str, command))
    result = subprocess.run(command, env=own, capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def compiled(folder, source, *flags, static=False):
    program = folder / "program"
    build = c.built()
    link = (
        [build / "libattnmask.a", "-lm", "-pthread", "-fopenmp"] if static else [f"-L{build}", "-lattnmask"]
    )
    compiler = CXX if source.suffix == ".cpp" else CC
    run(compiler, *flags, *STRICT, *ASAN, source, "-o", program, *link, f"-Wl,-rpath,{build}")
    return program


@pytest.mark.parametrize("standard", ["c99", "c11", "c17", "c++11", "c++20"])
def test_header_is_strict(standard):
    language = "c++" if "++" in standard else "c"
    compiler = CXX if language == "c++" else CC
    run(compiler, f"-std={standard}", *STRICT, "-fsyntax-only", "-x", language, c.HEADER)


def numbers(seed, *shape):
    i = np.arange(np.prod(shape), dtype=np.int64)
    return (((seed * 7919 + i * 104729) % 2001 - 1000) / 500.0).astype(np.float32).reshape(shape)


def expected():
    """The results of program.c, in its order."""
    q, k, v = numbers(1, 2, 50, 4, 16), numbers(2, 2, 70, 2, 16), numbers(3, 2, 70, 2, 16)
    allowed = (MaskInfo.full(50, 70).apply_causal(20) | MaskInfo.full(50, 70).apply_kv_lengths([10])) & (
        MaskInfo.full(50, 70).apply_sliding_window((40, None), offset=20)
    )
    arguments = {
        "attention_mask": np.asarray(allowed.attention_mask),
        "alibi_slopes": [0.5, 0.25, 0.125, 0],
        "causal_offset": 20,
    }
    out, lse = attnmask.flash_attention(q, k, v, **arguments, return_lse=True)
    grads = attnmask.flash_attention_vjp(q, k, v, **arguments)[1](numbers(4, 2, 50, 4, 16))
    yield from (out, lse, *grads[:3])

    key, value, table = numbers(6, 35, 2, 16), numbers(7, 35, 2, 16), np.array([[3, 1, 4, 0, 2]], np.int32)
    caches = [np.zeros((5, 8, 2, 16), np.int8) for _ in range(2)]
    scales = {name: np.zeros((5, 8, 2, 1), np.float32) for name in ("k_scale", "v_scale")}
    slots = [table[0, i // 8] * 8 + i % 8 for i in range(30)]
    attnmask.write_kvcache(*caches, key[:30], value[:30], np.array(slots), **scales)
    steps = [
        attnmask.flash_attention_with_kvcache(
            query[None, None], *caches, key[None, None, i], value[None, None, i], cache_seqlens=i,
            block_table=table, causal=True, **scales,
        )
        for i, query in enumerate(numbers(5, 5, 4, 16), 30)
    ]  # fmt: skip
    yield from (np.concatenate(steps), caches[0])

    q, k, v = (numbers(seed, 1, 40, 4, 16) for seed in (8, 9, 10))
    (out, state), vjp = attnmask.linear_attention_vjp(
        q, k, v, beta=numbers(11, 1, 40, 4), cu_seqlens=np.array([0, 25, 40]), normalize_qk=True, return_state=True,
    )  # fmt: skip
    yield from (out, vjp(q).query)
    yield attnmask.linear_attention_step(*(x[0, :2].copy() for x in (q, k, v)), state)
    yield state

    yield np.array([0, 2, 5, 5, 6], np.int32)
    yield np.array([0, 0, 1, 1, 1, 3], np.int32)
    yield attnmask.chunk_global_cumsum(numbers(12, 1, 6, 1), cu_seqlens=[0, 2, 5, 5, 6])


@pytest.mark.parametrize("level", ["", "baseline", "plain"])
@pytest.mark.parametrize("static", [False, True], ids=["shared", "static"])
def test_a_program_of_c(tmp_path, static, level):
    program = compiled(tmp_path, ROOT / "tests/c/program.c", "-std=c99", static=static)
    said = run(program, tmp_path / "results", env=os.environ | {"ATTNMASK_ISA": level})
    version, used, threads = re.fullmatch(r"(\S+) (\S+) (\d+): call must be given, got NULL\n", said).groups()
    assert (version, int(threads)) == (attnmask.__version__, 2)
    assert used == level or (not level and used in attnmask.show_config(mode="dict")["isa_available"])
    results = (tmp_path / "results").read_bytes()
    before = _core.use_isa(used)
    try:
        wanted = list(expected())
    finally:
        _core.use_isa(before)
    assert len(results) == sum(x.nbytes for x in wanted)
    at = 0
    for i, x in enumerate(wanted):
        got = np.frombuffer(results, x.dtype, x.size, at).reshape(x.shape)
        np.testing.assert_array_equal(got, x, err_msg=f"result {i}")
        at += x.nbytes


def test_threads_of_cpp(tmp_path):
    program = compiled(tmp_path, ROOT / "tests/c/program.cpp", "-std=c++11")
    run(program, tmp_path / "results", env=os.environ | {"ATTNMASK_ISA": "baseline"})
    q, k, v = (numbers(seed, 2, 150, 4, 32) for seed in (1, 2, 3))
    before = _core.use_isa("baseline")
    try:
        wanted = attnmask.flash_attention(q, k, v, causal=True)
    finally:
        _core.use_isa(before)
    assert (tmp_path / "results").read_bytes() == wanted.tobytes()


# What programs depend on


def test_interface():
    """After a change of the header: .ci/make_abi.py, and a line in CHANGELOG.md that names the number."""
    result = subprocess.run(
        [sys.executable, ROOT / ".ci/make_abi.py", "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def symbols(*flags):
    lines = run("nm", "--defined-only", "--extern-only", *flags).splitlines()
    return sorted(line.split()[-1].removeprefix("_") for line in lines if len(line.split()) == 3)


@pytest.mark.skipif(bool(ASAN) or not shutil.which("nm"), reason="sanitizers have symbols of their own")
def test_no_other_symbols():
    build = c.built()
    assert symbols("-D", build / "libattnmask.so") == c.FUNCTIONS
    assert symbols(build / "libattnmask.a") == c.FUNCTIONS


@pytest.mark.skipif(bool(ASAN) or not shutil.which("readelf"), reason="sanitizers link more")
def test_links_nothing_but_c_and_openmp():
    needed = re.findall(r"NEEDED.*\[(\w+)", run("readelf", "-d", c.built() / "libattnmask.so"))
    assert set(needed) <= {"libm", "libc", "libgomp", "libomp", "libpthread", "ld"}


@pytest.mark.skipif(bool(ASAN), reason="one build is enough")
def test_installed(tmp_path):
    """With pkg-config and CMake where there are; anywhere, as nothing of it knows the prefix."""
    own = os.environ | {"MAKEFLAGS": ""}
    run("make", "-s", "install-lib", f"PREFIX={tmp_path}/first", cwd=ROOT, env=own)
    (tmp_path / "first").rename(tmp_path / "moved")
    installed = tmp_path / "moved"
    flags = [f"-I{installed}/include", f"-L{installed}/lib", "-lattnmask"]
    if shutil.which("pkg-config"):
        paths = own | {"PKG_CONFIG_PATH": f"{installed}/lib/pkgconfig"}
        flags = run("pkg-config", "--cflags", "--libs", "attnmask", env=paths).split()
        assert run("pkg-config", "--modversion", "attnmask", env=paths).strip() == attnmask.__version__
    source = ROOT / "tests/c/program.c"
    run(CC, source, "-o", tmp_path / "program", *flags, f"-Wl,-rpath,{installed}/lib")
    run(tmp_path / "program", tmp_path / "results")
    if shutil.which("cmake"):
        (tmp_path / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.16)\nproject(test C)\nfind_package(attnmask REQUIRED)\n"
            f"add_executable(one {source})\ntarget_link_libraries(one attnmask::attnmask)\n"
            f"add_executable(other {source})\ntarget_link_libraries(other attnmask::static)\n"
        )
        run("cmake", "-S", tmp_path, "-B", tmp_path / "cmake", f"-DCMAKE_PREFIX_PATH={installed}")
        run("cmake", "--build", tmp_path / "cmake")
        for program in ("one", "other"):
            run(tmp_path / "cmake" / program, tmp_path / "results")


def test_structs_are_as_the_compiler_lays_them_out(tmp_path):
    lines = [f'printf("{name} %zu\\n", sizeof({name}));' for name in c.STRUCTS]
    (tmp_path / "sizes.c").write_text(
        '#include <stdio.h>\n#include "attnmask.h"\nint main(void) { ' + " ".join(lines) + " return 0; }\n"
    )
    run(CC, *STRICT, tmp_path / "sizes.c", "-o", tmp_path / "sizes")
    sizes = dict(line.split() for line in run(tmp_path / "sizes").splitlines())
    assert sizes == {name: str(ctypes.sizeof(of)) for name, of in c.STRUCTS.items()}


OF_OTHER_FILES = {"-fPIC", "-fwrapv", "-fopenmp"}  # or what Python adds


def flags_of(command):
    """Return the flags of a compiler's command that decide the bits and the speed of a kernel."""
    words = set(command.split()) - OF_OTHER_FILES
    flags = {word for word in words if word.startswith(("-m", "-f", "-std=", "-DLEVEL=", "-DAM_HAVE_"))}
    return flags, [word for word in command.split() if word.startswith("-O")][-1]


def kernels_of(commands):
    """The flags of each kernel, by its level and its object."""
    found = {}
    for command in commands:
        if level := re.search(r"-DLEVEL=(\w+)", command):
            found[level[1], re.search(r"-o \S*/(\w+)\.o", command)[1]] = flags_of(command)
    return found


@pytest.mark.skipif(not (ROOT / "build/editable/csrc").exists(), reason="the package is not built in place")
def test_kernels_are_compiled_as_those_of_the_extension():
    """setup.py and csrc/lib.mk both read csrc/rules.mk, and agree on what else they pass."""
    extension = kernels_of(path.read_text() for path in (ROOT / "build/editable/csrc").rglob("*.txt"))
    printed = run("make", "-n", "-B", "-f", "csrc/lib.mk", cwd=ROOT, env=os.environ | {"MAKEFLAGS": ""})
    library = kernels_of(printed.replace("\\\n", " ").splitlines())
    assert len(library) > 10
    assert library == extension
