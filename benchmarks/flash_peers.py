"""Attention by one library, in a process of its own: flash_peers.py LIBRARY THREADS, which bench_flash.py controls.

Every form and every operator of the library is tried for a case; the fastest counts.
"""

import gc
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flash_cases import BLOCK, Case, Form, Grads, Problem, forms_of
from workers import Call, load_ejkernel, repeats_for, serve, settle, turn

LIBRARY, THREADS = sys.argv[1], int(sys.argv[2])
TRIES = 3
SLOW = 2.0  # seconds: a slower call is tried once
MOST_LOGITS = 1 << 28  # JAX keeps several copies for the gradient

Result = np.ndarray | Grads


class Ready(NamedTuple):
    call: Call
    read: Callable[[], Result]  # calls, and returns the result as NumPy arrays


class Unknown(Exception):
    """The library does not support this."""


def exact(array: np.ndarray) -> np.ndarray:
    """Converts to a type in which results are compared."""
    return array if array.dtype == np.float64 else array.astype(np.float32)


def heads_first(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.swapaxes(1, 2))


def flat(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, np.ndarray]:
    """[B, T, H · D]"""
    arrays = {"q": q, "k": k, "v": v}
    return {name: np.ascontiguousarray(array).reshape(*array.shape[:2], -1) for name, array in arrays.items()}


# Libraries. `variants` are the operators or settings of a library; `attend` prepares one of them for a problem.


class Torch:
    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.set_num_threads(THREADS)

    def forms(self, case: Case) -> list[Form]:
        return forms_of(case)

    def variants(self, case: Case) -> list[str]:
        return [""]

    def tensor(self, array: np.ndarray) -> object:
        if array.dtype.name == "bfloat16":
            return self.torch.from_numpy(array.view(np.uint16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def array(self, tensor: object) -> np.ndarray:
        tensor = tensor.detach().transpose(1, 2)
        return (tensor if tensor.dtype == self.torch.float64 else tensor.float()).numpy()

    def attend(self, variant: str, problem: Problem) -> Ready:
        q, k, v, *dout = (self.tensor(heads_first(array)) for array in problem.arrays)
        bias = problem.bias(np.float64 if q.dtype == self.torch.float64 else np.float32)
        mask = None if bias is None else self.torch.from_numpy(bias).to(q.dtype)
        return self.ready(lambda: self.forward(q, k, v, mask, problem), (q, k, v), dout)

    def forward(self, q: object, k: object, v: object, mask: object, problem: Problem) -> object:
        return self.torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=problem.causal, enable_gqa=q.shape[1] != k.shape[1]
        )

    def ready(self, forward: Call, inputs: tuple[object, ...], dout: list[object]) -> Ready:
        if not dout:
            call = self.torch.inference_mode()(forward)
            return Ready(call, lambda: self.array(call()))
        for tensor in inputs:
            tensor.requires_grad_()
        out = forward()

        def backward() -> object:
            return self.torch.autograd.grad(out, inputs, dout, retain_graph=True)

        return Ready(backward, lambda: tuple(map(self.array, backward())))


class Flex(Torch):
    def __init__(self) -> None:
        super().__init__()
        from torch.nn.attention import flex_attention

        self.flex = flex_attention
        self.torch._dynamo.config.cache_size_limit = 1000

    def forms(self, case: Case) -> list[Form]:
        if case.backward:
            raise Unknown("no gradients on the CPU")
        return [form for form in forms_of(case, windows=True, documents=True) if form.problems[0].case]

    def attend(self, variant: str, problem: Problem) -> Ready:
        q, k, v = (self.tensor(heads_first(array)) for array in problem.arrays)
        blocks = self.block_mask(problem.case) if problem.case.is_masked else None
        self.torch._dynamo.reset()
        compiled = self.torch.compile(self.flex.flex_attention, dynamic=False)
        grouped = q.shape[1] != k.shape[1]
        return self.ready(lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=grouped), (q, k, v), [])

    def block_mask(self, case: Case) -> object:
        offset, window = case.tokens - case.rows, case.window
        ids = self.torch.from_numpy(case.ids) if case.documents else None
        query_ids = self.torch.from_numpy(case.query_ids) if case.documents else None
        dense = self.torch.from_numpy(case.dense) if case.has_blocks else None

        def live(b: object, h: object, q: object, k: object) -> object:
            where = k >= 0
            if case.causal:
                where = where & (k <= q + offset)
            if window:
                where = where & (k > q + offset - window)
            if ids is not None:
                where = where & (query_ids[q] == ids[k])
            return where if dense is None else where & dense[q, k]

        return self.flex.create_block_mask(live, None, None, case.rows, case.tokens, device="cpu")


