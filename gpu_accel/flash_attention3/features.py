"""What an attention call can ask for beyond masks and soft caps: checked here, once, and carried in one object.

Backends look at the names only (`Problem.features`); kernels get the `Features` itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.block_mask import block_mask_lists
from gpu_accel.flash_attention3.modifiers import key_of
from gpu_accel.flash_attention3.problem import check_flag, check_sink_values, check_strided, values_readable

_MOST_AUX_TENSORS = 8


@dataclass(frozen=True, kw_only=True)
class Features:
    """Validated. Modifiers are keys (`modifiers.py`); `block_lists` are those of `block_mask.py`."""

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    score_mod: str = ""
    score_mod_grad: str = ""
    mask_mod: str = ""
    aux_tensors: tuple[Tensor, ...] = ()
    block_lists: tuple[Tensor, ...] = ()
    block_size: tuple[int, int] = (0, 0)
    return_max_logits: bool = False
    batch_invariant: bool = False

    def names(self) -> frozenset[str]:
        """The arguments in use, by their public names."""
        used = {
            "sinks": self.sinks is not None,
            "alibi_slopes": self.alibi_slopes is not None,
            "score_mod": bool(self.score_mod),
            "score_mod_grad": bool(self.score_mod_grad),
            "mask_mod": bool(self.mask_mod),
            "block_mask": len(self.block_lists) > 0,  # not bool(): torch 2.11 can not trace that of a tuple
            "return_max_logits": self.return_max_logits,
            "batch_invariant": self.batch_invariant,
        }
        return frozenset(name for name, on in used.items() if on)


NONE = Features()


def _sizes(x: Tensor) -> str:
    return "(" + ", ".join(str(n) for n in x.shape) + ")"


def _check_tensor(name: str, x: object, kind: str, q: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise InvalidInputError(f"{name} must be {kind}, got {type(x).__name__}")
    check_strided(name, x)
    if x.device != q.device:
        raise InvalidInputError(f"{name} must be on the device of q ({q.device}), got {x.device}")
    return x


def _check_sinks(sinks: object, q: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    heads = q.shape[-2]
    kind = f"a floating-point tensor of shape (heads,) = ({heads},), one logit a head"
    sinks = _check_tensor("sinks", sinks, kind, q)
    if not sinks.is_floating_point() or tuple(sinks.shape) != (heads,):
        raise InvalidInputError(f"sinks must be {kind}, got {sinks.dtype} {_sizes(sinks)}")
    check_sink_values(sinks)
    return sinks.to(torch.float64 if q.dtype == torch.float64 else torch.float32).contiguous()


def _check_slopes(slopes: object, q: Tensor, batch: int) -> Tensor | None:
    if slopes is None:
        return None
    heads = q.shape[-2]
    kind = f"a float32 tensor of shape (heads,) = ({heads},) or (batch, heads) = ({batch}, {heads})"
    slopes = _check_tensor("alibi_slopes", slopes, kind, q)
    if slopes.dtype != torch.float32 or tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise InvalidInputError(f"alibi_slopes must be {kind}, got {slopes.dtype} {_sizes(slopes)}")
    if slopes.requires_grad:
        raise InvalidInputError(
            "alibi_slopes gets no gradient: pass alibi_slopes.detach()"
        )
    if values_readable(slopes) and not slopes.isfinite().all():
        raise InvalidInputError("alibi_slopes must be finite: got NaN or Inf, and the rows of that head would be NaN")
    return slopes.contiguous()


def _check_aux(aux_tensors: Sequence[Tensor], has_modifier: bool, q: Tensor) -> tuple[Tensor, ...]:
    if isinstance(aux_tensors, Tensor) or not isinstance(aux_tensors, (tuple, list)):
        raise InvalidInputError(f"aux_tensors must be a tuple of tensors, got {type(aux_tensors).__name__}")
    if aux_tensors and not has_modifier:
        raise InvalidInputError("aux_tensors are handed to score_mod and mask_mod, and neither was given")
    if len(aux_tensors) > _MOST_AUX_TENSORS:
        raise InvalidInputError(f"at most {_MOST_AUX_TENSORS} aux_tensors, got {len(aux_tensors)}")
    for i, x in enumerate(aux_tensors):
        _check_tensor(f"aux_tensors[{i}]", x, "a tensor", q)
        if x.is_complex():
            raise InvalidInputError(f"aux_tensors[{i}] is {x.dtype}, which no kernel reads: pass torch.view_as_real")
        if not x.is_contiguous():
            raise InvalidInputError(
                f"aux_tensors[{i}] must be contiguous, since the modifier computes addresses: pass .contiguous()"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"aux_tensors[{i}] requires a gradient, and captured tensors get none: pass .detach()"
            )
    return tuple(aux_tensors)


def _check_arity(name: str, function: Any, indices: str, aux_tensors: Sequence[Tensor]) -> None:
    """A modifier takes what it will be handed: found here, not in the middle of a compilation."""
    if function is None or torch.compiler.is_compiling():
        return
    inner = getattr(function, "function", function).fn
    count = len(indices.split(", ")) + len(aux_tensors)
    try:
        inspect.signature(inner).bind(*(None,) * count)
    except TypeError as error:
        raise InvalidInputError(
            f"{name} is called with ({indices}) and {len(aux_tensors)} aux_tensors, but {inner.__name__} takes "
            f"{inspect.signature(inner)}: {error}"
        ) from None


def check_features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    batch: int,
    varlen: bool,
    window_left: int,
    window_right: int,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    score_mod: Any,
    score_mod_grad: Any,
    mask_mod: Any,
    aux_tensors: Sequence[Tensor],
    block_mask: Any,
    return_max_logits: bool,
    batch_invariant: bool,
) -> Features | None:
    """What of these was asked for, or None if nothing was. q, k, v are checked already. Values
    are read of sinks and slopes only, and only on the CPU.

    Raises:
        InvalidInputError: wrong shape, dtype, device or kind. UnsupportedError: a combination that no kernel has.
    """
    asked = (sinks, alibi_slopes, score_mod, score_mod_grad, mask_mod, block_mask)
    plain = return_max_logits is False and batch_invariant is False and isinstance(aux_tensors, tuple)
    if plain and not aux_tensors and all(x is None for x in asked):
        return None
    if score_mod is None and score_mod_grad is not None:
        raise InvalidInputError("score_mod_grad is the derivative of score_mod, which was not given")
    wants_gradient = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in (q, k, v, sinks)
    )
    if score_mod is not None and score_mod_grad is None and wants_gradient:
        raise UnsupportedError(
            "score_mod needs its derivative for gradients of q, k, v: pass score_mod_grad, a device function "
            "(grad, score, b, h, q_idx, kv_idx, *aux_tensors) -> gradient of the score, or call under torch.no_grad()"
        )
    has_modifier = score_mod is not None or mask_mod is not None
    lists, block_size = (), (0, 0)
    if block_mask is not None:
        if varlen:
            raise UnsupportedError(
                "block_mask with packed sequences: use mask_mod alone (b is the sequence, indices count inside it), or "
                "flash_attn_func on one sequence of all tokens with a document mask"
            )
        if window_left >= 0 or window_right >= 0:
            raise UnsupportedError(
                "block_mask with causal or window_size: its whole blocks would have to be masked; make both part of "
                "the mask_mod that the block mask is built from"
            )
        lists, block_size = block_mask_lists(
            block_mask, batch=batch, heads=q.shape[-2], seqlen_q=q.shape[-3], seqlen_k=k.shape[-3], device=q.device,
            has_mask_mod=mask_mod is not None,
        )  # fmt: skip
        if wants_gradient and lists[4].numel() == 0 and lists[0].numel() > 0:
            raise UnsupportedError(
                "block_mask has no lists of query blocks, which gradients need: build it with compute_q_blocks=True"
            )
    features = Features(
        sinks=_check_sinks(sinks, q),
        alibi_slopes=_check_slopes(alibi_slopes, q, batch),
        score_mod=key_of("score_mod", score_mod),
        score_mod_grad=key_of("score_mod_grad", score_mod_grad),
        mask_mod=key_of("mask_mod", mask_mod),
        aux_tensors=_check_aux(aux_tensors, has_modifier, q),
        block_lists=lists,
        block_size=block_size,
        return_max_logits=check_flag("return_max_logits", return_max_logits),
        batch_invariant=check_flag("batch_invariant", batch_invariant),
    )
    where = "b, h, q_idx, kv_idx"
    _check_arity("score_mod", score_mod, f"score, {where}", features.aux_tensors)
    _check_arity("score_mod_grad", score_mod_grad, f"grad, score, {where}", features.aux_tensors)
    _check_arity("mask_mod", mask_mod, where, features.aux_tensors)
    return features if features.names() else None
