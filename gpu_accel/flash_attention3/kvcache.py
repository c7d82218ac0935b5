"""`flash_attn_with_kvcache`: append new keys and values to a cache, then attend to all of it. For inference.

    o = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)        # contiguous
    o = flash_attn_with_kvcache(q, k_pages, v_pages, k, v, cache_seqlens=lengths, page_table=table)   # paged

Names and meaning are those of flash-attn; everything after v is by keyword, because the order differs between its
versions. Arguments are checked here once. No value that lives on a GPU is read by the host and launches depend on
shapes only, so calls can be captured into CUDA graphs and replayed while lengths, tables and caches change.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3 import portable_decode, reference_kvcache
from gpu_accel.flash_attention3.backends import check_name
from gpu_accel.flash_attention3.function import _on_device_of, nobody_watches, refuse_transforms, unit_last_stride
from gpu_accel.flash_attention3.gluon_launch import gluon_available
from gpu_accel.flash_attention3.kvcache_problem import (
    EIGHT_BITS,
    HEAD_SCALES,
    INTEGERS,
    NO_SCALES,
    TOKEN_SCALES,
    KVCall,
    Scales,
)
from gpu_accel.flash_attention3.problem import (
    FLOAT_DTYPES,
    check_flag,
    check_not_over,
    check_scalars,
    check_sink_values,
    check_strided,
    check_written,
    normalise_window,
    share_memory,
    values_readable,
)

Window = tuple[int | None, int | None]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    backend: str = "auto",
    out: Tensor | None = None,
    validate: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries to a KV cache, which is updated in place first where `k` and `v` are given.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, float32 or (reference only) float64. Any strides.
        k_cache, v_cache: (batch_cache, capacity, heads_kv, head_dim), or with `page_table` (pages, page_size, heads_kv,
            head_dim), any page size. In the dtype of q, float8_e4m3fn, float8_e5m2, int8, or uint8 for int4: two
            numbers of neighbouring head_dim in a byte, the low nibble first, last dimension halved. head_dim a multiple
            of 8, up to 256 in the kernels; that of v may differ. Last stride 1, others any.
        k, v: (batch, seqlen_new, heads_kv, head_dim) in the dtype of q, to be written at `cache_seqlens`. On a GPU what
            lies beyond the capacity is not written and not seen; on a CPU it is an error. The caches (and scales of
            tokens) may then be views of one tensor, but must not overlap.
        rotary_cos, rotary_sin: (at least capacity, rotary_dim / 2), float, with k only. Key i of `k` is turned by
            position cache_seqlens + i, and so is query i where causal or windowed; otherwise all queries are turned by
            position cache_seqlens. The cache holds turned keys. rotary_interleaved: pairs (0, 1), (2, 3) as in GPT-J
            (flash-attn's default); False: halves, as in Llama.
        cache_seqlens: (batch,) int32, or one int: tokens in the cache before the append, 0 allowed. Default: all of it.
        cache_batch_idx: (batch,) int32, without pages: which row of the cache belongs to a sequence.
        cache_leftpad: (batch,) int32: where a sequence begins in its row; keys before that are not seen.
        page_table: (batch, pages of a sequence), int32. Sequences may share pages. Entries behind the end of a sequence
            are not looked at. `block_table` is FlashAttention-2's name for it.
        softmax_scale: default head_dim ** -0.5.
        causal, window_size: as in `flash_attn_func`, aligned to the bottom right: the last query is at the last key.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        sinks: (heads,) float: the score of one more key with value zero, for every query of a head. lse includes it, so
            a row that sees nothing has o 0 and the sink as lse. NaN and +inf: an error on the CPU, NaN rows on a GPU.
        num_splits: how many programs share the keys of one sequence; 0: by shape. Does not change what is computed.
        k_descale, v_descale: scales of 8- and 4-bit caches, float32; number = code * scale. () for one; (heads_kv,);
            (batch, heads_kv); (pages, 1, heads_kv) for each page; (pages, page_size, heads_kv) for each token; with
            int4 (pages, page_size, heads_kv, groups) for `head_dim / groups` neighbours each. Without pages read
            batch_cache for pages and capacity for page_size. Both of one kind, but for () beside
            (heads_kv,). Default: 1. An append rounds with the
            scale given; scales for each token (and head) are computed and written by it. What is appended to 8 and 4
            bits is to be finite: int8 and int4 have no code for NaN, which becomes 0, and Inf becomes the largest
            number of the format, or with scales for each token makes that scale Inf.
        batch_invariant: split at fixed keys (multiples of 512), so that the bits of a sequence's rows depend on nothing
            but that sequence and seqlen_q. Otherwise the number of splits depends on the shape of the whole call. A
            `num_splits` that is given is batch-invariant by itself.
        return_lse, return_softmax_lse: also return lse; the second is flash-attn's name.
        backend: "auto", "portable" (Triton), "hopper" (Gluon, see `hopper_decode.refuse`) or "reference" (plain torch).
            `explain_kvcache` says which one "auto" takes and why.
        out: where to write o: its shape and dtype, last stride 1. It may be q, and lies over nothing else that is read.
        validate: read and check values of cache_seqlens, cache_leftpad, cache_batch_idx and page_table, which waits for
            the device. Default: on a CPU only. Unchecked wrong page numbers are wrong addresses.

    Returns:
        o (batch, seqlen_q, heads, head_dim_v) in the dtype of q; with return_lse also lse (batch, heads, seqlen_q),
        float32, natural logarithm. Rows that see no key: o 0, lse -inf.

    Raises:
        InvalidInputError: wrong shape, dtype, device or value. UnsupportedError: valid, but no kernel for it, or a
        gradient is asked for. HardwareError: the machine lacks what the backend asked for needs.
    """
    check_name(backend)
    refuse_transforms("flash_attn_with_kvcache")
    with_lse = check_flag("return_lse", return_lse) | check_flag("return_softmax_lse", return_softmax_lse)
    if block_table is not None:
        if page_table is not None:
            raise InvalidInputError("page_table and block_table are two names of one argument: give one of them")
        page_table = block_table
    call = make_call(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        page_table=page_table, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        sinks=sinks, num_splits=num_splits, k_descale=k_descale, v_descale=v_descale, batch_invariant=batch_invariant,
    )  # fmt: skip
    validate = values_readable(call.q) if validate is None else check_flag("validate", validate)
    if validate and not torch.compiler.is_compiling():
        _check_values(call)
    given = (q, k_cache, v_cache, k, v, sinks, k_descale, v_descale, rotary_cos, rotary_sin, out)
    tensors = [x for x in given if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise UnsupportedError("attention over a KV cache has no backward: call it under torch.no_grad(), or detach")
    direct = nobody_watches(*tensors)
    if direct or backend not in ("auto", "hopper") or call.q.device.type != "cuda":
        name = choose(call, backend)
    else:  # a compiler knows no addresses, which decide too: the op chooses
        name = backend
    shape = (*call.q.shape[:3], call.head_dim_v)
    if out is None:
        o = torch.empty(shape, dtype=call.q.dtype, device=call.q.device)
    else:
        o = out
        if not isinstance(o, Tensor) or tuple(o.shape) != shape or o.dtype != q.dtype or o.device != q.device:
            raise InvalidInputError(f"out must be {q.dtype} of shape {shape} on {q.device}, got {_described(o)}")
        if o.shape[-1] > 1 and o.stride(-1) != 1:
            raise InvalidInputError(f"out must have last stride 1, got strides {o.stride()}")
        check_written("out", o)
        check_not_over("out", o, q=q, k_cache=k_cache, v_cache=v_cache, k_descale=k_descale, v_descale=v_descale)
    wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    lse = torch.empty(shape[0], shape[2], shape[1], dtype=wide, device=call.q.device)
    if direct:
        _run(call, o, lse, name)
    else:
        kvcache_op(
            o, lse, call.k_cache, call.v_cache, call.k_scales.tensor, call.v_scales.tensor, call.q, call.k, call.v,
            call.rotary_cos, call.rotary_sin, call.rotary_interleaved, call.cache_seqlens, call.length,
            call.cache_batch_idx, call.cache_leftpad, call.page_table, call.softmax_scale, call.window_left,
            call.window_right, call.softcap, call.sinks, call.num_splits, call.batch_invariant, name,
        )  # fmt: skip
    return (o, lse) if with_lse else o


@dataclass(frozen=True)
class KVExplanation:
    """What a call over a KV cache would run and why. `print()` it."""

    backend: str
    kernel: str
    plan: str
    cache: str
    append: str
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"backend    {self.backend}: {self.kernel}",
            f"cache      {self.cache}",
            f"append     {self.append}",
            *([f"plan       {self.plan}"] if self.plan else []),
            *(f"not taken  {name}: {why}" for name, why in self.refused.items()),
        ]
        return "\n".join(lines)


