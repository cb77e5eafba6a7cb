"""Attention of tensors under random masks, and its gradients, beside dense attention."""

import masked_attention
import numpy as np
import pytest
from tensors import tensor

import attnmask

pytestmark = pytest.mark.filterwarnings("ignore::attnmask.AttnmaskWarning")


def array(x) -> np.ndarray:
    """Of bfloat16, which NumPy does not have, as float32."""
    return (x.float() if str(x.dtype) == "torch.bfloat16" else x).numpy()


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_attention_under_random_masks(torch, first):
    def by_autograd(given, dout, dlse):
        given = {name: tensor(torch, x) for name, x in given.items()}
        leaves = [given[name].clone().requires_grad_() for name in ("query", "key", "value")]
        given |= dict(zip(("query", "key", "value"), leaves, strict=True))
        out, lse = attnmask.torch.flash_attention(**given, return_lse=True)
        grads = torch.autograd.grad((out, lse), leaves, (tensor(torch, dout), torch.from_numpy(dlse)))
        return [array(x.detach()) for x in (out, lse, *grads)]

    for number in range(first, first + 50):
        masked_attention.check_gradients(masked_attention.Case(3, number), by_autograd)
