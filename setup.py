"""Builds the C core: one object per instruction set with its own flags, everything else for any processor.

Switches, read from the environment; what was compiled with others is compiled again:

ATTNMASK_DEBUG=1                       assertions on, no optimization, debug symbols
ATTNMASK_SANITIZE=address,undefined    build with these sanitizers (or thread)
ATTNMASK_WERROR=1                      warnings are errors
ATTNMASK_FAULTS=1                      allocations fail and threads are late on request (csrc/faults.c)
ATTNMASK_SYMBOLS=1                     keep the symbols of functions and the numbers of lines, for profilers

The first two emulate what multiplies bfloat16 on other processors, so that its kernels are tried on any. They and
ATTNMASK_FAULTS add what only tests call (csrc/bind/testing), as a build in place does; a release has none of it.
"""

import errno
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def read_rules() -> dict[str, list[str]]:
    """Return the words of each line of csrc/rules.mk, which says what is compiled, and how."""
    rules: dict[str, list[str]] = {}
    for line in (ROOT / "csrc/rules.mk").read_text().splitlines():
        if line and not line.startswith("#"):
            name, words = line.split(" := ")
            given = [rules[word[2:-1]] if word.startswith("$(") else [word] for word in words.split()]
            rules[name] = [word for some in given for word in some]
    return rules


RULES = read_rules()
LEVELS = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
TOPICS = {
    level: RULES[f"TOPICS_{level}"]
    for level in ("baseline", *RULES["LEVELS_x86_64"], *RULES["LEVELS_aarch64"])
}
ARM = RULES["LEVELS_aarch64"]
# About how long a file takes to compile: the longest begin first, and a person is told how long all may take.
SECONDS = {
    **{f"baseline/{topic}": 1.8 for topic in TOPICS["baseline"]},
    **{f"avx2/{topic}": 1.8 for topic in TOPICS["avx2"]},
    **{f"avx512/{topic}": 2.3 for topic in TOPICS["avx512"]},
    **{f"{level}/{topic}": 2.5 for level in ("avx512bf16", "neonbf16") for topic in TOPICS[level]},
    **{f"{level}/kv_i16x2": 2.3 for level in ("avx512vnni", "neondot")},
    "amx/flash_amx": 0.5,
}

# One build for every Python from 3.11 on, which costs a call 1 to 2 % (docs/install.rst). Free-threaded ones lack it.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")


