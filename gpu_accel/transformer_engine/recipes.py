"""Transformer Engine's recipes as data, with its argument names: which schemes inputs, weights and gradients get.

    recipe = MXFP8BlockScaling()
    q = recipe.quantize(x)                          # as an activation, both copies when columnwise=True
    g = recipe.quantize(dy, role="grad", columnwise=True)
    recipe.scheme("weight")                         # the scheme, which `quantize` takes too

A recipe is immutable and holds no tensors. Delayed scaling keeps its history in a `DelayedState` of its own, which is
three tensors: it can be saved, broadcast, and reduced over ranks. `fp8_format` HYBRID is e4m3 forward and e5m2 for
gradients, E4M3 is e4m3 for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.flash_attention3.problem import check_flag
from gpu_accel.transformer_engine import scales
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor

Role = Literal["input", "weight", "grad"]
ROLES: tuple[Role, ...] = ("input", "weight", "grad")
FP8_FORMATS = ("HYBRID", "E4M3", "E5M2")


def _element(fp8_format: str, role: str) -> str:
    return "e5m2" if fp8_format == "E5M2" or (fp8_format == "HYBRID" and role == "grad") else "e4m3"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all recipes share."""

    title: ClassVar[str] = ""

    def scheme(self, role: Role = "input") -> Scheme:
        """The scheme of "input", "weight" or "grad"."""
        raise NotImplementedError

    def scheme_columnwise(self, role: Role = "input") -> Scheme:
        """The scheme of the column-wise copy, which the products of the backward pass read: the same but for NVFP4."""
        return self.scheme(role)

    def _check(self, role: str) -> None:
        if role not in ROLES:
            raise InvalidInputError(f"role must be one of {', '.join(ROLES)}, got {role!r}")

    def quantize(
        self,
        x: Tensor,
        *,
        role: Role = "input",
        rowwise: bool = True,
        columnwise: bool = False,
        seed: int | None = None,
        backend: str = "auto",
    ) -> QuantizedTensor:
        """Quantise x as this recipe does for its role. `seed` where the recipe rounds that role stochastically."""
        return quantize(
            x, self.scheme(role), rowwise=rowwise, columnwise=columnwise, seed=seed, backend=backend
        )  # fmt: skip