class OnnxRuntime:
    def __init__(self) -> None:
        import onnx
        import onnxruntime

        self.onnx, self.runtime = onnx, onnxruntime
        self.options = onnxruntime.SessionOptions()
        self.options.intra_op_num_threads = THREADS
        self.options.log_severity_level = 4

    def forms(self, case: Case) -> list[Form]:
        if case.backward:
            raise Unknown("no gradients")
        if case.dtype == "bfloat16":
            raise Unknown("not on the CPU")
        if case.dtype == "float64":
            raise Unknown("no more exact than float32")
        return forms_of(case, windows=True)

    def variants(self, case: Case) -> list[str]:
        return ["MHA", "GQA", "Attention"]

    def attend(self, variant: str, problem: Problem) -> Ready:
        q, k, v = problem.arrays
        window = problem.case.window if problem.case else None
        if window and variant != "GQA":
            raise Unknown("has no windows")
        operators = {"MHA": self.multi_head, "GQA": self.group_query, "Attention": self.attention}
        return operators[variant](q, k, v, problem)

    def multi_head(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, problem: Problem) -> Ready:
        if q.shape[2] != k.shape[2]:
            raise Unknown("has no groups")
        bias, settings = (
            problem.bias(q.dtype),
            {"num_heads": q.shape[2], "unidirectional": int(problem.causal)},
        )
        if bias is None:
            return self.session("MultiHeadAttention", "q k v", flat(q, k, v), q.shape, settings)
        inputs = flat(q, k, v) | {"bias": bias}
        return self.session("MultiHeadAttention", "q k v - - bias", inputs, q.shape, settings)

    def group_query(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, problem: Problem) -> Ready:
        """Always causal. If there are fewer queries than keys, the other keys are in a cache."""
        case, (batch, rows), tokens = problem.case, q.shape[:2], k.shape[1]
        causal = case and case.causal and not case.documents and not case.has_blocks
        if not (problem.causal or causal):
            raise Unknown("is always causal")
        settings = {"num_heads": q.shape[2], "kv_num_heads": k.shape[2]}
        if case and case.window:
            settings["local_window_size"] = case.window
        counts = {"last": np.full(batch, tokens - 1, np.int32), "total": np.array([tokens], np.int32)}
        if rows == tokens:
            inputs = flat(q, k, v) | counts
            return self.session("GroupQueryAttention", "q k v - - last total", inputs, q.shape, settings)
        inputs = flat(q, k[:, -rows:], v[:, -rows:]) | counts
        inputs |= {"past_k": heads_first(k), "past_v": heads_first(v)}
        return self.session(
            "GroupQueryAttention", "q k v past_k past_v last total", inputs, q.shape, settings
        )

    def attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, problem: Problem) -> Ready:
        inputs = dict(zip("qkv", map(heads_first, (q, k, v)), strict=True))
        settings = {"is_causal": int(problem.causal)}
        if problem.mask is None:
            return self.session("Attention", "q k v", inputs, inputs["q"].shape, settings)
        inputs["mask"] = problem.mask
        return self.session("Attention", "q k v mask", inputs, inputs["q"].shape, settings)

    def session(
        self,
        operator: str,
        operands: str,
        inputs: dict[str, np.ndarray],
        shape: tuple[int, ...],
        settings: dict[str, int],
    ) -> Ready:
        """A session with one operator, whose arrays are bound beforehand; `-` is an operand that is left out."""
        helper, standard = self.onnx.helper, operator == "Attention"
        outputs = {"out": np.zeros(inputs["q"].shape, inputs["q"].dtype)}
        # The operator updates its cache in place.
        outputs |= {f"new_{name}": array for name, array in inputs.items() if name.startswith("past")}
        names = [name.replace("-", "") for name in operands.split()]
        domain = "" if standard else "com.microsoft"
        node = helper.make_node(operator, names, list(outputs), domain=domain, **settings)
        described = (
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in arrays.items()
            ]
            for arrays in (inputs, outputs)
        )
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "attention", *described)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        session = self.runtime.InferenceSession(model, self.options, providers=["CPUExecutionProvider"])
        values = {
            name: self.runtime.OrtValue.ortvalue_from_numpy(array)
            for name, array in (inputs | {"out": outputs["out"]}).items()
        }
        binding = session.io_binding()
        for name in inputs:
            binding.bind_ortvalue_input(name, values[name])
        for name in outputs:
            binding.bind_ortvalue_output(name, values[name.removeprefix("new_")])

        def call() -> object:
            session.run_with_iobinding(binding)
            return values  # keeps them alive

        def read() -> np.ndarray:
            call()
            result = values["out"].numpy()
            return result.swapaxes(1, 2) if standard else result.reshape(shape)

        return Ready(call, read)