def explain_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    backend: str = "auto",
    **options: Any,
) -> KVExplanation:
    """Which kernel, tile and splits `flash_attn_with_kvcache` takes for these arguments. Runs nothing, reads no values.

    `options` are those of the call that decide it (:func:`make_call`); raises what the call itself would raise, and
    TypeError for any other name.
    """
    check_name(backend)
    if "block_table" in options and "page_table" not in options:
        options["page_table"] = options.pop("block_table")
    if unknown := [name for name in options if name not in inspect.signature(make_call).parameters]:
        raise TypeError(f"explain_kvcache() got an unexpected keyword argument {unknown[0]!r}")
    call = make_call(q, k_cache, v_cache, k, v, **options)
    name = choose(call, backend)
    why = {
        "hopper": _hopper_refusal(call) or (_untimed(call) if backend == "auto" else None),
        "portable": portable_decode.refuse(call),
        "reference": "slow, so only when asked for by backend='reference'",
    }
    refused = {other: why[other] or "not asked for" for other in why if other != name}
    place = f"pages of {call.page_size}" if call.page_size else "contiguous"
    stored = call.kind or str(call.k_cache.dtype).removeprefix("torch.")
    scales = ("no scales", "a scale for each head or cache", "a scale for each token or page")[call.k_scales.mode]
    turned = f", RoPE on {call.rotary_dim} dimensions" if call.rotary_dim else ""
    return KVExplanation(
        backend=name,
        kernel=_kernel(name),
        plan=_plan(name, call),
        cache=f"{stored}, {place}, room for {call.capacity} keys, {scales}",
        append=f"{call.new} tokens{turned}, one more kernel" if call.new else "none",
        refused=refused,
    )


