"""Keywords that functions take without listing them, and keywords of other libraries: what to write instead."""

from collections.abc import Callable, Collection
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NoReturn, TypeVar, cast

from attnmask._common.types import AnyFunction, Arguments, Given
from attnmask._common.warnings import warn_once

_Function = TypeVar("_Function", bound=AnyFunction)

_LENGTHS = "lengths follow from where sequences start"
_LEAVE_OUT = {
    "enable_gqa": "key and value may have fewer heads than query",
    **dict.fromkeys(
        ("max_seqlen_q", "max_seqlen_k", "max_q", "max_k", "max_length_q", "max_length_k"), _LENGTHS
    ),
    "deterministic": "results are the same bits in every run",
    "training": "dropout_prob is 0.0 unless it is given",
    "implementation": "the package has one",
    "slot_mapping": "attnmask.write_kvcache writes new tokens to slots",
    "out": "the result is a new array",
    "layout": "arrays are [batch, tokens, heads, head_dim]: write x.swapaxes(1, 2) for heads first",
    "head_first": "arrays are [batch, tokens, heads, head_dim]: write x.swapaxes(1, 2) for heads first",
    "device": "memory is the CPU's",
    "num_splits": "it is chosen, and changes no bits",
}
_IN_CONFIG = "config=, the model's, which says so"
_OURS = {  # what to write, of several that which the function has; and what others call it
    "query=": "q",
    "key=": "k",
    "value=": "v",
    "causal=": "is_causal use_causal_mask",
    "softmax_scale= | scale=": "scale scaling sm_scale softmax_scale",
    "attention_mask= | mask=": "mask attention_mask",  # an operator calls it so
    "attention_mask= for a mask of allowed pairs, or bias= for what is added to logits": "attn_mask",
    "attention_mask=~key_padding_mask[:, None, None, :]": "key_padding_mask",
    "attention_mask=, an array or a MaskInfo": "block_mask",
    "bias=": "attn_bias attention_bias",
    "bias=, an array of what it adds": "score_mod",
    "sliding_window=, with None instead of -1": "window_size",
    "sliding_window=": "local_window_size",
    "logits_soft_cap=": "softcap soft_cap",
    "dropout_prob=": "dropout dropout_p dropout_rate p",
    "dropout_seed=": "seed",
    "cum_seqlens_q= | cu_seqlens_q= | cu_seqlens=": "cu_seqlens cu_seqlens_q cum_seqlens_q cu_seq_q cu_seq_lens_q",
    "cum_seqlens_k= | cu_seqlens_k_new= | cu_seqlens=": "cu_seqlens_k",
    "cum_seqlens_k= | cu_seqlens=": "cu_seqlens_kv cu_seq_k cu_seq_lens_k",
    "cu_seqlens=, where sequences start": "seq_idx",
    "q_segment_ids=": "segment_ids",
    "q_segment_ids=, with -1 for padding": "query_seq_lengths",
    "kv_segment_ids=, with -1 for padding": "key_value_seq_lengths",
    "softmax_aux=": "sinks s_aux learnable_sink",
    "return_lse=": "return_softmax_lse return_residual return_aux",
    "return_lse=, which returns no weights": "return_attn_probs",
    # Caches
    "block_table=": "page_table block_tables",
    "cache_seqlens=": "seqused_k seq_lens context_lens",
    "k_scale=": "k_descale",
    "v_scale=": "v_descale",
    f"layers= | {_IN_CONFIG}": "num_layers num_hidden_layers",
    f"head_dim= | {_IN_CONFIG}": "head_dim head_size",
    f"kv_heads= | {_IN_CONFIG}": "num_key_value_heads num_kv_heads num_heads",
    "value_head_dim=": "v_head_dim",
    "pages=": "num_pages num_blocks",
    "pages=, as many as hold the tokens of all sequences": "max_cache_len max_seq_len",
    "page_size=": "block_size",
    "dtype=": "cache_dtype",
    # Linear attention and short convolutions
    "decay=": "g gk g_gamma",
    "initial_state=": "h0 initial_states",
    "state= | initial_state=": "recurrent_state ssm_state conv_state",
    "state_indices=": "conv_state_indices cache_indices",
    "return_state=": "output_final_state return_final_states",
    "normalize_qk=": "use_qk_l2norm_in_kernel use_qk_l2norm",
    "cu_seqlens=": "offsets",
}
# Spellings of one argument: a function has one of them, and takes the others with a warning.
_SPELLINGS = (
    ("head_dim", "depth"),
    ("value_head_dim", "value_depth"),
    ("softmax_scale", "scale"),
    ("cum_seqlens_q", "cu_seqlens_q"),
    ("cum_seqlens_k", "cu_seqlens_k"),
)
_OTHERS = {one: [other for other in names if other != one] for names in _SPELLINGS for one in names}
_WRITE = {theirs: ours for ours, names in _OURS.items() for theirs in names.split()}


