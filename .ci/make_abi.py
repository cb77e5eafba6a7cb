"""Write tests/c/abi.txt: what programs that were compiled with include/attnmask.h depend on, and its number.

A change gets the next number, which a line of CHANGELOG.md has to name: "interface 2 of the C library". With --check
nothing is written, and a difference is an error.
"""

import ctypes
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests/_support"), str(ROOT)]

import c_library as c  # noqa: E402

ABI = ROOT / "tests/c/abi.txt"


def lines() -> list[str]:
    """The names of functions, the numbers of constants, and where the fields of structs are."""
    found = [f"function {name}" for name in c.FUNCTIONS]
    for enum, names in c.ENUMS.items():
        found += [f"{enum}: {name} = {number}" for name, number in names.items()]
    for name, of in c.STRUCTS.items():
        found.append(f"{name}: {ctypes.sizeof(of)} bytes")
        for field, _ in of._fields_:
            place = getattr(of, field)
            found.append(f"{name}.{field}: {place.size} bytes at {place.offset}")
    return found


def main() -> str | None:
    before = ABI.read_text().splitlines() if ABI.exists() else ["interface 0"]
    number = int(before[0].split()[1])
    if lines() != before[1:]:
        if "--check" in sys.argv:
            return "include/attnmask.h has another interface than tests/c/abi.txt: run .ci/make_abi.py"
        number += 1
        ABI.write_text("\n".join([f"interface {number}", *lines()]) + "\n")
    line = f"interface {number} of the C library"
    if line not in (ROOT / "CHANGELOG.md").read_text():
        return f'CHANGELOG.md must have a line about the change that says "{line}"'
    return None


if __name__ == "__main__":
    sys.exit(main())