def choose(call: KVCall, backend: str = "auto") -> str:
    """The backend that runs a call. "auto" never takes the reference for a GPU tensor: that would be slow silently.

    Raises UnsupportedError or HardwareError with the reason when the backend cannot run the call.
    """
    if backend == "reference":
        return backend
    if backend in ("auto", "hopper"):
        why = _hopper_refusal(call)
        if why is None and (backend == "hopper" or _untimed(call) is None):
            return "hopper"
        if backend == "hopper":
            kind = HardwareError if "compute capability" in str(why) else UnsupportedError
            raise kind(f"backend 'hopper' cannot run this: it {why}; take 'portable' or 'auto'")
    why = portable_decode.refuse(call)
    if why is None:
        return "portable"
    if backend == "auto" and call.q.device.type == "cpu":
        return "reference"
    kind = HardwareError if "compute capability" in why or "interpreter" in why else UnsupportedError
    raise kind(f"backend {backend!r} cannot run this: {why}")


def _hopper_refusal(call: KVCall) -> str | None:
    if call.q.device.type != "cuda":
        return f"needs an NVIDIA GPU of compute capability 9.0, got a {call.q.device.type} tensor"
    if not gluon_available():
        return "needs the Gluon dialect, which this Triton lacks"
    from gpu_accel.flash_attention3 import hopper_decode

    return hopper_decode.refuse(call)