def sources(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def switch(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def say(line: str) -> None:
    print(f"attnmask: {line}", file=sys.stderr, flush=True)


class Unit(NamedTuple):
    """A file to compile."""

    source: str
    object: Path
    command: list[str]
    seconds: float

    @property
    def record(self) -> Path:
        """Holds the command by which the object was made, once it has been made."""
        return self.object.with_suffix(".txt")

    def is_current(self) -> bool:
        """Whether the object was made by this command, of these sources."""
        try:
            rule = self.object.with_suffix(".d").read_text().replace("\\\n", " ").split(": ", 1)[1]
            read = [name.replace("\\ ", " ") for name in re.findall(r"(?:\\ |\S)+", rule)]
            made = self.object.stat().st_mtime_ns
            return self.record.read_text() == " ".join(self.command) and all(
                os.stat(name).st_mtime_ns <= made for name in read
            )
        except OSError:
            return False

    def compile(self) -> None:
        try:
            self.object.parent.mkdir(parents=True, exist_ok=True)
            self.record.unlink(missing_ok=True)
            result = subprocess.run(self.command, stderr=subprocess.PIPE, text=True)
            if "No space left on device" in result.stderr:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sys.stderr.write(result.stderr)
            if result.returncode:
                raise CompileError(f"attnmask: {self.command[0]} does not compile {self.source}")
            self.record.write_text(" ".join(self.command))
        except OSError as error:
            raise CompileError(
                f"attnmask: cannot write to {self.object.parent}: {error.strerror}. "
                "A build needs a folder that you may write to, and 20 MB"
            ) from None


def compile_units(units: Sequence[Unit]) -> None:
    """Compile files on all processors, and say how far it is."""
    if not units:
        return
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    work, begin, said = sum(unit.seconds for unit in units), time.monotonic(), -10.0
    terminal = sys.stderr.isatty()
    with ThreadPoolExecutor(processors) as pool:
        longest_first = sorted(units, key=lambda unit: -unit.seconds)
        left = {pool.submit(unit.compile): unit for unit in longest_first}
        try:
            while left:
                passed = time.monotonic() - begin
                running = [unit for future, unit in left.items() if future.running()]
                waiting = sum(unit.seconds for unit in left.values())
                remains = waiting - sum(unit.seconds / 2 for unit in running)
                at = len(units) - len(left) + max(1, len(running))
                line = f"attnmask: compiling {at} of {len(units)} files"
                if waiting < 0.9 * work:  # the first files say little
                    line += f", about {max(remains * passed / (work - remains), 1):.0f} s left"
                if terminal or passed - said >= 10:
                    print(f"\r{line:60}" if terminal else line, end="" if terminal else "\n", file=sys.stderr)
                    sys.stderr.flush()
                    said = passed
                for future in wait(left, 1, FIRST_COMPLETED).done:
                    del left[future]
                    future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if terminal:
                print(f"\r{'':60}\r", end="", file=sys.stderr)
    passed = time.monotonic() - begin
    print(f"attnmask: compiled {len(units)} files in {passed:.0f} s", file=sys.stderr)


class BuildExt(build_ext):
    def finalize_options(self) -> None:
        if self.build_temp is None and (self.editable_mode or self.inplace):
            self.build_temp = "build/editable"  # else every object is made again
        switches = ("ATTNMASK_DEBUG", "ATTNMASK_SANITIZE", "ATTNMASK_FAULTS")
        self.for_tests = self.editable_mode or self.inplace or any(map(switch, switches))
        for ext in self.distribution.ext_modules:  # in place, builds of several machines may lie side by side
            ext.py_limited_api = LIMITED_API and not (self.editable_mode or self.inplace)
        super().finalize_options()

    def build_extension(self, ext: Extension) -> None:
        self.check_tools()
        units = self.units_of(ext)
        compile_units([unit for unit in units if self.force or not unit.is_current()])
        # The rest is to link, if any object is newer than the result, or they are others.
        ext.extra_objects = ext.depends = [str(unit.object) for unit in units]
        ext.sources, sources = [], ext.sources
        record = Path(self.build_temp, "objects.txt")
        linked = " ".join([*self.compiler.linker_so, *ext.extra_link_args, *ext.extra_objects])
        if not record.exists() or record.read_text() != linked:
            self.force = True
        super().build_extension(ext)
        ext.sources = sources
        record.write_text(linked)

    def units_of(self, ext: Extension) -> list[Unit]:
        flags, of_kernels = list(RULES["CFLAGS_CORE"]), list(RULES["CFLAGS_KERNELS"])
        sanitizers = os.environ.get("ATTNMASK_SANITIZE")
        symbols = any(map(switch, ("ATTNMASK_SYMBOLS", "ATTNMASK_DEBUG", "ATTNMASK_SANITIZE")))
        ext.extra_link_args += [] if symbols or sys.platform == "darwin" else ["-Wl,--strip-all"]
        flags += (
            ["-O0", "-g", "-UNDEBUG"] if switch("ATTNMASK_DEBUG") else ["-O3", "-g1" if symbols else "-g0"]
        )
        flags += ["-Werror"] if switch("ATTNMASK_WERROR") else []
        macros = [f"-D{name}={value}" for name, value in ext.define_macros]
        if switch("ATTNMASK_DEBUG") or sanitizers:
            macros += ["-DAM_EMULATE"]
        if sanitizers:
            sanitize = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
            # Python's own -fwrapv would hide signed overflow.
            flags += [*sanitize, "-O1", "-fno-wrapv", "-fno-omit-frame-pointer", "-UNDEBUG"]
            ext.extra_link_args += sanitize
            # These take half of the time of a build, and AddressSanitizer sees wrong addresses as well.
            of_kernels += ["-fno-sanitize=null,pointer-overflow"]
        files = list(ext.sources)
        if switch("ATTNMASK_FAULTS"):
            flags += ["-DAM_FAULTS", "-include", str(ROOT / "csrc/faults.h")]
            files += ["csrc/faults.c"]
        of_tests = ["-DAM_FOR_TESTS"] if self.for_tests else []
        files += sources("csrc/bind/testing/*.c") if self.for_tests else []
        # Kernels know nothing of threads, and get no more flags than their instruction set's.
        openmp = ["-fopenmp"] if self.understands(["-fopenmp"], before="#include <omp.h>") else []
        if not openmp:
            say(
                "the compiler has no OpenMP, so attention will use one thread: apt install libomp-dev, "
                "or see docs/install.rst"
            )
        ext.extra_link_args += ["-pthread", *openmp]
        levels = self.levels(sanitizers)
        macros += [f"-DAM_HAVE_{level.upper()}" for level in levels]
        made_for = [f"-DAM_MADE_FOR={sys.version.split()[0]},{numpy.__version__}"]
        includes = [f"-I{folder}" for folder in [*ext.include_dirs, *self.compiler.include_dirs]]

        def unit(source: str, *its_flags: str, level: str = "") -> Unit:
            made = Path(self.build_temp, source).with_suffix(".o")
            made = made.parent / level / made.name
            command = [*self.compiler.compiler_so, *macros, *includes, *flags, *its_flags]
            command += ["-MMD", "-c", source, "-o", str(made)]
            return Unit(source, made, command, SECONDS.get(f"{level}/{made.stem}", 0.2))

        # Where speed matters least, or is the same, as loops are written out.
        less = [] if switch("ATTNMASK_DEBUG") or sanitizers else ["-O2"]
        topics = dict(TOPICS)
        if "-DAM_EMULATE" in macros:
            topics["baseline"] = [*TOPICS["baseline"], *TOPICS["neonbf16"]]

        no_pre = self.understood(RULES["FLAGS_NO_PRE"])
        files_of_topics = {
            Path(path).stem: path for path in sources("csrc/**/*.c") if "kernels" in Path(path).parts
        }

        def kernel(topic: str, level: str) -> Unit:
            written_out = level in ("baseline", *ARM) and topic != "arrays"
            its_flags = [*of_kernels, *(less if written_out else []), *(no_pre if topic != "arrays" else [])]
            its_flags += [*levels[level], f"-DLEVEL={level}"]
            if RULES["FLAGS_ALIGNED"][1] in its_flags and no_pre:
                its_flags += RULES.get(f"FLAGS_OF_{level}/{topic}", [])
            return unit(files_of_topics[topic], *its_flags, level=level)

        kernels = [kernel(topic, level) for level in levels for topic in topics[level]]
        return kernels + [unit(source, *made_for, *of_tests, *openmp) for source in files]

    def levels(self, sanitizers: str | None) -> dict[str, list[str]]:
        """The levels of instruction sets that the compiler knows, and their flags."""
        levels: dict[str, list[str]] = {"baseline": []}
        machine = LEVELS.get(platform.machine().lower(), "")
        above = {level: RULES[f"FLAGS_{level}"] for level in RULES.get(f"LEVELS_{machine}", [])}
        if machine == "aarch64":
            levels["baseline"] = self.understood(RULES["FLAGS_ARM"])
            above = {level: [*levels["baseline"], *flags] for level, flags in above.items()}
        known = {
            level: flags
            for level, flags in above.items()
            if self.understands(flags, " ".join(RULES.get(f"INSTRUCTION_{level}", [])))
        }
        levels |= known
        if missing := [level for level in above if level not in known]:
            say(
                f"the compiler does not know {', '.join(missing)}, so it builds no kernels for that: "
                "use GCC 11 or newer"
            )
        if sanitizers == "thread":  # kernels know nothing of threads
            levels = {level: levels[level] for level in ("baseline", "avx2") if level in levels}
        aligned = self.understood(RULES["FLAGS_ALIGNED"])
        return {level: [*flags, *aligned] for level, flags in levels.items()}

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

    def understood(self, flags: list[str]) -> list[str]:
        return flags if self.understands(flags) else []

    def understands(self, flags: list[str], instruction: str = "", before: str = "") -> bool:
        """Whether the compiler knows `flags`, its assembler the instruction, and both what comes before."""
        includes = [f"-I{folder}" for folder in self.compiler.include_dirs]
        with tempfile.TemporaryDirectory() as folder:
            source, made, program = (str(Path(folder, name)) for name in ("probe.c", "probe.o", "probe"))
            Path(source).write_text(
                f'{before}\nint main(void) {{ return 0; }}\nvoid other(void) {{ __asm__("{instruction}"); }}\n'
            )
            compiler, linker = self.compiler.compiler_so, self.compiler.linker_exe
            commands = (
                [*compiler, *includes, *flags, "-Werror", "-c", source, "-o", made],
                [*linker, made, *flags, "-o", program],
            )
            try:
                return all(subprocess.run(line, capture_output=True).returncode == 0 for line in commands)
            except OSError:
                return False


class CheckTools(BuildExt):
    """Builds nothing: fails in one line if the machine lacks what a build needs."""

    def build_extension(self, ext: Extension) -> None:
        self.check_tools()


if sys.platform == "darwin":  # what the rest of Python was built for
    os.environ.setdefault(
        "MACOSX_DEPLOYMENT_TARGET", str(sysconfig.get_config_var("MACOSX_DEPLOYMENT_TARGET"))
    )

setup(
    ext_modules=[
        Extension(
            "attnmask._core",
            sources=[
                path
                for path in sources("csrc/**/*.c")
                if not {"kernels", "testing", "c"}.intersection(Path(path).parts) and path != "csrc/faults.c"
            ],
            include_dirs=["csrc", numpy.get_include()],
            define_macros=[
                ("AM_VERSION", f'"{VERSION}"'),
                ("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION"),
                ("NPY_TARGET_VERSION", "NPY_2_0_API_VERSION"),
                *([("Py_LIMITED_API", "0x030B0000")] if LIMITED_API else []),
            ],
        )
    ],
    cmdclass={"build_ext": BuildExt, "check_tools": CheckTools},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
