"""Builds the C core: one object per instruction set with its own flags, everything else for any processor.

Switches, read from the environment; a build with others than the last one starts afresh:

ATTNMASK_DEBUG=1                       assertions on, no optimization, debug symbols
ATTNMASK_SANITIZE=address,undefined    build with these sanitizers (or thread)
ATTNMASK_WERROR=1                      warnings are errors
ATTNMASK_FAULTS=1                      allocations fail on request, for tests/test_allocation_faults.py

The first two emulate what multiplies bfloat16 on other processors, so that its kernels are tried on any.
"""

import os
import platform
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError
from setuptools.modified import newer_group

ROOT = Path(__file__).parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

# Floating-point contraction stays off: a result must not depend on where a vector ends and its tail begins.
CFLAGS = ["-std=gnu11", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
CFLAGS += ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes"]

# Kernel file -> flags. Levels in the order in which the dispatcher climbs them.
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
AVX512BF16 = [*AVX512, "-mavx512vnni", "-mavx512bf16"]
AMX = [*AVX512BF16, "-mamx-tile", "-mamx-bf16"]
X86_KERNELS = {"avx2": AVX2, "avx512": AVX512, "avx512bf16": AVX512BF16, "amx": AMX}
# GCC would load the numbers of several rows before it multiplies the first, for which there are no registers.
ARM_BASELINE = ["-fno-schedule-insns"]
# Else code elsewhere decides where in a line of the cache a kernel's loops begin, and how fast they are: positions of
# tokens took 0.134 or 0.152 ms.
ALIGNED = ["-falign-functions=64", "-falign-loops=64"]
# What assemblers may not know that are older than their compiler.
INSTRUCTIONS = {"avx512bf16": "vdpbf16ps %zmm0, %zmm0, %zmm0", "amx": "tdpbf16ps %tmm0, %tmm1, %tmm2"}


def sources(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def switch(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


class BuildExt(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:  # else every object is made again
            self.build_temp = "build/editable"

    def build_extension(self, ext: Extension) -> None:
        self.check_tools()
        flags, of_kernels = list(CFLAGS), []
        sanitizers = os.environ.get("ATTNMASK_SANITIZE")
        flags += ["-O0", "-g", "-UNDEBUG"] if switch("ATTNMASK_DEBUG") else ["-O3", "-g1"]
        flags += ["-Werror"] if switch("ATTNMASK_WERROR") else []
        if switch("ATTNMASK_DEBUG") or sanitizers:
            ext.define_macros += [("AM_EMULATE", "1")]
        if sanitizers:
            sanitize = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
            # Python's own -fwrapv would hide signed overflow.
            flags += [*sanitize, "-O1", "-fno-wrapv", "-fno-omit-frame-pointer", "-UNDEBUG"]
            ext.extra_link_args += sanitize
            # These take half of the time of a build, and AddressSanitizer sees wrong addresses as well.
            of_kernels = ["-fno-sanitize=null,pointer-overflow"]
        if switch("ATTNMASK_FAULTS"):
            flags += ["-DAM_FAULTS", "-include", str(ROOT / "csrc/faults.h")]
            ext.sources += ["csrc/faults.c"]
        flags += ["-pthread"]
        # Kernels know nothing of threads, and get no more flags than their instruction set's.
        openmp = ["-fopenmp"] if self.understands(["-fopenmp"], before="#include <omp.h>") else []
        ext.extra_link_args += ["-pthread", *openmp]

        levels = {"baseline": []}
        machine = platform.machine().lower()
        if machine in ("aarch64", "arm64") and self.understands(ARM_BASELINE):
            levels["baseline"] = ARM_BASELINE
        if machine in ("x86_64", "amd64"):
            levels |= {
                level: isa
                for level, isa in X86_KERNELS.items()
                if self.understands(isa, INSTRUCTIONS.get(level, ""))
            }
        if sanitizers == "thread":  # kernels know nothing of threads
            levels = {level: levels[level] for level in ("baseline", "avx2") if level in levels}
        aligned = ALIGNED if self.understands(ALIGNED, "") else []
        levels = {level: [*isa, *aligned] for level, isa in levels.items()}
        ext.define_macros += [(f"AM_HAVE_{level.upper()}", "1") for level in levels]
        ext.extra_compile_args += [*flags, *openmp]
        made_for = [sys.version, numpy.get_include(), numpy.__version__]
        command = " ".join([*self.compiler.compiler_so, *flags, *openmp, *levels, *made_for])
        depends = list(ext.depends)
        record = Path(self.build_temp, "command.txt")
        if not record.exists() or record.read_text() != command:
            self.force = True

        def compile_source(source: str, flags: list[str]) -> list[str]:
            objects = self.compiler.object_filenames([source], output_dir=self.build_temp)
            if not self.force and not newer_group([source, *depends], objects[0]):
                return objects
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=ext.define_macros,
                include_dirs=ext.include_dirs,
                extra_postargs=flags,
                depends=ext.depends,
            )

        work = {
            f"csrc/kernels/{level}.c": [*flags, *of_kernels, *isa, "-fno-lto"]
            for level, isa in levels.items()
        }
        work |= dict.fromkeys(ext.sources, ext.extra_compile_args)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for objects in pool.map(compile_source, work, work.values()):
                ext.extra_objects += objects
        # The rest is to link, if any object is newer than the result.
        sources, ext.sources = ext.sources, []
        ext.depends += ext.extra_objects
        super().build_extension(ext)
        ext.sources = sources
        record.write_text(command)

    def check_tools(self) -> None:
        if not self.understands([]):
            raise CompileError(
                f"attnmask needs a C compiler (gcc or clang), and {self.compiler.compiler[0]} is none: "
                "apt install gcc, or xcode-select --install"
            )
        if not self.understands([], before="#include <Python.h>"):
            raise CompileError(
                "attnmask needs the headers of Python (Python.h): "
                "apt install python3-dev, or dnf install python3-devel"
            )

    def understands(self, flags: list[str], instruction: str = "", before: str = "") -> bool:
        """Whether the compiler knows `flags`, its assembler the instruction, and both what comes before."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(
                f'{before}\nint main(void) {{ return 0; }}\nvoid other(void) {{ __asm__("{instruction}"); }}\n'
            )
            try:
                # The object lands beside its source: its path is the source's own, below output_dir.
                objects = self.compiler.compile(
                    [str(source)], output_dir="/", extra_postargs=[*flags, "-Werror"]
                )
                self.compiler.link_executable(objects, str(source.with_suffix("")), extra_postargs=flags)
            except (CompileError, LinkError):
                return False
        return True


class CheckTools(BuildExt):
    """Builds nothing: fails in one line if the machine lacks what a build needs."""

    def build_extension(self, ext: Extension) -> None:
        self.check_tools()


setup(
    ext_modules=[
        Extension(
            "attnmask._core",
            sources=["csrc/module.c", *sources("csrc/bind/*.c"), *sources("csrc/core/*.c")],
            depends=[*sources("csrc/**/*.h"), *sources("csrc/kernels/*.c"), "setup.py", "pyproject.toml"],
            include_dirs=["csrc", numpy.get_include()],
            define_macros=[
                ("AM_VERSION", f'"{VERSION}"'),
                ("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION"),
                ("NPY_TARGET_VERSION", "NPY_2_0_API_VERSION"),
            ],
        )
    ],
    cmdclass={"build_ext": BuildExt, "check_tools": CheckTools},
)
