"""Random attention calls against float64: draw a call, judge it, and make a failing one small.

    search(seconds=10, seed=1)            # raises IncorrectResultError with the smallest failing call found
    search_apart(seconds=10, seed=1)      # the same in a process of its own, which a fault of the GPU may end
    check(Call(batch=1, ...))             # replays one, as printed

A kernel is compiled for what a call asks for (head dims, masks, features), which takes seconds, so calls are drawn in
rounds: one set of such choices, then many lengths, heads, strides, scales and values. Of these, too, some ask for
another kernel (a tail of keys, no gradient, strides off 16 bytes). `launched` tells before anything is compiled, so
after a call that compiled something come others that are drawn until they compile nothing. Every feature of
`flash_attn_func` and `flash_attn_varlen_func` takes part.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.errors import IncorrectResultError, UnsupportedError
from gpu_accel.testing.errors import compare
from gpu_accel.testing.inputs import generator, make_qkv, make_varlen

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128), (80, 80), (40, 104), (128, 64))
KINDS = ("normal", "strided", "transposed", "broadcast", "misaligned", "outliers", "packed")
PACKED_KINDS = ("normal", "poisoned", "strided", "misaligned", "outliers")
SENT = ("normal", "strided", "expanded")  # what autograd is handed: one number for a whole row, as sum() leaves it
# Wrong results are wrong by a tenth or more; rounding is not, though of a few elements its largest error is a lottery.
_FACTOR = 3.0
UNSUPPORTED, FATAL = "unsupported", "fatal: "
_HERE, _APART = 20.0, 60.0  # seconds for making a call small
_DRAWS = 40  # at most, for a call that compiles nothing
_EPSILONS = {2: (4.0, 8.0), 4: (16.0, 64.0)}  # by bytes: of the largest element; of terms of size one that cancel


@triton.jit
def score(score, b, h, q_idx, kv_idx):
    return tl.where((kv_idx + h) % 5 == 1, float("-inf"), score + 0.03 * (b + 1) * score * score)


@triton.jit
def score_grad(grad, score, b, h, q_idx, kv_idx):
    return grad * (1.0 + 0.06 * (b + 1) * score)


def score_twin(score, b, h, q_idx, kv_idx):
    return torch.where((kv_idx + h) % 5 == 1, float("-inf"), score + 0.03 * (b + 1) * score * score)


@triton.jit
def band(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 70 + 50 * h) & (kv_idx - q_idx < 90)


def band_twin(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 70 + 50 * h) & (kv_idx - q_idx < 90)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One attention call. Dense where both tuples of lengths have one entry and `packed` is off; 0 means off."""

    backend: str = "auto"
    dtype: str = "bf16"
    head_dim: int = 64
    head_dim_v: int = 64
    packed: bool = False
    batch: int = 1
    lengths_q: tuple[int, ...] = (1,)
    lengths_k: tuple[int, ...] = (1,)
    used: bool = False
    heads_kv: int = 1
    group: int = 1
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float = 0.0
    sinks: bool = False
    alibi: bool = False
    score_mod: bool = False
    mask_mod: bool = False
    block: int = 0
    kind: str = "normal"
    sent: str = "normal"
    gradients: bool = True
    lse_gradient: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    max_logits: bool = False
    seed: int = 0


def draw_round(rng: random.Random, backends: tuple[str, ...]) -> dict[str, Any]:
    """What kernels are compiled for: one draw holds for many calls."""
    plain = rng.random() < 0.4
    packed = rng.random() < 0.4
    causal, windowed = rng.random() < 0.5, rng.random() < 0.25
    some = {
        name: not plain and rng.random() < 0.3
        for name in ("sinks", "alibi", "score_mod", "mask_mod", "max_logits", "batch_invariant")
    }
    block = 0
    if not plain and not packed and rng.random() < 0.3:
        block, causal, windowed = rng.choice((16, 64, 128)), False, False
        some["mask_mod"] = True
    d, dv = rng.choice(HEAD_DIMS)
    dtype = rng.choice(("bf16", "bf16", "fp16", "fp32"))
    return {
        "backend": rng.choice(backends), "dtype": dtype, "head_dim": d, "head_dim_v": dv, "packed": packed,
        "used": packed and rng.random() < 0.3, "causal": causal, "window": (0, 0) if windowed else (-1, -1),
        "softcap": 1.0 if rng.random() < 0.2 else 0.0, "block": block, **some,
    }  # fmt: skip


