"""Programs of JAX in processes of their own."""

import os
import subprocess
import sys
import textwrap

LIMIT = 240  # seconds; what hangs would do so for good
BEGIN = """
import numpy as np, jax, jax.numpy as jnp, attnmask, attnmask.jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
rng = np.random.default_rng(0)
"""


def start(code, devices=1, **environment):
    flags = f"--xla_force_host_platform_device_count={devices}"
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags} | environment
    code = BEGIN + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    )


def finish(process):
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out.split()


def run(code, devices=1):
    """The words that it prints."""
    return finish(start(code, devices))