def hides(name: str) -> Callable[[_Function], _Function]:
    """Hide a parameter from the signature that `help` shows: it exists only to say what to write instead."""

    def hide(function: _Function) -> _Function:
        whole = signature(function)
        shown = [parameter for parameter in whole.parameters.values() if parameter.name != name]
        function.__signature__ = whole.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return hide


def taken(function: str, given: Given, parameters: Collection[str]) -> Arguments:
    """Return keywords under the names of `parameters`: those of another spelling with a warning; others are refused."""
    found: Arguments = {}
    for name, value in given.items():
        own = [name, *_OTHERS.get(name, ())]
        ours = next((x for x in own if x in parameters), None)
        if ours is None:
            reject_unknown(function, [name], parameters)
        if ours in found:
            raise TypeError(
                f"{function}() got {ours!r} by two names: {', '.join(x for x in own if x in given)}"
            )
        if ours != name:
            warn_once(f"{function} {name}", f"{function}() takes {name!r} as {ours!r}: write {ours}=")
        found[ours] = value
    return found


def advises(function: _Function) -> _Function:
    """Take keywords of another spelling and say of wrong ones what to write instead, in a function for whose calls half
    a microsecond is nothing."""
    name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call(*args: object, **given: object) -> Any:
        try:
            return function(*args, **given)
        except TypeError:
            parameters = signature(function).parameters
            unknown = [key for key in given if key not in parameters]
            if not unknown:
                raise
            again = taken(name, given, parameters)
        return function(*args, **again)

    return cast(_Function, call)


def refuse(function: AnyFunction, unknown: Collection[str]) -> NoReturn:
    """Refuse keywords that a function collects only to refuse them."""
    reject_unknown(function.__name__, unknown, signature(function).parameters)


def advice(name: str, parameters: Collection[str]) -> str:
    """Return what to write instead of the keyword `name`, given the function's `parameters`."""
    if name in _LEAVE_OUT:
        return f"; leave it out, as {_LEAVE_OUT[name]}"
    if name.startswith("grad_") and name.removeprefix("grad_") in parameters:
        return (
            "; leave it out: flash_attention_vjp takes it, and in PyTorch and JAX gradients need no argument"
        )
    for instead in _WRITE.get(name, "").split(" | "):
        if instead.partition("=")[0] in parameters:
            return f"; write {instead}"
    from difflib import get_close_matches  # takes a millisecond, which most programs do not need

    return "".join(f"; write {close}=" for close in get_close_matches(name, parameters, 1))


def types_of(options: AnyFunction, array: str) -> dict[str, str]:
    """Return the types in a `TypedDict` as they are written, for a kind of array."""
    hints = options.__annotations__.items()
    return {name: hint.__forward_arg__.replace("_Array", array) for name, hint in hints}


class Keywords:
    """The arguments that functions take as ``**more``: their defaults, and the types that signatures show."""

    def __init__(self, defaults: Given, types: Given) -> None:
        self.defaults, self.types = dict(defaults), types

    def __call__(self, function: _Function) -> _Function:
        """Show them in the signature of a function."""
        whole = signature(function)
        own = [row for row in whole.parameters.values() if row.kind is not Parameter.VAR_KEYWORD]
        more = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=self.types[name])
            for name, default in self.defaults.items()
            if name not in whole.parameters
        ]
        function.__signature__ = whole.replace(parameters=own + more)  # type: ignore[attr-defined]
        return function

    def complete(self, function: AnyFunction, own: Given, more: Given) -> Arguments:
        """Return all arguments of a call: its `own`, and these; or refuse those that `function` does not take."""
        if more and not more.keys() <= self.defaults.keys():
            more = taken(function.__name__, more, self.defaults | signature(function).parameters)
        return {**own, **self.defaults, **more}


def reject_unknown(function: str, unknown: Collection[str], parameters: Collection[str]) -> NoReturn:
    name = next(iter(unknown))
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{advice(name, parameters)}")