def _untimed(call: KVCall) -> str | None:
    """Why "auto" leaves a call that the Gluon kernel can run to the portable one, or None."""
    from gpu_accel.flash_attention3 import hopper_decode

    why = hopper_decode.untimed(call)
    return why and f"only when asked for by backend='hopper': {why}"


def _kernel(name: str) -> str:
    if name == "hopper":
        from gpu_accel.flash_attention3 import hopper_decode

        return hopper_decode.KERNEL
    return portable_decode.KERNEL if name == "portable" else "plain torch, one sequence at a time"


def _plan(name: str, call: KVCall) -> str:
    if name == "hopper":
        from gpu_accel.flash_attention3 import hopper_decode

        return str(hopper_decode.plan(call))
    return str(portable_decode.plan(call)) if name == "portable" else ""


def _run(call: KVCall, o: Tensor, lse: Tensor, name: str) -> None:
    if name == "hopper":
        from gpu_accel.flash_attention3 import hopper_decode

        with _on_device_of(call.q):
            hopper_decode.forward(call, o, lse)
        return
    if name == "portable":
        with _on_device_of(call.q):
            portable_decode.forward(call, o, lse)
        return
    reference_kvcache.append(call)
    found, found_lse = reference_kvcache.forward(call.q, call)
    o.copy_(found)
    lse.copy_(found_lse)


@torch.library.custom_op(
    "gpu_accel::flash_attn_with_kvcache",
    mutates_args=("o", "lse", "k_cache", "v_cache", "k_scale", "v_scale"),
)
def kvcache_op(
    o: Tensor, lse: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    q: Tensor, k: Tensor | None, v: Tensor | None, rotary_cos: Tensor | None, rotary_sin: Tensor | None,
    rotary_interleaved: bool, cache_seqlens: Tensor | None, length: int, cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None, page_table: Tensor | None, softmax_scale: float, window_left: int, window_right: int,
    softcap: float, sinks: Tensor | None, num_splits: int, batch_invariant: bool, name: str,
) -> None:  # fmt: skip
    """What torch.compile sees: a call that was checked, and writes into o, lse, the caches and their scales."""
    page = page_table is not None
    k_scales = _scales("k_descale", k_scale, k_cache, q, page)
    v_scales = _scales("v_descale", v_scale, v_cache, q, page)
    if k is not None:  # a compiler knew no addresses
        _check_apart(k_cache, v_cache, k_scales, v_scales, k=k, v=v)
    call = KVCall(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, cache_seqlens=cache_seqlens, length=length,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, page_table=page_table,
        softmax_scale=softmax_scale, window_left=window_left, window_right=window_right, softcap=softcap, sinks=sinks,
        num_splits=num_splits, batch_invariant=batch_invariant, k_scales=k_scales, v_scales=v_scales,
    )  # fmt: skip
    _run(call, o, lse, choose(call, name))


@kvcache_op.register_fake
def _(*_: object) -> None:
    return None


# -- checks


