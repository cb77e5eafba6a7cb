"""A copy of the package with one more learned term that rings do not compute: they refuse it."""

import os
import shutil
from pathlib import Path

import pytest
from environment import SANITIZED, python

import attnmask

RINGS = {
    "torch": """
import torch
import attnmask.torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
x = torch.ones(1, 4, 2, 8)
attend = attnmask.torch.ring_attention
""",
    "jax": """
import functools, jax
import attnmask.jax
x = jax.numpy.ones((1, 4, 2, 8))
mesh, spec = jax.sharding.Mesh(jax.devices()[:1], "ring"), jax.sharding.PartitionSpec(None, "ring")
def attend(*arrays, **more):
    ring = functools.partial(attnmask.jax.ring_attention, axis_name="ring", **more)
    return jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))(*arrays)
""",
}
CALLS = """
assert (attend(x, x, x, key_slopes=None) == 1).all()
try:
    attend(x, x, x, key_slopes=[1.0, 2.0])
except NotImplementedError as error:
    print(error)
"""


def insert(text, after, line):
    assert text.count(after) == 1
    return text.replace(after, after + line)


@pytest.mark.skipif(SANITIZED, reason="Python alone")
@pytest.mark.parametrize("framework", RINGS)
def test_rings_refuse_a_learned_term_that_they_do_not_compute(framework, tmp_path, monkeypatch):
    pytest.importorskip(framework)
    copy = tmp_path / "attnmask"
    shutil.copytree(
        Path(attnmask.__file__).parent,
        copy,
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    table = copy / "_attention/arguments.py"
    text = insert(
        table.read_text(), "    relative_bias: ArrayLike | None\n", "    key_slopes: ArrayLike | None\n"
    )
    text = insert(text, "    added by distance; [H, L]\n", "key_slopes : term [H] = None\n")
    table.unlink()
    table.write_text(text)
    monkeypatch.chdir(tmp_path)  # where Python looks first
    result = python(RINGS[framework] + CALLS, timeout=300)
    expected = "key_slopes must be None in ring_attention, which does not compute it, got "
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(expected), (result.stdout, result.stderr)