def _check_format(fp8_format: str, allowed: tuple[str, ...] = FP8_FORMATS) -> None:
    if fp8_format not in allowed:
        raise InvalidInputError(f"fp8_format must be one of {', '.join(allowed)}, got {fp8_format!r}")


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """One scale per tensor from its own maximum. `use_power_2_scales` rounds scales up to powers of two.

    fp8_format: "HYBRID" (e4m3, gradients e5m2), "E4M3" or "E5M2". Recipes raise InvalidInputError for other values.
    """

    title: ClassVar[str] = "FP8, a scale per tensor from the tensor itself"
    fp8_format: str = "HYBRID"
    use_power_2_scales: bool = False

    def __post_init__(self) -> None:
        _check_format(self.fp8_format)
        check_flag("use_power_2_scales", self.use_power_2_scales)

    def scheme(self, role: Role = "input") -> Scheme:
        self._check(role)
        kind = "pow2" if self.use_power_2_scales else "fp32"
        return Scheme(element=_element(self.fp8_format, role), block=(0, 0), scale=kind)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale per tensor from the maxima of earlier steps, so that a tensor is read once.

    margin: room for a factor of 2**margin. amax_history_len, amax_compute_algo: of the history ("max", "most_recent").
    reduce_amax: whether maxima are to be reduced over ranks before they enter it (`DelayedState.update` takes the
    reduced one). Without a state `quantize` uses the tensor's own maximum, as the first step must.
    """

    title: ClassVar[str] = "FP8, a scale per tensor from earlier steps"
    margin: int = 0
    fp8_format: str = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        _check_format(self.fp8_format)
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise InvalidInputError(f"amax_compute_algo must be 'max' or 'most_recent', got {self.amax_compute_algo!r}")
        check_flag("reduce_amax", self.reduce_amax)
        scales.check_margin(self.margin)
        length = self.amax_history_len
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise InvalidInputError(f"amax_history_len must be a whole number from 1 up, got {shown(length)}")

    def scheme(self, role: Role = "input") -> Scheme:
        self._check(role)
        return Scheme(element=_element(self.fp8_format, role), block=(0, 0), scale="fp32")

    def state(self, role: Role = "input", device: torch.device | str = "cpu") -> DelayedState:
        """An empty history."""
        return DelayedState.empty(self, role, device)


@dataclass
class DelayedState:
    """The history of one tensor under delayed scaling: tensors only, so it goes into a state_dict as it is."""

    recipe: DelayedScaling
    role: Role
    history: Tensor  # (amax_history_len,) float32, newest first
    scale: Tensor  # () float32, what codes are multiplied with
    overflows: Tensor  # () int64: how often a tensor held NaN or Inf

    @classmethod
    def empty(cls, recipe: DelayedScaling, role: Role, device: torch.device | str) -> DelayedState:
        recipe.scheme(role)  # refuses an unknown role
        zero = torch.zeros((), device=device)
        history = torch.zeros(recipe.amax_history_len, device=device)
        return cls(recipe, role, history, zero + 1, zero.long())

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False, backend: str = "auto",
                 update: bool = True) -> QuantizedTensor:  # fmt: skip
        """Quantise with the scale so far, then enter the tensor's maximum. `update=False` leaves the state as it is, as
        recomputation and evaluation must (TransformerEngine#1190, PR 3284)."""
        what = self.recipe.scheme(self.role)
        q = quantize(x, what, rowwise=rowwise, columnwise=columnwise, scale=self.scale, backend=backend)
        if update:
            assert q.seen_amax is not None
            self.update(q.seen_amax)
        return q

    def update(self, amax: Tensor) -> None:
        """Enter a maximum: () float32, of this tensor or reduced over ranks (the same on all of them)."""
        self.history, self.scale, overflowed = scales.update_history(
            self.history, amax, self.scale, largest=self.recipe.scheme(self.role).largest, margin=self.recipe.margin,
            algorithm=self.recipe.amax_compute_algo,
        )  # fmt: skip
        self.overflows = self.overflows + overflowed

    def state_dict(self) -> dict[str, Tensor]:
        return {"history": self.history, "scale": self.scale, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name in ("history", "scale", "overflows"):
            if name not in state:
                raise InvalidInputError(f"a saved history has history, scale and overflows, this one lacks {name}")
            if state[name].shape != getattr(self, name).shape:
                raise InvalidInputError(f"{name} has shape {tuple(state[name].shape)}, expected another history length")
            setattr(self, name, state[name].to(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """e4m3 in blocks: 1 x 128 for inputs and gradients, 128 x 128 for weights, scales powers of two.

    use_f32_scales: any scales in float32 instead. x_, w_, grad_block_scaling_dim: 1 (1 x 128) or 2 (128 x 128).
    """

    title: ClassVar[str] = "FP8 in blocks of 128"
    fp8_format: str = "E4M3"
    use_f32_scales: bool = False
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    def __post_init__(self) -> None:
        _check_format(self.fp8_format)
        check_flag("use_f32_scales", self.use_f32_scales)
        for name in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"):
            if type(getattr(self, name)) is not int or getattr(self, name) not in (1, 2):
                got = shown(getattr(self, name))
                raise InvalidInputError(f"{name} must be 1 (1 x 128) or 2 (128 x 128), got {got}")

    def scheme(self, role: Role = "input") -> Scheme:
        self._check(role)
        dims = {"input": self.x_block_scaling_dim, "weight": self.w_block_scaling_dim}
        block = (128, 128) if dims.get(role, self.grad_block_scaling_dim) == 2 else (1, 128)
        kind = "fp32" if self.use_f32_scales else "pow2"
        return Scheme(element=_element(self.fp8_format, role), block=block, scale=kind)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """e4m3 in blocks of 32 with scales in e8m0 (OCP MX). `rule`: how the scale follows from the maximum."""

    title: ClassVar[str] = "MXFP8"
    fp8_format: str = "E4M3"
    rule: str = "rceil"

    def __post_init__(self) -> None:
        _check_format(self.fp8_format)
        self.scheme()

    def scheme(self, role: Role = "input") -> Scheme:
        self._check(role)
        element = _element(self.fp8_format, role)
        return Scheme(element=element, block=(1, 32), scale="e8m0", rule=self.rule)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """e2m1 in blocks of 16 with scales in e4m3 and one float32 (arXiv:2509.25149).

    disable_rht: no random Hadamard transform of what the product for the weights' gradient reads.
    disable_stochastic_rounding: gradients to nearest. disable_2d_quantization: weights in 1 x 16 and not 16 x 16.
    """

    title: ClassVar[str] = "NVFP4"
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        for name in ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"):
            check_flag(name, getattr(self, name))

    def scheme(self, role: Role = "input") -> Scheme:
        self._check(role)
        square = role == "weight" and not self.disable_2d_quantization
        random = role == "grad" and not self.disable_stochastic_rounding
        return Scheme(
            element="e2m1", block=(16, 16) if square else (1, 16), scale="nvfp4",
            rounding="stochastic" if random else "nearest",
        )  # fmt: skip

    def scheme_columnwise(self, role: Role = "input") -> Scheme:
        """The scheme of the column-wise copy: inputs and gradients are multiplied by the Hadamard matrix first."""
        plain = self.scheme(role)
        return plain if role == "weight" or self.disable_rht else plain.with_(hadamard=16)


RECIPES: dict[str, Recipe] = {
    "fp8_current": Float8CurrentScaling(),
    "fp8_delayed": DelayedScaling(),
    "fp8_block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