def draw_call(rng: random.Random, choices: dict[str, Any], longest: int) -> Call:
    """The rest of a call: lengths (short ones often, 0 and 1 too), heads, memory, values."""

    def length() -> int:
        return max(1, any_length()) if choices["block"] else any_length()  # torch makes no block mask of nothing

    def any_length() -> int:
        if rng.random() < 0.12:
            return rng.choice((0, 1, 2, 63, 64, 65, 127, 128, 129)) % (longest + 1)
        return round(longest ** rng.random())

    entries = rng.randint(1, 5) if choices["packed"] else 1
    lengths_q = tuple(length() for _ in range(entries))
    lengths_k = lengths_q if rng.random() < 0.3 else tuple(length() for _ in range(entries))
    window = choices["window"]
    if window != (-1, -1):
        window = (rng.choice((-1, 0, rng.randint(1, longest))), rng.choice((-1, 0, rng.randint(1, longest))))
        window = window if window != (-1, -1) else (7, 0)
    kinds: tuple[str, ...] = PACKED_KINDS if choices["packed"] else KINDS
    if choices["head_dim"] != choices["head_dim_v"]:
        kinds = tuple(kind for kind in kinds if kind != "packed")  # one projection has one width
    return Call(
        **{n: x for n, x in choices.items() if n not in ("window", "softcap")},
        batch=1 if choices["packed"] else rng.choice((1, 1, 2, 3)),
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        heads_kv=rng.choice((1, 1, 2)),
        group=rng.choice((1, 2, 3)),
        window=window,
        softcap=choices["softcap"] and rng.choice((0.5, 3.0, 20.0)),
        softmax_scale=rng.choice((0.0, 0.0, 0.0, 0.03, 0.2)),
        kind=rng.choice(kinds),
        sent=rng.choice(SENT),
        gradients=rng.random() < 0.7,
        lse_gradient=rng.random() < 0.3,
        deterministic=rng.random() < 0.3,
        seed=rng.randrange(1 << 30),
    )


def _tensors(call: Call, device: str) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """q, k, v and the options of the call."""
    heads = call.heads_kv * call.group
    shape: dict[str, Any] = dict(
        heads=heads, heads_kv=call.heads_kv, head_dim=call.head_dim, head_dim_v=call.head_dim_v,
        dtype=DTYPES[call.dtype], device=device, kind=call.kind, seed=call.seed,
    )  # fmt: skip
    source = generator(call.seed + 2, device)
    options: dict[str, Any] = {"causal": call.causal, "window_size": call.window, "softcap": call.softcap}
    if call.softmax_scale:
        options["softmax_scale"] = call.softmax_scale
    if call.packed:
        q, k, v, cu_q, cu_k, *_ = make_varlen(lengths_q=list(call.lengths_q), lengths_k=list(call.lengths_k), **shape)
        options |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        if call.used:
            share = torch.rand(2, len(call.lengths_q), generator=source, device=device)
            for name, part, lengths in (("q", share[0], call.lengths_q), ("k", share[1], call.lengths_k)):
                options[f"seqused_{name}"] = (part * torch.tensor(lengths, device=device)).round().int()
    else:
        q, k, v = make_qkv(batch=call.batch, seqlen_q=call.lengths_q[0], seqlen_k=call.lengths_k[0], **shape)
    if call.sinks:
        options["sinks"] = torch.randn(heads, generator=source, device=device) * 2
    if call.alibi:
        options["alibi_slopes"] = torch.rand(heads, generator=source, device=device) * 0.2
    return (q, k, v), options