class OpenVino:
    def __init__(self) -> None:
        import openvino
        import openvino.opset13

        self.openvino, self.ops, self.core = openvino, openvino.opset13, openvino.Core()

    def forms(self, case: Case) -> list[Form]:
        if case.backward:
            raise Unknown("no gradients")
        if case.dtype == "float64":
            raise Unknown("no more exact than float32")
        return forms_of(case, groups=False)

    def variants(self, case: Case) -> list[str]:
        """The type in which it computes: that of the arrays, or another."""
        return [""] if case.dtype == "float32" else ["", "f32"]

    def tensor(self, array: np.ndarray) -> object:
        openvino = self.openvino
        if array.dtype.name == "bfloat16":  # it takes bfloat16 as numbers of 16 bits
            return openvino.Tensor(array.view(np.uint16), openvino.Shape(array.shape), openvino.Type.bf16)
        return openvino.Tensor(array, shared_memory=True)

    def attend(self, variant: str, problem: Problem) -> Ready:
        arrays = list(map(heads_first, problem.arrays))
        out = np.zeros((*arrays[0].shape[:3], arrays[2].shape[3]), arrays[0].dtype)
        bias = problem.bias(np.float32)
        arrays += [] if bias is None else [bias]
        tensors = list(map(self.tensor, arrays))
        inputs = [self.ops.parameter(list(tensor.shape), tensor.element_type) for tensor in tensors]
        nodes = inputs
        if bias is not None and arrays[0].dtype != bias.dtype:
            nodes = [*inputs[:3], self.ops.convert(inputs[3], tensors[0].element_type)]
        result = self.ops.scaled_dot_product_attention(*nodes, causal=problem.causal)
        precision = variant or tensors[0].element_type.get_type_name()
        settings = {
            "INFERENCE_NUM_THREADS": THREADS,
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
        }
        compiled = self.core.compile_model(self.openvino.Model([result], inputs), "CPU", settings)
        used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        if used != precision:
            raise Unknown(f"computes in {used} when told {precision}")
        request, target = compiled.create_infer_request(), self.tensor(out)
        for i, tensor in enumerate(tensors):
            request.set_input_tensor(i, tensor)
        request.set_output_tensor(target)

        def call() -> object:
            request.infer()
            return arrays, out  # keeps alive the memory of the tensors

        def read() -> np.ndarray:
            call()
            return out.swapaxes(1, 2)

        return Ready(call, read)


