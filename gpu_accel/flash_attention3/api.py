"""The public functions: check everything once, say what will run, call the custom op.

Layout is (batch, seqlen, heads, head_dim) as in flash-attn, or (total, heads, head_dim) with `cu_seqlens_*`. Causal
masks and windows are aligned to the bottom right: with seqlen_q > seqlen_k and causal, the first seqlen_q - seqlen_k
rows see nothing, so their output is 0 and their log-sum-exp -inf.

A masked key has probability 0, and 0 times NaN is NaN: NaN or Inf in a row of v reaches queries that do not see the
row, unless it lies in padding (behind the last sequence or `seqused_k`). Gradients are those of autograd, once: no
double backward, and of the transforms of torch.func only vmap (one call after the other) is supported.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3 import config as configs
from gpu_accel.flash_attention3 import function
from gpu_accel.flash_attention3.backends import BACKENDS, check_name, choose, module, refusal
from gpu_accel.flash_attention3.launch import tma_refusal
from gpu_accel.flash_attention3.problem import (
    Problem,
    check_flag,
    check_packed,
    check_scalars,
    check_tensors,
    effective_window,
    normalise_window,
)

Window = tuple[int | None, int | None]


def autocasted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under torch.autocast, matrix products run in its dtype: so does attention (float64 is left alone)."""
    if not isinstance(tensors[0], Tensor):
        return tensors
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    halves = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in halves else x for x in tensors)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, differentiable, in memory linear in the sequence length.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, float32 or (reference only) float64.
        k: (batch, seqlen_k, heads_kv, head_dim); heads is a multiple of heads_kv (grouped and multi-query attention).
        v: (batch, seqlen_k, heads_kv, head_dim_v). Head dimensions are multiples of 8, up to 256 in the kernels.
            Any strides; where the last one is not 1 the tensor is copied once.
        softmax_scale: default head_dim ** -0.5.
        causal: query i sees keys up to i + seqlen_k - seqlen_q.
        window_size: (left, right) keys seen beside that diagonal, both ends included; -1 or None is no bound.
            A model's sliding window of w keys that includes the query itself is (w - 1, 0).
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        deterministic: only take a backward that gives the same bits every time (the portable one always does).
        return_lse, return_attn_probs: also return the log-sum-exp; the second is flash-attn's name for it.
        backend: "auto", "hopper", "portable" or "reference". A named backend without a backward for this problem
            leaves the gradients to "auto"; :func:`explain` tells which.

    Returns:
        o (batch, seqlen_q, heads, head_dim_v) of the dtype of q; with `return_lse` also lse (batch, heads, seqlen_q),
        float32, natural logarithm, differentiable. Rows that see no key: o 0, lse -inf, gradients 0.

    Raises:
        InvalidInputError: wrong shape, dtype, device or value. UnsupportedError: valid, but no kernel for it.
        HardwareError: the backend asked for needs another machine.
    """
    q, k, v = autocasted(q, k, v)
    check_tensors(q, k, v, varlen=False)
    scale, softcap = check_scalars(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap)
    deterministic = check_flag("deterministic", deterministic)
    check_name(backend)
    left, right = normalise_window(window_size, causal)
    if function.nobody_watches(q, k, v):
        o, lse = function.run_forward(
            q, k, v, backend, softmax_scale=scale, window_left=left, window_right=right, softcap=softcap
        )
    else:
        o, lse = function.flash_attention_forward(
            q, k, v, scale, left, right, softcap, deterministic, backend
        )
    return (o, lse) if return_lse or return_attn_probs else o


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    backend: str = "auto",
    validate: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn_func` for sequences packed one behind the other.

    Args:
        q: (total_q, heads, head_dim); k, v: (total_k, heads_kv, ...).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on the device of q: sequence b is rows cu[b] to cu[b + 1].
            Lengths may be 0. Rows behind the last sequence get o 0, lse -inf, gradients 0.
        max_seqlen_q, max_seqlen_k: not needed, since the kernels find their sequence themselves; checked when given and
            values are validated.
        seqused_q, seqused_k: (batch,) int32: only so many rows of each sequence count.
        validate: read and check the values of cu_seqlens and seqused, which waits for the device. Default: only for CPU
            tensors, so that CUDA graphs and torch.compile work.

    Returns:
        o (total_q, heads, head_dim_v); with `return_lse` also lse (heads, total_q).
    """
    q, k, v = autocasted(q, k, v)
    check_tensors(q, k, v, varlen=True)
    compiling = torch.compiler.is_compiling()
    values = not compiling and (q.device.type == "cpu" if validate is None else validate)
    check_packed(
        q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, values=values
    )
    scale, softcap = check_scalars(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap)
    deterministic = check_flag("deterministic", deterministic)
    check_name(backend)
    left, right = normalise_window(window_size, causal)
    o, lse = function.flash_attention_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        scale, left, right, softcap, deterministic, backend,
    )  # fmt: skip
    return (o, lse) if return_lse or return_attn_probs else o


