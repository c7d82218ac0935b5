"""`explain`: which kernels a call would run, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import config as configs
from gpu_accel.flash_attention3 import function
from gpu_accel.flash_attention3.api import Window, autocasted
from gpu_accel.flash_attention3.backends import BACKENDS, check_name, choose, module, refusal
from gpu_accel.flash_attention3.features import NONE, Features, check_features
from gpu_accel.flash_attention3.launch import off_16_bytes, tma_refusal
from gpu_accel.flash_attention3.problem import (
    Problem,
    check_flag,
    check_packed,
    check_scalars,
    check_tensors,
    effective_window,
    normalise_window,
    values_readable,
)


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
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: Any = None,
    score_mod_grad: Any = None,
    mask_mod: Any = None,
    aux_tensors: Sequence[Tensor] = (),
    block_mask: Any = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    return_max_logits: bool = False,
    backend: str = "auto",
    validate: bool | None = None,
) -> Explanation:
    """Which backend, kernel, tiles and memory path a call with these arguments takes, and why the others were refused.

    Takes what `flash_attn_func` takes, and with `cu_seqlens_q` and `cu_seqlens_k` what `flash_attn_varlen_func` takes.
    Runs nothing; raises what the call itself would raise.
    """
    q, k, v = autocasted(q, k, v)
    varlen = cu_seqlens_q is not None
    if varlen != (cu_seqlens_k is not None):
        given, missing = ("cu_seqlens_q", "cu_seqlens_k") if varlen else ("cu_seqlens_k", "cu_seqlens_q")
        raise InvalidInputError(f"{given} was given without {missing}: packed sequences need both")
    check_tensors(q, k, v, varlen=varlen)
    packed_only = {
        "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "seqused_q": seqused_q, "seqused_k": seqused_k,
        "validate": validate,
    }  # fmt: skip
    if varlen:
        values = values_readable(q) if validate is None else check_flag("validate", validate)
        check_packed(
            q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, values=values
        )
    elif given := [name for name, x in packed_only.items() if x is not None]:
        raise InvalidInputError(f"{given[0]} is for packed sequences: give cu_seqlens_q and cu_seqlens_k too")
    check_flag("return_lse", return_lse)
    check_flag("return_attn_probs", return_attn_probs)
    _, softcap = check_scalars(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap)
    deterministic = check_flag("deterministic", deterministic)
    check_name(backend)
    left, right = normalise_window(window_size, causal)
    features = check_features(
        q, k, v, batch=q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1, varlen=varlen,
        window_left=left, window_right=right, sinks=sinks, alibi_slopes=alibi_slopes, score_mod=score_mod,
        score_mod_grad=score_mod_grad, mask_mod=mask_mod, aux_tensors=aux_tensors, block_mask=block_mask,
        return_max_logits=return_max_logits, batch_invariant=batch_invariant,
    )  # fmt: skip
    problem = function.problem_of(
        q, k, v, window_left=left, window_right=right, softcap=softcap, cu_seqlens_q=cu_seqlens_q,
        deterministic=deterministic, requires_grad=any(x.requires_grad for x in (q, k, v)),
        features=features,
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
    notes += [
        f"{n} starts or steps off 16 bytes: it is copied once"
        for n, x in (("q", q), ("k", k), ("v", v))
        if x.is_cuda and function.unit_last_stride(x) is x and off_16_bytes(x) and name in ("portable", "hopper")
    ]
    if problem.features >= {"mask_mod"} and "block_mask" not in problem.features:
        notes.append("mask_mod alone hides keys after their scores were computed: a block_mask skips whole blocks")
    found = module(BACKENDS[name], "forward")
    config, path = "", ""
    if name == "portable":
        config, path = _portable_choice(problem, features or NONE, q, k, v)
    elif found is not None and hasattr(found, "describe"):
        config = str(found.describe(problem))
    try:
        back, _ = choose(problem, backend, "backward")
    except UnsupportedError as error:
        if problem.requires_grad:
            raise
        back, back_says = "none", f"none: {error}"
        back_module = None
    else:
        back_module = module(BACKENDS[back], "backward")
        back_says = f"{back}: {getattr(back_module, 'KERNEL', back)}"
    back_config = ""
    if back == "portable":
        back_config = _portable_backward_choice(problem, features or NONE, q.device)
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
        backward=back_says,
        backward_config=back_config,
        refused=refused,
        notes=tuple(notes),
    )


def _lookup(problem: Problem, features: Features, pass_: str, device: torch.device) -> configs.Config:
    right = problem.window_right
    pinned = features.batch_invariant and pass_ == "forward"
    if not problem.varlen and not pinned:
        _, right = effective_window(problem.window_left, right, problem.seqlen_q, problem.seqlen_k)
    config = configs.lookup(
        pass_, problem.dtype, problem.head_dim, problem.head_dim_v, causal=right == 0, seqlen_q=problem.seqlen_q,
        varlen=problem.varlen or pinned, device=device,
    )  # fmt: skip
    return configs.within_blocks(config, *features.block_size)


def _portable_choice(problem: Problem, features: Features, q: Tensor, k: Tensor, v: Tensor) -> tuple[str, str]:
    config = _lookup(problem, features, "forward", q.device)
    q, k, v = (function.unit_last_stride(x) for x in (q, k, v))
    views = [x.unsqueeze(0) if problem.varlen else x for x in (q, k, v)]
    # what lies off 16 bytes is copied before the launch, and a copy is aligned
    why = tma_refusal(*(x.new_empty(1, 1, 1, 16) if off_16_bytes(x) else x for x in views))
    path = "tma" if why is None else f"pointer ({why})"
    return f"{config} ({config.source}; {config.measured})", path


def _portable_backward_choice(problem: Problem, features: Features, device: torch.device) -> str:
    parts = []
    for pass_ in ("backward_dkdv", "backward_dq"):
        config = _lookup(problem, features, pass_, device)
        parts.append(f"{pass_.removeprefix('backward_')} {config} ({config.source}; {config.measured})")
    return ", ".join(parts)