class Jax:
    def __init__(self) -> None:
        if hasattr(os, "sched_setaffinity"):  # it starts a thread for each processor of the affinity mask
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
        import jax

        self.jax = jax
        jax.config.update("jax_enable_x64", True)

    def forms(self, case: Case) -> list[Form]:
        if case.dtype == "float64":
            raise Unknown("no more exact than float32")
        if case.backward and case.heads * case.rows * case.tokens > MOST_LOGITS:
            raise Unknown("takes many gigabytes for the gradient")
        return forms_of(case, windows=True)

    def variants(self, case: Case) -> list[str]:
        return [""]

    def attend(self, variant: str, problem: Problem) -> Ready:
        q, k, v, *dout = map(self.jax.numpy.asarray, problem.arrays)
        window = problem.case.window if problem.case else None
        settings = {"is_causal": problem.causal}
        if window:
            settings = {"is_causal": True, "local_window_size": (window - 1, 0)}
        elif problem.mask is not None:
            settings["mask"] = self.jax.numpy.asarray(problem.mask)
        return self.ready(
            lambda q, k, v: self.jax.nn.dot_product_attention(q, k, v, **settings), q, k, v, dout
        )

    def ready(
        self, function: Callable[..., object], q: object, k: object, v: object, dout: list[object]
    ) -> Ready:
        jax = self.jax
        if dout:
            pullback = jax.jit(lambda q, k, v: jax.vjp(function, q, k, v)[1])(q, k, v)
            compiled, arguments = jax.jit(lambda pullback, dout: pullback(dout)), (pullback, *dout)
        else:
            compiled, arguments = jax.jit(function), (q, k, v)

        def call() -> object:
            return jax.block_until_ready(compiled(*arguments))

        def read() -> Result:
            result = call()
            return tuple(map(np.asarray, result)) if dout else np.asarray(result)

        return Ready(call, read)


class EjKernel(Jax):
    def __init__(self) -> None:
        super().__init__()
        load_ejkernel()
        from ejkernel.kernels._xla.flash_attention import flash_attention
        from ejkernel.ops import BwdParams, FwdParams

        self.function, self.forward, self.backward = flash_attention, FwdParams, BwdParams

    def forms(self, case: Case) -> list[Form]:
        return [form for form in forms_of(case, windows=True, documents=True) if form.name != "repeated"]

    def variants(self, case: Case) -> list[str]:
        """Sizes of blocks: the default, and larger ones."""
        return ["", "512"]

    def attend(self, variant: str, problem: Problem) -> Ready:
        q, k, v, *dout = map(self.jax.numpy.asarray, problem.arrays)
        logits = np.float64 if q.dtype == np.float64 else np.float32
        case, settings = problem.case, {"causal": problem.causal, "logits_dtype": logits}
        if variant:
            sizes = {"q_blocksize": int(variant), "kv_blocksize": int(variant)}
            settings |= {"fwd_params": self.forward(**sizes), "bwd_params": self.backward(**sizes)}
        if case and (case.window or case.documents):
            settings["causal"] = case.causal
            settings["sliding_window"] = (case.window - 1, 0) if case.window else None
            if case.documents:
                ids = (self.jax.numpy.asarray(each[None]) for each in (case.query_ids, case.ids))
                settings |= dict(zip(("q_segment_ids", "kv_segment_ids"), ids, strict=True))
        elif problem.mask is not None:
            settings["attention_mask"] = self.jax.numpy.asarray(problem.mask)
        return self.ready(lambda q, k, v: self.function(q, k, v, **settings), q, k, v, dout)


class Attnmask:
    def __init__(self) -> None:
        import attnmask

        attnmask.set_num_threads(THREADS)
        self.attnmask = attnmask

    def ready(self, case: Case) -> dict[str, Ready]:
        attnmask = self.attnmask
        q, k, v = case.arrays[:3]
        settings = self.settings(case)
        if case.backward:
            return self.backward(case, settings)
        out = np.full_like(q, 0)  # its pages are mapped
        calls = {
            "new": lambda: attnmask.flash_attention(q, k, v, **settings),
            "out=": lambda: attnmask.flash_attention(q, k, v, **settings, out=out),
        }
        return {name: Ready(call, call) for name, call in calls.items()}

    def backward(self, case: Case, settings: dict[str, object]) -> dict[str, Ready]:
        q, k, v, dout = case.arrays
        bias = {}
        if case.bias:
            bias["bias"] = np.zeros((1, case.heads, case.rows, case.tokens), q.dtype)
        _, vjp = self.attnmask.flash_attention_vjp(q, k, v, **settings, **bias)
        calls = {"new": lambda: vjp(dout)}
        if case.bias:
            _, with_bias = self.attnmask.flash_attention_vjp(q, k, v, **settings, **bias, grad_bias=True)
            calls["d bias"] = lambda: with_bias(dout)

        def reader(call: Call) -> Callable[[], Result]:
            def read() -> Result:
                grads = call()
                return grads.query, grads.key, grads.value

            return read

        return {name: Ready(call, reader(call)) for name, call in calls.items()}

    def settings(self, case: Case) -> dict[str, object]:
        settings: dict[str, object] = {"causal": case.causal}
        if case.rows != case.tokens:
            settings["causal_offset"] = "bottom-right"
        if case.window:
            settings["sliding_window"] = (case.window - 1, 0)
        if case.documents and case.by_mask_info:
            info = self.attnmask.MaskInfo.from_segments(case.ids[None])
            settings = {"attention_mask": info.apply_causal() if case.causal else info}
        elif case.documents:
            settings |= {"cum_seqlens_q": case.query_starts, "cum_seqlens_k": case.starts}
        if case.alibi:
            settings["alibi_slopes"] = 2.0 ** (-8 * np.arange(1, case.heads + 1) / case.heads)
        if case.bigbird:
            info = self.attnmask.MaskInfo.from_blocks(case.blocks[None, None], BLOCK, case.rows, case.tokens)
            settings["attention_mask"] = info
        elif case.has_blocks:
            settings["attention_mask"] = case.dense
        return settings


