"""attnmask.torch in a model that several processes train together."""

import socket
import subprocess
import sys

import pytest

# Each process has half of the batch. The gradients are means, and so those of the whole batch by one process.
WORKER = """
import datetime, sys
import torch
import attnmask.torch

rank, port = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).unbind(-3)
        return self.out(attnmask.torch.flash_attention(query, key, value, causal=True).flatten(-2))


torch.manual_seed(0)
model, batch = Model(), torch.randn(4, 5, 8)
right = torch.autograd.grad(model(batch).square().mean(), model.parameters())
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
)
parallel = torch.nn.parallel.DistributedDataParallel(model)
for compiled in (parallel, torch.compile(parallel, backend="aot_eager")):
    model.zero_grad()
    compiled(batch[2 * rank : 2 * rank + 2]).square().mean().backward()
    for x, grad in zip(model.parameters(), right, strict=True):
        torch.testing.assert_close(x.grad, grad)
torch.distributed.destroy_process_group()
print("same")
"""


@pytest.mark.long
def test_distributed_data_parallel():
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(rank), port], stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    try:
        for process in processes:
            said, errors = process.communicate(timeout=240)
            assert (process.returncode, said) == (0, "same\n"), errors
    finally:
        for process in processes:
            process.kill()