@dataclass(frozen=True)
class Explanation:
    """What a call would run and why. `print()` it."""

    problem: Problem
    backend: str
    kernel: str
    config: str
    path: str
    backward: str
    backward_config: str
    refused: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"attention  {self.problem}",
            f"forward    {self.backend}: {self.kernel}",
            *([f"  tiles    {self.config}"] if self.config else []),
            *([f"  path     {self.path}"] if self.path else []),
            f"backward   {self.backward}",
            *([f"  tiles    {self.backward_config}"] if self.backward_config else []),
            *(f"not taken  {name}: {why}" for name, why in self.refused.items()),
            *(f"note       {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Explanation:
    """Which backend, kernel, tiles and memory path a call with these arguments takes, and why the others were refused.

    Runs nothing; raises what the call itself would raise.
    """
    q, k, v = autocasted(q, k, v)
    varlen = cu_seqlens_q is not None
    if varlen != (cu_seqlens_k is not None):
        given, missing = ("cu_seqlens_q", "cu_seqlens_k") if varlen else ("cu_seqlens_k", "cu_seqlens_q")
        raise InvalidInputError(f"{given} was given without {missing}: packed sequences need both")
    check_tensors(q, k, v, varlen=varlen)
    if varlen:
        check_packed(q, k, cu_seqlens_q, cu_seqlens_k, None, None, None, None, values=False)
    _, softcap = check_scalars(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap)
    deterministic = check_flag("deterministic", deterministic)
    check_name(backend)
    left, right = normalise_window(window_size, causal)
    problem = function.problem_of(
        q, k, v, window_left=left, window_right=right, softcap=softcap, cu_seqlens_q=cu_seqlens_q,
        deterministic=deterministic, requires_grad=any(x.requires_grad for x in (q, k, v)),
    )  # fmt: skip
    if q.is_meta:  # the call gives empty outputs whatever the backend: it knows shapes only
        nothing = "shapes only: meta tensors hold no values"
        return Explanation(problem, "none", nothing, "", "", f"none: {nothing}", "")
    name, refused = choose(problem, backend, "forward")
    for other in BACKENDS:
        if other != name and other not in refused:
            why = refusal(other, "forward", problem)
            refused[other] = why or ("not asked for" if backend != "auto" else f"{name} comes first")
    notes = [
        f"the last stride of {n} is {x.stride(-1)}, not 1: it is copied once"
        for n, x in (("q", q), ("k", k), ("v", v))
        if function.unit_last_stride(x) is not x
    ]
    found = module(BACKENDS[name], "forward")
    config, path = "", ""
    if name == "portable":
        config, path = _portable_choice(problem, q, k, v)
    elif found is not None and hasattr(found, "describe"):
        config = str(found.describe(problem))
    back, _ = choose(problem, backend, "backward")
    back_module = module(BACKENDS[back], "backward")
    back_config = ""
    if back == "portable":
        back_config = _portable_backward_choice(problem, q.device)
    elif back_module is not None and hasattr(back_module, "describe"):
        back_config = str(back_module.describe(problem))
    if problem.causal and not varlen and problem.seqlen_q > problem.seqlen_k:
        notes.append(f"the first {problem.seqlen_q - problem.seqlen_k} rows see no key: o 0, lse -inf")
    return Explanation(
        problem=problem,
        backend=name,
        kernel=getattr(found, "KERNEL", name),
        config=config,
        path=path,
        backward=f"{back}: {getattr(back_module, 'KERNEL', back)}",
        backward_config=back_config,
        refused=refused,
        notes=tuple(notes),
    )


def _lookup(problem: Problem, pass_: str, device: torch.device) -> configs.Config:
    right = problem.window_right
    if not problem.varlen:
        _, right = effective_window(problem.window_left, right, problem.seqlen_q, problem.seqlen_k)
    return configs.lookup(
        pass_, problem.dtype, problem.head_dim, problem.head_dim_v, causal=right == 0, seqlen_q=problem.seqlen_q,
        varlen=problem.varlen, device=device,
    )  # fmt: skip


def _portable_choice(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[str, str]:
    config = _lookup(problem, "forward", q.device)
    q, k, v = (function.unit_last_stride(x) for x in (q, k, v))
    why = tma_refusal(*((x.unsqueeze(0) if problem.varlen else x) for x in (q, k, v)))
    path = "tma" if why is None else f"pointer ({why})"
    return f"{config} ({config.source}; {config.measured})", path


def _portable_backward_choice(problem: Problem, device: torch.device) -> str:
    parts = []
    for pass_ in ("backward_dkdv", "backward_dq"):
        config = _lookup(problem, pass_, device)
        parts.append(f"{pass_.removeprefix('backward_')} {config} ({config.source}; {config.measured})")
    return ", ".join(parts)