def _block_mask(call: Call, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    heads = call.heads_kv * call.group
    return create_block_mask(
        band_twin, None, heads, call.lengths_q[0], call.lengths_k[0], device=device, BLOCK_SIZE=call.block
    )


def _forward(
    call: Call, device: str, attention: Callable[..., Any] | None
) -> tuple[tuple[Tensor, ...], dict[str, Any], list[Tensor], tuple[Tensor, ...]]:
    """q, k, v; what the reference is told; what gradients are asked for; what the attention that is judged gave."""
    from gpu_accel.flash_attention3 import flash_attn_func, flash_attn_varlen_func

    tensors, options = _tensors(call, device)
    known = dict(options)
    ours = {**options, "backend": call.backend, "deterministic": call.deterministic,
            "batch_invariant": call.batch_invariant, "return_max_logits": call.max_logits}  # fmt: skip
    if call.score_mod:
        ours |= {"score_mod": score, "score_mod_grad": score_grad}
        known["score_mod"] = score_twin
    if call.mask_mod:
        ours["mask_mod"], known["mask_mod"] = band, band_twin
    if call.block:
        ours["block_mask"] = _block_mask(call, device)
    leaves = [x.detach().requires_grad_(call.gradients) for x in tensors]
    if call.sinks:
        leaves.append(options["sinks"].detach().requires_grad_(call.gradients))
        ours["sinks"] = leaves[3]
    run = attention or (flash_attn_varlen_func if call.packed else flash_attn_func)
    return tensors, known, leaves, run(*leaves[:3], return_lse=True, **ours)


def _sent(call: Call, o: Tensor, lse: Tensor, true_lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of o and, if asked for, of lse, 0 where no key is seen."""
    source = generator(call.seed + 1, o.device)
    do = torch.randn(o.shape, generator=source, device=o.device).to(o.dtype)
    if call.sent == "strided":
        do = torch.stack([do, do], -2).flatten(-3, -2)[..., ::2, :]
    elif call.sent == "expanded":
        do = do[..., :1].contiguous().expand(o.shape)
    if not call.lse_gradient:
        return do, None
    dlse = torch.randn(lse.shape, generator=source, device=o.device)
    return do, torch.where(true_lse == float("-inf"), 0.0, dlse).to(lse.dtype)


def launched(call: Call, *, device: str = "cuda") -> frozenset[Any]:
    """The kernels of a call, its gradients too, as far as compiling is concerned. Nothing runs but plain torch.

    Raises what the call raises, UnsupportedError for one.
    """
    from gpu_accel.flash_attention3.launch import recording

    with recording() as entries:
        _, _, leaves, (o, lse, *_) = _forward(call, device, None)
        if call.gradients:
            do, dlse = _sent(call, o, lse, lse)
            outputs, sent = ([o], [do]) if dlse is None else ([o, lse], [do, dlse])
            torch.autograd.grad(outputs, leaves, sent)
    return frozenset(_form(kernel, arguments, options) for kernel, _, arguments, options in entries)


def _form(kernel: Any, arguments: tuple, options: dict[str, Any]) -> tuple:
    """What Triton compiles a launch for, near enough: a form too many or too few here costs time, nothing else."""
    plain = {name for name in getattr(kernel, "do_not_specialize", None) or () if isinstance(name, str)}
    names = getattr(kernel, "arg_names", [])
    named = [*zip(names, arguments, strict=False), *options.items()]
    return (kernel, *((name, _specialised(x, name in plain, name in options)) for name, x in named))


def _specialised(x: Any, plain: bool, constant: bool) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, tuple):
        return tuple(_specialised(one, plain, constant) for one in x)
    if hasattr(x, "block_shape"):
        return x.base.dtype, tuple(x.block_shape)
    if constant or x is None or isinstance(x, bool):
        return x
    return type(x) if plain or not isinstance(x, int) else (x == 1, x % 16 == 0)


def check(call: Call, *, device: str = "cuda", attention: Callable[..., Any] | None = None) -> None:
    """Run one call, its gradients too where asked for, and compare everything with float64.

    Args:
        attention: what to judge, with the arguments of `flash_attn_func` or `flash_attn_varlen_func`; default: these.

    Raises:
        IncorrectResultError: names the tensor and its error. UnsupportedError: there is no kernel for the call.
    """
    from gpu_accel.flash_attention3.reference import attention_reference, attention_truth, attention_truth_backward

    tensors, known, leaves, (o, lse, *maxima) = _forward(call, device, attention)
    true = attention_truth(*tensors, return_max_logits=True, **known)
    rulers = [x.detach().requires_grad_(call.gradients) for x in leaves]
    in_dtype = {**known, "sinks": rulers[3]} if call.sinks else known
    with torch.enable_grad():
        ruler = attention_reference(*rulers[:3], dtype=o.dtype, **in_dtype)
    size = true[0].abs().amax(-1, keepdim=True).clamp_min(1e-30) if o.numel() else 1.0  # rows of o differ in size
    _judge("o / size of its row", o.double() / size, true[0] / size, ruler[0].double() / size, o.dtype)
    _judge("lse", lse, true[1], None, torch.float32, scale=64.0)
    for found in maxima:
        _judge("max_logits", found, true[2], None, torch.float32, scale=64.0)
    if not call.gradients:
        return
    do, dlse = _sent(call, o, lse, true[1])
    outputs, sent = ([o], [do]) if dlse is None else ([o, lse], [do, dlse])
    grads = torch.autograd.grad(outputs, leaves, sent)
    truths = attention_truth_backward(do, *tensors, dlse=dlse, **known)
    measures: Any = [None] * len(grads)
    if ruler[0].requires_grad:
        to_send = [do] if dlse is None else [do, dlse.to(o.dtype)]
        measures = torch.autograd.grad(ruler[: len(to_send)], rulers, to_send, allow_unused=True)
    floors = dict(zip(("dq", "dk"), _rounding_of_differences(do, true[0], tensors, known), strict=True))
    for name, got, exact, measure in zip(("dq", "dk", "dv", "dsinks"), grads, truths, measures, strict=False):
        rough = o.dtype if name == "dsinks" else got.dtype
        measure = None if measure is None else measure.to(got.dtype)
        _judge(name, got, exact, measure, rough, gradient=True, floor=floors.get(name, 0.0))


def _rounding_of_differences(do: Tensor, o: Tensor, tensors: tuple[Tensor, ...], known: dict[str, Any]) -> list[float]:
    """What dq and dk of float32 may err because dP - delta is a difference of two rounded sums.

    With one key both are the same product and nothing of them should be left. The yardstick finds exactly that, because
    torch's softmax takes delta from the very dP; kernels take it from o, in another order, so it cannot say what they
    may err. A sum of products a b, rounded term by term, errs by about 0.16 eps |a| |b| (a random walk), and dq and dk
    add such errors, P (|dO| (|V| + |O|)) times k or q, over keys or queries. Allowed is 2 eps times the
    root of the sum of squares, with P^2 <= P, which makes both sums attention again. 16 bits have `_EPSILONS`.
    """
    from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward

    q, k, v = tensors
    if q.dtype != torch.float32 or not q.numel() or not k.numel():
        return [0.0, 0.0]
    largest_v = v.double().norm(dim=-1).nan_to_num(0.0).max()
    reach = do.double().norm(dim=-1, keepdim=True) * (largest_v + o.double().norm(dim=-1, keepdim=True).nan_to_num(0.0))
    of_q = attention_truth(q, k, k.double().square(), **known)[0] * reach.square()
    of_k = attention_truth_backward(q.double().square() * reach.square(), q, k, torch.zeros_like(k), **known)[2]
    factor = 2.0 * torch.finfo(q.dtype).eps * known.get("softmax_scale", q.shape[-1] ** -0.5)
    return [factor * math.sqrt(x.nan_to_num(0.0).max().item()) for x in (of_q, of_k)]


def _judge(
    name: str, out: Tensor, truth: Tensor, ruler: Tensor | None, dtype: torch.dtype, *, scale: float = 0.0,
    gradient: bool = False, floor: float = 0.0,
) -> None:  # fmt: skip
    finite = truth[truth.isfinite()]
    scale = max(scale, finite.abs().max().item() if finite.numel() else 0.0)
    eps, (of_largest, of_one) = torch.finfo(dtype).eps, _EPSILONS[dtype.itemsize]
    floor = max(floor, eps * max(of_largest * scale, of_one if gradient else 0.0))
    found = compare(out, truth.to(torch.float64), ruler, factor=_FACTOR, floor=floor)
    if not found.ok:
        why = found.why or f"error {found.error:.3g}, allowed {found.bound:.3g}"
        raise IncorrectResultError(f"{name}: {why} at {found.index}")


_OFF: dict[str, Any] = {
    "used": False, "score_mod": False, "block": 0, "sinks": False, "alibi": False, "max_logits": False,
    "batch_invariant": False, "deterministic": False, "lse_gradient": False, "softcap": 0.0, "softmax_scale": 0.0,
    "window": (-1, -1), "causal": False, "kind": "normal", "sent": "normal", "gradients": False, "batch": 1, "group": 1,
    "heads_kv": 1,
}  # fmt: skip


def simpler(call: Call) -> Iterator[Call]:
    """Calls with one thing less, in the order in which they are worth trying."""
    if call.packed:
        for i in range(len(call.lengths_q) if len(call.lengths_q) > 1 else 0):
            parts = {n: getattr(call, n)[:i] + getattr(call, n)[i + 1 :] for n in ("lengths_q", "lengths_k")}
            yield replace(call, **parts)
        if len(call.lengths_q) == 1 and not call.used:
            yield replace(call, packed=False, kind="normal")
    for name, off in _OFF.items():
        if getattr(call, name) != off:
            yield replace(call, **{name: off})
    if call.mask_mod and not call.block:
        yield replace(call, mask_mod=False)
    if (call.head_dim, call.head_dim_v) != (64, 64):
        yield replace(call, head_dim=64, head_dim_v=64)
    for name in ("lengths_q", "lengths_k"):
        for i, n in enumerate(getattr(call, name)):
            for less in dict.fromkeys((n // 2, n - n % 64, n - 1)):
                if (1 if call.block else 0) <= less < n:
                    lengths = getattr(call, name)
                    shorter: dict[str, Any] = {name: (*lengths[:i], less, *lengths[i + 1 :])}
                    yield replace(call, **shorter)


def shrink(call: Call, fails: Callable[[Call], bool], *, seconds: float = 20.0) -> Call:
    """The smallest call found that still fails."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for one in simpler(call):
            if time.monotonic() > end:
                return call
            if fails(one):
                call = one
                break
        else:
            return call
    return call


def failure(call: Call, *, device: str = "cuda", attention: Callable[..., Any] | None = None) -> str:
    """What is wrong with a call, "" if nothing is, and "unsupported" where there is no kernel for it.

    A fault that ends all work on the GPU in this process begins with `FATAL`.
    """
    try:
        check(call, device=device, attention=attention)
    except UnsupportedError:
        return UNSUPPORTED
    except Exception as error:  # whatever a kernel raises is a finding
        # a launcher that waits says it in words of its own, as a RuntimeError
        fatal = isinstance(error, torch.AcceleratorError) or "Triton Error [CUDA]" in str(error)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/testing/" not in f.filename]
        ours = [f for f in frames if "gpu_accel" in f.filename]
        where = f" (from {Path(ours[-1].filename).name}:{ours[-1].lineno})" if fatal and ours else ""
        return f"{FATAL if fatal else ''}{type(error).__name__}: {error}{where}"
    return ""


def search(
    *, seconds: float, seed: int, device: str = "cuda", longest: int = 600, calls_a_round: int = 60,
    calls_a_form: int = 30, backends: tuple[str, ...] = ("auto", "auto", "portable"),
    attention: Callable[..., Any] | None = None, begin: Callable[[Call], None] = lambda call: None,
) -> dict[str, int]:  # fmt: skip
    """Draw and judge calls until the time is over.

    Args:
        calls_a_form: of so many calls one is drawn whatever it compiles, the others until they compile nothing new
            (at most 40 draws). All are as drawn with 1, with an `attention`, and where nothing is compiled, on a CPU.
        begin: is told each call before it is made.

    Returns how many were "judged", how many had no kernel ("refused"), how many "rounds" they came in and how many
    "forms" of kernels that compiled.

    Raises:
        IncorrectResultError: what went wrong, in the call as drawn and in the smallest that still fails, with the seed.
            After a fault that ends all work on the GPU here, smaller calls are tried in processes of their own.
    """
    rng = random.Random(seed)
    counts = {"judged": 0, "refused": 0, "rounds": 0, "forms": 0}
    end = time.monotonic() + seconds
    known: set[Any] | None = None if calls_a_form == 1 or attention or device == "cpu" else set()
    while time.monotonic() < end:
        choices = draw_round(rng, backends)
        counts["rounds"] += 1
        for i in range(calls_a_round):
            if time.monotonic() > end:
                break
            call = draw_call(rng, choices, longest)
            if known is not None:
                again = functools.partial(draw_call, rng, choices, longest)
                call, forms = _drawn(call, again, known, i % calls_a_form, device)
                known |= forms
                counts["forms"] = len(known)
            begin(call)
            why = failure(call, device=device, attention=attention)
            counts["refused" if why == UNSUPPORTED else "judged"] += 1
            if why in ("", UNSUPPORTED):
                continue
            apart = why.startswith(FATAL) and attention is None
            here = functools.partial(failure, device=device, attention=attention)
            told = _told(call, why, functools.partial(failure_apart, device=device) if apart else here, apart=apart)
            raise IncorrectResultError(f"seed {seed}, call {counts['judged'] + counts['refused']}: {told}")
    return counts


def _drawn(
    call: Call, again: Callable[[], Call], known: set[Any], after: int, device: str
) -> tuple[Call, frozenset[Any]]:
    """The call, or, where it is one of those `after` another, one that compiles nothing; and what it launches."""
    left = _DRAWS if after else 1
    call = call if after else replace(call, gradients=True)  # without them those after it would have none either
    while True:
        try:
            forms = launched(call, device=device)
        except Exception:  # `failure` meets it again and says what it is
            return call, frozenset()
        left -= 1
        usable = forms or left == _DRAWS - 1  # calls that launch nothing come as often as they are drawn, not more
        if left == 0 or (usable and forms <= known):
            return call, forms
        call = again()


def _told(call: Call, why: str, again: Callable[[Call], str], *, apart: bool) -> str:
    """What is said of a call that failed; `again` judges it and smaller ones, each in a process `apart` or here."""
    small = shrink(call, lambda c: again(c) not in ("", UNSUPPORTED), seconds=_APART if apart else _HERE)
    return f"{why}\n  drawn  {call}\n  small  {small}\n  there  {again(small) or 'nothing, when it was run again'}"


def failure_apart(call: Call, *, device: str = "cuda", seconds: float = 30.0) -> str:
    """`failure` in a process of its own, with launches that wait, so that a fault names the launch it came from."""
    found = _child(["--device", device, "--call", json.dumps(asdict(call))], seconds, {"CUDA_LAUNCH_BLOCKING": "1"})
    return found["why"] if "why" in found else f"{FATAL}{found['died']}"


def search_apart(
    *, seconds: float, seed: int, device: str = "cuda", grace: float = 45.0, calls_a_form: int = 30
) -> dict[str, int]:
    """`search` in a process of its own, outputs poisoned: whatever a kernel does there, this process can go on.

    Args:
        grace: seconds for starting and for the last call. Shrinking has its own time.

    Raises:
        IncorrectResultError: as `search`; also where the process died or did not end, with the call it was at.
    """
    options = ["--device", device, "--seed", str(seed), "--seconds", str(seconds), "--calls-a-form", str(calls_a_form)]
    found = _child(options, seconds + grace + 2 * _APART, {})
    if "counts" in found:
        return found["counts"]
    if "why" in found:
        raise IncorrectResultError(found["why"])
    call = found["call"]
    if call is None:
        raise IncorrectResultError(f"seed {seed}: {found['died']} before the first call")
    again = functools.partial(failure_apart, device=device)
    raise IncorrectResultError(f"seed {seed}: {_told(call, found['died'], again, apart=True)}")


def _child(options: list[str], seconds: float, more: dict[str, str]) -> dict[str, Any]:
    """What `python -m gpu_accel.testing.differential` said: its last line, or how it died and at which "call"."""
    command = [sys.executable, "-m", "gpu_accel.testing.differential", *options]
    root = str(Path(__file__).resolve().parents[2])  # also from a checkout that is not installed
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=out, stderr=errors, env={**os.environ, "PYTHONPATH": path, **more})
        try:
            child.wait(seconds)
            died = f"the process ended with {child.returncode}"
        except subprocess.TimeoutExpired:
            died = f"the process did not end in {seconds:g} s"
        finally:
            child.kill()
            child.wait()
        out.seek(0)
        said = [json.loads(line) for line in out.read().splitlines() if line.endswith("}")]
        errors.seek(0)
        last = errors.read().strip().splitlines()[-1:]
    if said and "call" not in said[-1]:
        return said[-1]
    return {"died": ": ".join([died, *last]), "call": _call(said[-1]["call"]) if said else None}


def _call(fields: dict[str, Any]) -> Call:
    given: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    return Call(**given)


def _main() -> None:
    """One call, or a search, for a parent that reads JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--calls-a-round", type=int, default=60)
    parser.add_argument("--calls-a-form", type=int, default=30)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN: what nobody writes is seen

    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    if given.call:
        say(why=failure(_call(json.loads(given.call)), device=given.device))
        return
    try:
        counts = search(
            seconds=given.seconds, seed=given.seed, device=given.device, calls_a_round=given.calls_a_round,
            calls_a_form=given.calls_a_form, begin=lambda call: say(call=asdict(call)),
        )
    except IncorrectResultError as error:
        say(why=str(error))
    else:
        say(counts=counts)


if __name__ == "__main__":
    _main()
