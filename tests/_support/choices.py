"""What the core chooses by numbers alone: a file of C with its header, compiled without the rest."""

import ctypes
import re
from pathlib import Path

from environment import ROOT, compiled
from kernel_table import read_types, types_of

CSRC = ROOT / "csrc"
PROTOTYPE = re.compile(r"^(?:const )?(\w+) (\*?)(\w+)\(([^)]*)\);", re.MULTILINE)


def choices_of(folder: Path, file: str):
    """The functions of `csrc/<file>.c`, and by name the types and constants of its header."""
    header = (CSRC / f"{file}.h").read_text()
    types, constants = read_types((CSRC / "kernels/dtype.h").read_text() + header)
    functions = compiled(folder, f'#include "{file}.c"\n', f"-I{CSRC}")
    for result, pointer, name, arguments in PROTOTYPE.findall(header):
        function = getattr(functions, name)
        function.restype = ctypes.c_char_p if pointer else types[result]
        function.argtypes = types_of(arguments, types)
    return functions, types, constants
