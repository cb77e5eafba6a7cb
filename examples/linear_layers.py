"""Two layers of linear attention to paste into a model: a gated delta net, and Mamba-2.

Their weights have the names and layouts that transformers has them under, so that they load those of Qwen3-Next and of
Mamba-2 models. Both take packed documents (`cu_seqlens`), and go on from a state token by token.
"""

import torch
from torch import nn
from torch.nn.functional import silu, softplus

from attnmask.torch import linear_attention, short_convolution


class Norm(nn.Module):
    """RMS norm of groups of channels."""

    def __init__(self, channels, groups=1, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.groups, self.eps = groups, eps

    def forward(self, x):
        parts = x.float().unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * parts.flatten(-2).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """The layer of Qwen3-Next: a convolution, the gated delta rule, and a gate."""

    def __init__(self, width, key_heads, value_heads, key_dim, value_dim, kernel=4, eps=1e-6):
        super().__init__()
        self.heads, self.dims = (key_heads, value_heads), (key_dim, value_dim)
        keys, values = key_heads * key_dim, value_heads * value_dim
        self.sizes, channels = (keys, keys, values), 2 * keys + values
        self.in_proj_qkvz = nn.Linear(width, channels + values, bias=False)
        self.in_proj_ba = nn.Linear(width, 2 * value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(value_heads))
        self.A_log = nn.Parameter(torch.empty(value_heads).uniform_(0.01, 16).log())
        self.norm = Norm(value_dim, eps=eps)
        self.out_proj = nn.Linear(values, width, bias=False)

    def forward(self, x, cu_seqlens=None, state=(None, None)):
        """Return the result and the state after it, from x ``[B, T, width]`` and the state before it."""
        (key_heads, value_heads), (key_dim, value_dim) = self.heads, self.dims
        group = value_heads // key_heads
        by_head = self.in_proj_qkvz(x).unflatten(-1, (key_heads, -1))  # a key head and its value heads
        query, key, value, z = by_head.split([key_dim, key_dim, group * value_dim, group * value_dim], -1)
        b, a = self.in_proj_ba(x).unflatten(-1, (key_heads, -1)).split([group, group], -1)
        mixed = torch.cat([part.flatten(-2) for part in (query, key, value)], -1)
        mixed, before = short_convolution(
            mixed,
            self.conv1d.weight[:, 0],
            activation="silu",
            cu_seqlens=cu_seqlens,
            initial_state=state[0],
            return_state=True,
        )
        query, key, value = mixed.split(self.sizes, -1)
        out, after = linear_attention(
            query.unflatten(-1, (key_heads, -1)),
            key.unflatten(-1, (key_heads, -1)),
            value.unflatten(-1, (value_heads, -1)),
            decay=-self.A_log.float().exp() * softplus(a.flatten(-2).float() + self.dt_bias),
            beta=b.flatten(-2).float().sigmoid(),
            normalize_qk=True,
            cu_seqlens=cu_seqlens,
            initial_state=state[1],
            return_state=True,
        )
        out = self.norm(out) * silu(z.reshape(out.shape))
        return self.out_proj(out.flatten(-2)), (before, after)


class Mamba2(nn.Module):
    """The layer of Mamba-2."""

    def __init__(self, width, heads, head_dim, state_dim, groups=1, kernel=4, eps=1e-5, bias=False):
        super().__init__()
        self.heads, self.inner = heads, heads * head_dim
        self.shared = groups, groups * state_dim  # by the heads of a group
        channels = self.inner + 2 * groups * state_dim
        self.in_proj = nn.Linear(width, self.inner + channels + heads, bias=bias)
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels)
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.arange(1.0, heads + 1).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = Norm(self.inner, groups, eps)
        self.out_proj = nn.Linear(self.inner, width, bias=bias)

    def forward(self, x, cu_seqlens=None, state=(None, None)):
        """Return the result and the state after it, from x ``[B, T, width]`` and the state before it."""
        groups, shared = self.shared
        z, mixed, dt = self.in_proj(x).split([self.inner, self.inner + 2 * shared, self.heads], -1)
        mixed, before = short_convolution(
            mixed,
            self.conv1d.weight[:, 0],
            self.conv1d.bias,
            activation="silu",
            cu_seqlens=cu_seqlens,
            initial_state=state[0],
            return_state=True,
        )
        value, key, query = mixed.split([self.inner, shared, shared], -1)
        value, dt = value.unflatten(-1, (self.heads, -1)), softplus(dt + self.dt_bias)
        out, after = linear_attention(
            query.unflatten(-1, (groups, -1)),
            key.unflatten(-1, (groups, -1)),
            value * dt[..., None],
            decay=-self.A_log.exp() * dt,
            scale=1.0,
            cu_seqlens=cu_seqlens,
            initial_state=state[1],
            return_state=True,
        )
        out = out + self.D[:, None] * value
        return self.out_proj(self.norm(out.flatten(-2) * silu(z))), (before, after)


def main():
    torch.manual_seed(0)
    x = torch.randn(1, 40, 32)
    for layer in (GatedDeltaNet(32, 2, 4, 16, 8), Mamba2(32, 8, 8, 16, groups=2)):
        whole, _ = layer(x)
        whole.square().mean().backward()
        with torch.no_grad():
            packed, _ = layer(torch.cat([x, x[:, :9]], 1), cu_seqlens=[0, 40, 49])  # two documents in a row
            out, state = layer(x[:, :30])  # a prompt, and ten tokens
            tokens = [out]
            for t in range(30, 40):
                out, state = layer(x[:, t : t + 1], state=state)
                tokens.append(out)
        name = type(layer).__name__
        print(f"{name}: packed, error {(packed[:, :40] - whole).abs().max():.0e}")
        print(f"{name}: token by token, error {(torch.cat(tokens, 1) - whole).abs().max():.0e}")


if __name__ == "__main__":
    main()