PEERS = {
    "torch": Torch,
    "flex": Flex,
    "ONNX Runtime": OnnxRuntime,
    "OpenVINO": OpenVino,
    "JAX": Jax,
    "ejKernel": EjKernel,
}


# The functions of the worker

ready: dict[tuple[str, str], Ready] = {}


@cache
def library() -> object:
    return (Attnmask if LIBRARY == "attnmask" else PEERS[LIBRARY])()


def start() -> None:
    """Fails if the library is not installed."""
    library()


def seconds(call: Call) -> float:
    """The shortest of a few turns, which are like those of a race."""
    first = turn(call, 1, warm=False)
    if first > SLOW:
        return first
    repeats = repeats_for(turn(call, 1, warm=False))
    times: list[float] = []
    while len(times) < TRIES and sum(times) < SLOW:
        settle()
        times.append(turn(call, repeats, warm=True))
    return min(times)


def fastest(case: Case) -> tuple[str, Ready]:
    """The fastest way to express the case for the library."""
    found: list[tuple[float, str, Ready]] = []
    troubles = []
    for form in library().forms(case):
        for variant in library().variants(case):
            name = " ".join(filter(None, (variant, form.name)))
            try:
                parts = [library().attend(variant, problem) for problem in form.problems]
                found.append((seconds(whole_call(parts)), name, joined(form, parts)))
            except Exception as error:
                troubles.append(f"{name or LIBRARY}: {error}".splitlines()[0])
    if not found:
        raise Unknown("; ".join(troubles) or "no form of it")
    return min(found, key=lambda entry: entry[0])[1:]


def whole_call(parts: list[Ready]) -> Call:
    if len(parts) == 1:
        return parts[0].call
    calls = [part.call for part in parts]

    def call() -> object:
        return [call() for call in calls]

    return call


def joined(form: Form, parts: list[Ready]) -> Ready:
    def read() -> Result:
        results = [part.read() for part in parts]
        return (form.join_grads if isinstance(results[0], tuple) else form.join)(results)

    return Ready(whole_call(parts), read)


def prepare(case: Case) -> list[str]:
    """Prepares a case, and returns the names of its calls."""
    calls = library().ready(case) if LIBRARY == "attnmask" else dict([fastest(case)])
    ready.update({(case.name, name): call for name, call in calls.items()})
    gc.collect()
    return list(calls)


def forget() -> None:
    ready.clear()
    gc.collect()


def result(case: str, name: str) -> tuple[np.ndarray, ...]:
    got = ready[case, name].read()
    return tuple(exact(part) for part in (got if isinstance(got, tuple) else (got,)))


def take_turn(case: str, name: str, repeats: int, warm: bool) -> float:
    return turn(ready[case, name].call, repeats, warm)


def memory(case: str, name: str) -> float:
    """The bytes that one call takes at its peak, in a process that has not called before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

    before = status("VmRSS")
    ready[case, name].call()
    return status("VmHWM") - before


if __name__ == "__main__":
    gc.disable()
    serve(start=start, prepare=prepare, forget=forget, result=result, turn=take_turn, memory=memory)
