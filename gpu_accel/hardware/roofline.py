"""The roofline: no kernel is faster than its arithmetic at peak rate, nor than its bytes at full bandwidth.

    roofline("matmul", (8192, 8192, 8192), "bf16", "h100")   # an Estimate: least time, what limits, by which source
    roof = Roofline(profile("h100"))
    roof.time(flops, bytes_moved, "bf16")   # milliseconds, at least
    roof.ridge("bf16")                      # FLOP per byte where the two limits meet: 295

The peaks are those that vendors print, at their clock; a GPU that clocks higher may pass them by some per cent. Where
the ceilings of the GPU are on record (`gpu-accel hardware measure`), `roofline` takes these instead, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError, shown
from gpu_accel.hardware.catalog import Profile, dtype_word, profile
from gpu_accel.hardware.ceilings import Ceilings, measured_ceilings
from gpu_accel.hardware.work import attention_bytes, attention_flops, copy_bytes, gemm_bytes, gemm_flops

Bound = Literal["compute", "memory"]
OPS = ("matmul", "attention", "copy")
MEASURED, DATASHEET = "measured", "datasheet"


@dataclass(frozen=True)
class Roofline:
    """The two limits of one GPU. `scale` lowers the compute peak, for a clock below the one of the vendor's figure.

    With `ceilings`, what was measured takes the place of what the vendor prints, wherever it was measured.
    """

    profile: Profile
    scale: float = 1.0
    ceilings: Ceilings | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise InvalidInputError(f"scale must be a number above 0, got {shown(self.scale)}")

    def peak(self, dtype: str) -> float:
        """TFLOP/s of dense products."""
        measured = self.ceilings.tflops.get(dtype_word(dtype)) if self.ceilings else None
        return measured if measured is not None else self.profile.peak(dtype) * self.scale

    @property
    def bandwidth_gbs(self) -> float:
        """GB/s of device memory."""
        measured = self.ceilings.bandwidth_gbs if self.ceilings else None
        return measured if measured is not None else self.profile.bandwidth_gbs

    def basis(self, dtype: str) -> tuple[str, str]:
        """On what (peak, bandwidth) rest: "measured" or "datasheet"."""
        known = self.ceilings
        peak = MEASURED if known and dtype_word(dtype) in known.tflops else DATASHEET
        return peak, MEASURED if known and known.bandwidth_gbs is not None else DATASHEET

    def compute_time(self, flops: float, dtype: str) -> float:
        """Milliseconds of `flops` at the dense peak."""
        return _not_negative("flops", flops) / (self.peak(dtype) * 1e12) * 1e3

    def memory_time(self, bytes_moved: float) -> float:
        """Milliseconds of `bytes_moved` at the full memory bandwidth."""
        return _not_negative("bytes_moved", bytes_moved) / (self.bandwidth_gbs * 1e9) * 1e3

    def time(self, flops: float, bytes_moved: float, dtype: str) -> float:
        """The least milliseconds that the work can take: the larger of both limits."""
        return max(self.compute_time(flops, dtype), self.memory_time(bytes_moved))

    def bound(self, flops: float, bytes_moved: float, dtype: str) -> Bound:
        """Which limit holds; "compute" where they are equal."""
        return "compute" if self.compute_time(flops, dtype) >= self.memory_time(bytes_moved) else "memory"

    def ridge(self, dtype: str) -> float:
        """FLOP per byte above which the arithmetic is the limit."""
        return self.peak(dtype) * 1e3 / self.bandwidth_gbs

    def attainable(self, intensity: float, dtype: str) -> float:
        """The most TFLOP/s at an arithmetic intensity in FLOP per byte."""
        bandwidth_limit = _not_negative("intensity", intensity) * self.bandwidth_gbs / 1e3
        return min(self.peak(dtype), bandwidth_limit)

    def fraction(self, milliseconds: float, flops: float, bytes_moved: float, dtype: str) -> float:
        """The least possible time as a fraction of a measured one: 1 is the roof.

        Above 1 cannot be true of a datasheet's roof at its clock, and is well possible for a measured one.
        """
        if not milliseconds > 0:
            raise InvalidInputError(f"a measured time must be positive, got {milliseconds} ms")
        return self.time(flops, bytes_moved, dtype) / milliseconds


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The least time of one operation on one GPU, what limits it, and on what that rests."""

    op: str
    shape: dict[str, int | bool]
    dtype: str
    gpu: str
    flops: float
    bytes: float
    compute_ms: float
    memory_ms: float
    peak_tflops: float
    bandwidth_gbs: float
    peak_from: str  # "measured" or "datasheet"
    bandwidth_from: str

    @property
    def ms(self) -> float:
        """Milliseconds, at least."""
        return max(self.compute_ms, self.memory_ms)

    @property
    def bound(self) -> Bound:
        return "compute" if self.compute_ms >= self.memory_ms else "memory"

    @property
    def tflops(self) -> float:
        """TFLOP/s, at most; 0 for work without arithmetic."""
        return self.flops / self.ms / 1e9 if self.ms else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ms": self.ms, "bound": self.bound, "tflops": self.tflops}

    def __str__(self) -> str:
        shape = ", ".join(f"{key} {value}" for key, value in self.shape.items())
        return (
            f"{self.op} ({shape}) in {self.dtype} on {self.gpu}: at least {self.ms:.4g} ms, limited by {self.bound} "
            f"({self.peak_tflops:.4g} TFLOP/s {self.peak_from}, {self.bandwidth_gbs:.4g} GB/s {self.bandwidth_from})"
        )