def _described(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__


def _tensor(name: str, x: object, rank: int, layout: str, device: torch.device | None = None) -> Tensor:
    if not isinstance(x, Tensor):
        raise InvalidInputError(f"{name} must be a torch.Tensor {layout}, got {type(x).__name__}")
    check_strided(name, x)
    if x.dim() != rank:
        raise InvalidInputError(f"{name} must be {layout}, got shape {tuple(x.shape)}")
    if device is not None and x.device != device:
        raise InvalidInputError(f"{name} must be on the device of q ({device}), got {x.device}")
    return x


def _int32(name: str, x: object, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    if x is None:
        return None
    layout = f"of shape {shape}"
    found = _tensor(name, x, len(shape), layout, device)
    if found.dtype != torch.int32:
        raise InvalidInputError(f"{name} must be int32, got {found.dtype}: use {name}.to(torch.int32)")
    if tuple(found.shape) != shape:
        raise InvalidInputError(f"{name} must be {layout}, got {tuple(found.shape)}")
    return found.contiguous()


def make_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    batch_invariant: bool = False,
) -> KVCall:
    """The arguments of :func:`flash_attn_with_kvcache` as a `KVCall`; checks all that needs no look at values."""
    _tensor("q", q, 4, "(batch, seqlen_q, heads, head_dim)")
    device, paged = q.device, page_table is not None
    if q.dtype not in FLOAT_DTYPES:
        raise InvalidInputError(f"q must be float16, bfloat16, float32 or float64, got {q.dtype}")
    layout = "(pages, page_size, heads_kv, head_dim)" if paged else "(batch, capacity, heads_kv, head_dim)"
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        _tensor(name, x, 4, layout, device)
        if x.dtype != q.dtype and x.dtype not in EIGHT_BITS and x.dtype not in INTEGERS:
            raise InvalidInputError(
                f"{name} must have the dtype of q ({q.dtype}), float8_e4m3fn, float8_e5m2, int8 or uint8 (int4), got "
                f"{x.dtype}"
            )
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise InvalidInputError(
                f"{name} must have last stride 1 (it is not copied), got strides {tuple(x.stride())}"
            )
    if k_cache.dtype != v_cache.dtype:
        raise InvalidInputError(f"k_cache and v_cache must have one dtype, got {k_cache.dtype} and {v_cache.dtype}")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise InvalidInputError(
            f"k_cache and v_cache must agree in all but head_dim, got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    batch, _, heads, head_dim = q.shape
    heads_kv, pack = k_cache.shape[2], 2 if k_cache.dtype == torch.uint8 else 1
    if k_cache.shape[3] * pack != head_dim:
        raise InvalidInputError(
            f"q and k_cache must have one head_dim, got {head_dim} and {k_cache.shape[3] * pack}"
            + (" (uint8 holds two numbers of 4 bits)" if pack == 2 else "")
        )
    if heads_kv == 0 or heads % heads_kv:
        raise InvalidInputError(f"heads of q ({heads}) must be a multiple of those of the cache ({heads_kv})")
    head_dim_v = v_cache.shape[3] * pack
    for name, dim in (("q", head_dim), ("v_cache", head_dim_v)):
        if dim == 0 or dim % 8:
            raise InvalidInputError(f"head_dim of {name} must be a multiple of 8, got {dim}: pad with zeros")
    if paged:
        _tensor("page_table", page_table, 2, "(batch, pages of a sequence)", device)
        page_table = _int32("page_table", page_table, (batch, page_table.shape[1]), device)
        if k_cache.shape[1] == 0:
            raise InvalidInputError("the page size (k_cache.shape[1]) is 0")
        if cache_batch_idx is not None:
            raise InvalidInputError("cache_batch_idx is for caches without pages: reorder the rows of page_table")
    elif cache_batch_idx is None and k_cache.shape[0] != batch:
        raise InvalidInputError(
            f"q and k_cache must have one batch size, got {batch} and {k_cache.shape[0]}: give cache_batch_idx to say "
            "which rows of the cache belong to q"
        )
    capacity = page_table.shape[1] * k_cache.shape[1] if paged else k_cache.shape[1]
    if capacity >= 1 << 30:
        raise InvalidInputError(f"a sequence can have at most 2**30 - 1 positions, this cache has {capacity}")
    k, v = _check_new(q, k, v, heads_kv, head_dim, head_dim_v)
    if k is not None:
        check_written("k_cache", k_cache)
        check_written("v_cache", v_cache)
    lengths, length = _check_lengths(cache_seqlens, batch, capacity, k is not None, device)
    cos, sin = _check_rotary(rotary_cos, rotary_sin, k is not None, head_dim, capacity, device)
    scale, softcap = check_scalars(head_dim**-0.5 if softmax_scale is None else softmax_scale, softcap)
    left, right = normalise_window(window_size, causal)
    if sinks is not None:
        _tensor("sinks", sinks, 1, "(heads,)", device)
        if sinks.shape[0] != heads or sinks.dtype not in FLOAT_DTYPES:
            raise InvalidInputError(f"sinks must be ({heads},) in a float dtype, got {_described(sinks)}")
        check_sink_values(sinks)
        sinks = sinks.contiguous()
    if not isinstance(num_splits, int) or isinstance(num_splits, bool) or not 0 <= num_splits <= 1024:
        raise InvalidInputError(f"num_splits must be an integer from 0 (by shape) to 1024, got {shown(num_splits, 40)}")
    k_scales = _scales("k_descale", k_descale, k_cache, q, paged)
    v_scales = _scales("v_descale", v_descale, v_cache, q, paged)
    if (k_scales.mode, k_scales.per_token) != (v_scales.mode, v_scales.per_token):
        raise InvalidInputError(
            f"k_descale and v_descale must be of one kind, got {_described(k_descale)} and {_described(v_descale)}"
        )
    if k is not None and k_scales.mode == TOKEN_SCALES and not k_scales.per_token:
        _refuse_shared_token_scales(k_descale, k_cache)
        _refuse_shared_token_scales(v_descale, v_cache)
    if k is not None:
        _check_apart(k_cache, v_cache, k_scales, v_scales, k=k, v=v)
    return KVCall(
        q=unit_last_stride(q), k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=cos, rotary_sin=sin,
        rotary_interleaved=check_flag("rotary_interleaved", rotary_interleaved), cache_seqlens=lengths, length=length,
        cache_batch_idx=_int32("cache_batch_idx", cache_batch_idx, (batch,), device),
        cache_leftpad=_int32("cache_leftpad", cache_leftpad, (batch,), device), page_table=page_table,
        softmax_scale=scale, window_left=left, window_right=right, softcap=softcap, sinks=sinks, num_splits=num_splits,
        batch_invariant=check_flag("batch_invariant", batch_invariant), k_scales=k_scales, v_scales=v_scales,
    )  # fmt: skip


def _check_new(q, k, v, heads_kv: int, head_dim: int, head_dim_v: int) -> tuple[Tensor | None, Tensor | None]:
    if (k is None) != (v is None):
        given, missing = ("k", "v") if v is None else ("v", "k")
        raise InvalidInputError(f"{given} was given without {missing}: new keys and values go together")
    if k is None:
        return None, None
    found = []
    for name, x, dim in (("k", k, head_dim), ("v", v, head_dim_v)):
        _tensor(name, x, 4, "(batch, seqlen_new, heads_kv, head_dim)", q.device)
        if x.dtype != q.dtype:
            raise InvalidInputError(f"{name} must have the dtype of q ({q.dtype}), got {x.dtype}")
        if (x.shape[0], x.shape[2], x.shape[3]) != (q.shape[0], heads_kv, dim) or x.shape[1] != k.shape[1]:
            raise InvalidInputError(
                f"{name} must be (batch, seqlen_new, heads_kv, head_dim) = ({q.shape[0]}, {k.shape[1]}, {heads_kv}, "
                f"{dim}), got {tuple(x.shape)}"
            )
        found.append(unit_last_stride(x))
    return found[0], found[1]


def _check_lengths(x, batch: int, capacity: int, appends: bool, device) -> tuple[Tensor | None, int]:
    if isinstance(x, Tensor):
        return _int32("cache_seqlens", x, (batch,), device), 0
    if x is None:
        if appends:
            raise InvalidInputError("cache_seqlens is needed with k and v: it says where they are written")
        return None, capacity
    if not isinstance(x, int) or isinstance(x, bool) or not 0 <= x <= capacity:
        raise InvalidInputError(
            f"cache_seqlens must be an int32 tensor of shape ({batch},), an integer from 0 to the capacity "
            f"({capacity}), or None; got {shown(x, 40)}"
        )
    return None, x


def _check_rotary(cos, sin, appends: bool, head_dim: int, capacity: int, device):
    if (cos is None) != (sin is None):
        raise InvalidInputError("rotary_cos and rotary_sin go together, one of them is missing")
    if cos is None:
        return None, None
    if not appends:
        raise InvalidInputError("rotary_cos and rotary_sin need k and v: the keys in a cache are turned already")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        _tensor(name, x, 2, "(positions, rotary_dim / 2)", device)
        if x.dtype not in FLOAT_DTYPES or x.dtype == torch.float64:
            raise InvalidInputError(f"{name} must be float16, bfloat16 or float32, got {x.dtype}")
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise InvalidInputError(f"rotary_cos and rotary_sin must agree, got {_described(cos)} and {_described(sin)}")
    half = cos.shape[1]
    if half == 0 or half % 4 or 2 * half > head_dim:
        raise InvalidInputError(
            f"rotary_dim (twice the last dimension of rotary_cos) must be a multiple of 8 up to head_dim ({head_dim}), "
            f"got {2 * half}"
        )
    if cos.shape[0] < capacity:
        raise InvalidInputError(
            f"rotary_cos has {cos.shape[0]} positions, the cache {capacity}: it must cover every position of the cache"
        )
    return cos.contiguous(), sin.contiguous()


def _scales(name: str, x: Tensor | None, cache: Tensor, q: Tensor, paged: bool) -> Scales:
    """The strides with which a tensor of scales is read; see `kvcache_problem`."""
    none = Scales(tensor=None, mode=NO_SCALES, strides=(0, 0, 0, 0))
    if x is None:
        return none
    if cache.dtype == q.dtype:
        raise InvalidInputError(f"{name} belongs to a cache in 8 or 4 bits; this one is {cache.dtype}")
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.device != q.device:
        raise InvalidInputError(f"{name} must be a float32 tensor on {q.device}, got {_described(x)}")
    rows, places, heads, width = cache.shape
    shape, strides = tuple(x.shape), x.stride()
    if shape in ((), (1,)):
        return Scales(tensor=x, mode=HEAD_SCALES, strides=(0, 0, 0, 0))
    if shape == (heads,):
        return Scales(tensor=x, mode=HEAD_SCALES, strides=(0, 0, strides[0], 0))
    if shape == (q.shape[0], heads):
        return Scales(tensor=x, mode=HEAD_SCALES, strides=(strides[0], 0, strides[1], 0))
    fits = len(shape) in (3, 4) and all(n in (1, m) for n, m in zip(shape, (rows, places, heads), strict=False))
    groups = shape[3] if len(shape) == 4 else 1
    if fits and len(shape) == 4:
        wide = 2 * width
        fits = cache.dtype == torch.uint8 and groups > 0 and wide % groups == 0 and (wide // groups) % 2 == 0
        fits = fits and groups & (groups - 1) == 0
    if not fits:
        row, place = ("pages", "page_size") if paged else ("batch_cache", "capacity")
        raise InvalidInputError(
            f"{name} must be (), (heads_kv,), (batch, heads_kv), ({row}, 1, heads_kv), ({row}, {place}, heads_kv) or, "
            f"with int4, ({row}, {place}, heads_kv, groups) with groups a power of two, for a cache "
            f"{tuple(cache.shape)} and batch {q.shape[0]}; got {shape}"
        )
    s = [0 if n == 1 else step for n, step in zip(shape, strides, strict=True)]
    return Scales(
        tensor=x, mode=TOKEN_SCALES, strides=(s[0], s[1], s[2], s[3] if len(s) == 4 else 0), groups=groups,
        per_token=shape[:3] == (rows, places, heads),
    )  # fmt: skip


def _refuse_shared_token_scales(x: Tensor | None, cache: Tensor) -> None:
    """An append cannot know a scale that tokens of other heads, or of other calls, share with the new ones."""
    if x is not None and x.shape[1] != 1 and tuple(x.shape[:3]) != tuple(cache.shape[:3]):
        raise InvalidInputError(
            f"scales of shape {tuple(x.shape)} are shared by heads, so an append cannot compute them: give each head "
            f"its own, {tuple(cache.shape[:3])}"
        )


def _check_apart(
    k_cache: Tensor, v_cache: Tensor, k_scales: Scales, v_scales: Scales, **new: Tensor | None
) -> None:  # fmt: skip
    """An append writes keys and values, and scales of tokens: none of them where others, or the new ones, are."""
    written = [("k_cache", k_cache, "v_cache", v_cache)]
    if k_scales.per_token and k_scales.tensor is not None and v_scales.tensor is not None:
        check_written("k_descale", k_scales.tensor)
        check_written("v_descale", v_scales.tensor)
        written.append(("k_descale", k_scales.tensor, "v_descale", v_scales.tensor))
    for one, x, other, y in written:
        if share_memory(x, y):
            raise InvalidInputError(
                f"{one} and {other} share memory, so an append would write values over keys: give each its own"
            )
    if torch.compiler.is_compiling():
        return
    for cache, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        own = x.untyped_storage()._cdata  # asked first: tokens of another storage are the rule, and an append is short
        for name, y in new.items():
            if y is not None and y.untyped_storage()._cdata == own and share_memory(x, y):
                raise InvalidInputError(
                    f"{name} lies in {cache}, where an append writes while others read it: pass {name}.clone()"
                )


def _check_values(call: KVCall) -> None:
    """Lengths within the capacity, pages that exist. Reads tensors, so on a GPU it waits."""
    batch, capacity = call.q.shape[0], call.capacity
    lengths = [call.length] * batch if call.cache_seqlens is None else call.cache_seqlens.tolist()
    for b, n in enumerate(lengths):
        if n < 0 or n + call.new > capacity:
            raise InvalidInputError(
                f"cache_seqlens[{b}] is {n}" + (f" and {call.new} tokens are appended" if call.new else "")
                + f", but a sequence has room for {capacity}"
            )  # fmt: skip
    if call.cache_leftpad is not None:
        for b, n in enumerate(call.cache_leftpad.tolist()):
            if not 0 <= n <= lengths[b]:
                raise InvalidInputError(f"cache_leftpad[{b}] is {n}, but that sequence ends at {lengths[b]}")
    if call.cache_batch_idx is not None:
        rows = call.cache_batch_idx.tolist()
        for b, row in enumerate(rows):
            if not 0 <= row < call.k_cache.shape[0]:
                raise InvalidInputError(f"cache_batch_idx[{b}] is {row}, the cache has {call.k_cache.shape[0]} rows")
        if call.new and len(set(rows)) < len(rows):
            raise InvalidInputError("cache_batch_idx names a row twice, so two sequences would be appended to one")
    if call.page_table is not None:
        for b, row in enumerate(call.page_table.tolist()):
            for page in row[: math.ceil((lengths[b] + call.new) / call.page_size)]:
                if not 0 <= page < call.k_cache.shape[0]:
                    raise InvalidInputError(
                        f"page_table[{b}] uses page {page}, the cache has {call.k_cache.shape[0]} pages"
                    )
        if call.new:
            first = [0] * batch if call.cache_leftpad is None else call.cache_leftpad.tolist()
            _refuse_shared_places(call.page_table, first, lengths, call.new, call.page_size)


def _refuse_shared_places(table: Tensor, first: list[int], lengths: list[int], new: int, page_size: int) -> None:
    """Sequences may share pages that hold a common beginning, but each needs its own for what is appended."""
    owner: dict[tuple[int, int], int] = {}
    for b, (row, n) in enumerate(zip(table.tolist(), lengths, strict=True)):
        for place in range(n, n + new):
            at = row[place // page_size], place % page_size
            if at in owner:
                raise InvalidInputError(
                    f"page_table[{owner[at]}] and page_table[{b}] both append to page {at[0]}: a page may be shared "
                    "only where nothing is written to it"
                )
            owner[at] = b
    written: dict[int, list[tuple[int, int]]] = {}
    for (page, place), b in owner.items():
        written.setdefault(page, []).append((place, b))
    for b, row in enumerate(table.tolist()):
        for i, page in enumerate(row[: math.ceil(lengths[b] / page_size)]):
            for place, other in written.get(page, ()):
                if first[b] <= i * page_size + place < lengths[b]:
                    raise InvalidInputError(
                        f"page_table[{other}] appends to page {page} where page_table[{b}] has keys: a page may be "
                        "shared only where nothing is written to it"
                    )
