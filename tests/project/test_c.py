"""What C code must keep to beyond what compilers see."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
if not CSRC.exists():
    pytest.skip("the source is not there", allow_module_level=True)
MOST, FEW, EVER = 7, 10, 9  # arguments; functions and types that have more; the arguments of these
MOST_INPUTS = 4  # of a macro, by position
COMMENT_OR_STRING = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"|\\\n'
NAME_OF_TEMPLATE = r"\b[A-Z][A-Z0-9_]*\((\w+)\)"  # as FROM(name)
LIST = r"(\w+|\(\s*\*\s*\w*\s*\))\s*\(([^()]*)\)"  # and its name, or that of a pointer to functions
PARAMETER = r"(?:\w+\s+)*\w+(?:\s*\*\s*|\s+)?(?:const\s+)?\w*(?:\[[^]]*\])*"


def text_of(path):
    text = re.sub(COMMENT_OR_STRING, " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(NAME_OF_TEMPLATE, r"\1", text)


def test_few_functions_have_many_arguments():
    found = {}
    for path in sorted(CSRC.rglob("*.[ch]")):
        for name, inside in re.findall(LIST, text_of(path)):
            parts = [part.strip() for part in inside.split(",")]
            is_call = not any(" " in part or "*" in part for part in parts)
            if len(parts) > MOST and not is_call and all(re.fullmatch(PARAMETER, part) for part in parts):
                found[path.name, name] = len(parts)
    assert len(found) <= FEW, found
    assert max(found.values()) <= EVER, found


def test_macros_have_few_inputs():
    for path in sorted(CSRC.rglob("*.[ch]")):
        for name, inputs in re.findall(r"# *define (\w+)\(([^)]*)\)", path.read_text(encoding="utf-8")):
            assert inputs.count(",") < MOST_INPUTS, (path.name, name)


def test_templates_name_their_inputs():
    arithmetic = set(re.findall(r"# *define (\w+)", (CSRC / "kernels/attention/f32.h").read_text()))
    for path in sorted(CSRC.rglob("*_tpl.h")):
        text = path.read_text(encoding="utf-8")
        code = re.sub(COMMENT_OR_STRING, " ", text, flags=re.DOTALL)
        guard = re.match(r"\s*#if(?:ndef|.*!defined).*\n# *error", code)
        assert guard, path.name
        assert f'#    error "{path.name} needs ' in text, path.name
        known = set(re.findall(r"defined (\w+)|# *(?:define|ifn?def) (\w+)", text))
        known = {name for names in known for name in names}
        assert known | arithmetic >= set(re.findall(r"# *undef (\w+)", text)), path.name