def roofline(
    op: str,
    shape: Sequence[int] | Mapping[str, int | bool],
    dtype: str = "bf16",
    gpu: str | Profile | None = None,
    *,
    ceilings: Ceilings | None | Literal["datasheet"] = None,
) -> Estimate:
    """The least time of an operation.

    Args:
        op: "matmul" of shape (m, n, k); "attention" (forward) of (batch, seqlen, heads, head_dim) or a mapping of the
            arguments of `attention_flops`, such as causal and heads_kv; "copy" of (elements,).
        dtype: of the inputs, such as "bf16" or "e4m3".
        gpu: a profile or its name; None is the GPU of this machine.
        ceilings: measured ones; None takes those on record for that GPU, "datasheet" takes none.
    Raises:
        InvalidInputError: an unknown operation, shape or dtype.
        UnsupportedError: the GPU has no profile, or no peak for the dtype.
        HardwareError: `gpu` is None and this machine has no GPU.
    """
    chosen = _profile(gpu)
    if isinstance(ceilings, str):
        if ceilings != DATASHEET:
            raise InvalidInputError(f"ceilings is {ceilings!r}; give measured ones, None, or {DATASHEET!r}")
        measured = None
    else:
        measured = ceilings if ceilings is not None else measured_ceilings(chosen)
    roof = Roofline(chosen, ceilings=measured)
    named, flops, moved = _work(op, shape, dtype)
    peak_from, bandwidth_from = roof.basis(dtype)
    return Estimate(
        op=op, shape=named, dtype=dtype, gpu=chosen.name, flops=flops, bytes=moved,
        compute_ms=roof.compute_time(flops, dtype) if flops else 0.0, memory_ms=roof.memory_time(moved),
        peak_tflops=roof.peak(dtype), bandwidth_gbs=roof.bandwidth_gbs,
        peak_from=peak_from, bandwidth_from=bandwidth_from,
    )  # fmt: skip


def _work(op: str, shape: Sequence[int] | Mapping[str, Any], dtype: str) -> tuple[dict[str, Any], float, float]:
    """(the shape with names, operations, compulsory bytes)."""
    axes = {"matmul": ("m", "n", "k"), "attention": ("batch", "seqlen_q", "heads", "head_dim"), "copy": ("elements",)}
    if op not in axes:
        raise InvalidInputError(f"op is {op!r}; choose one of {', '.join(OPS)}")
    if isinstance(shape, Mapping):
        named = {("seqlen_q" if key == "seqlen" else key): value for key, value in shape.items()}
    else:
        if len(shape) != len(axes[op]):
            raise InvalidInputError(f"the shape of {op} is ({', '.join(axes[op])}), got {tuple(shape)}")
        named = dict(zip(axes[op], shape, strict=True))
    optional = ("seqlen_k", "heads_kv", "head_dim_v", "causal") if op == "attention" else ()
    if missing := [axis for axis in axes[op] if axis not in named]:
        raise InvalidInputError(f"the shape of {op} lacks {', '.join(missing)}")
    for key, value in named.items():
        if key not in (*axes[op], *optional):
            raise InvalidInputError(f"the shape of {op} has no {key!r}; it has {', '.join((*axes[op], *optional))}")
        if not isinstance(value, int) or value < 0 or isinstance(value, bool) != (key == "causal"):
            raise InvalidInputError(f"{key} is {value!r}; it must be {'a bool' if key == 'causal' else 'a size >= 0'}")
    if op == "copy":
        return named, 0.0, float(copy_bytes(named["elements"], dtype))
    word = "fp32" if dtype_word(dtype) == "tf32" else dtype
    if op == "matmul":
        out = {"fp8": "bf16", "fp6": "bf16", "fp4": "bf16"}.get(dtype_word(dtype))
        return named, float(gemm_flops(**named)), float(gemm_bytes(**named, dtype=word, out_dtype=out))
    flops = attention_flops(**{key: value for key, value in named.items() if key != "heads_kv"})
    moved = attention_bytes(**{key: value for key, value in named.items() if key != "causal"}, dtype=word)
    return named, float(flops), float(moved)


def _profile(gpu: str | Profile | None) -> Profile:
    from gpu_accel.hardware.detection import detect

    if isinstance(gpu, Profile):
        return gpu
    if gpu is not None:
        return profile(gpu)
    found = detect()
    if found is None:
        raise HardwareError("this machine has no GPU that torch sees: say which one is meant, gpu='h100-sxm'")
    if found.profile is None:
        raise UnsupportedError(f"there is no profile of {found.name}; say which GPU is meant, gpu='h100-sxm'")
    return found.profile


def _not_negative(name: str, value: float) -> float:
    if not value >= 0:  # also refuses NaN
        raise InvalidInputError(f"{name} must not be negative, got {value}")
    return value
