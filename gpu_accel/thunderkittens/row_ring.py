"""Host side of `row_ring_kernels`: which rows they take, in which tiles, and their launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, gluon_available, known_map, multiprocessors
from gpu_accel.flash_attention3.launch import capability, next_power_of_2

OPS = {"softmax": 0, "rms": 1, "layer": 2}
_LINE, _RING = 64, 8
_quick: dict[str, QuickLaunch] = {}


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Tiles of `rows` rows, or of one of `parts` parts of a row, `stages` on their way; `each` programs an SM.

    `pieces`: of a tile, in which gradients are worked out; 1 with several rows. `late`: turns between the sums of a
    part and its way out, 1 to 3; fewer than stages less one.
    """

    rows: int
    parts: int
    warps: int
    stages: int
    each: int = 1
    pieces: int = 1
    late: int = 1

    def __post_init__(self) -> None:
        if self.parts > 1 and not 0 < self.late < min(self.stages - 1, _RING // 2):
            raise ValueError(f"{self.late} turns late with {self.stages} stages: a tile would wait for itself")


_TWO = Ring(rows=1, parts=16, warps=8, stages=5, each=2, late=2)  # programs an SM
_THREE = Ring(rows=1, parts=16, warps=4, stages=4, each=3, late=2)
# What was faster than plain Triton (H200), by pass, op ("add_rms" with a residual) and width; nothing else is taken.
CHOSEN: dict[tuple[str, str, int], Ring] = {
    ("forward", "softmax", 65536): replace(_THREE, parts=8),
    ("forward", "softmax", 50304): replace(_THREE, parts=7, stages=3, each=4, late=1),
    ("forward", "layer", 65536): replace(_THREE, stages=6, late=3),
    ("forward", "add_rms", 65536): replace(_THREE, stages=5, each=2, late=3),
    ("backward", "softmax", 65536): _THREE,
    ("backward", "softmax", 50304): replace(_TWO, parts=7, stages=3, late=1),
    ("backward", "rms", 65536): replace(_TWO, stages=6, late=3),
    ("backward", "layer", 65536): replace(_TWO, stages=6, late=3),
    ("backward", "add_rms", 65536): replace(_TWO, stages=4),
    ("backward", "rms", 16384): Ring(rows=1, parts=1, warps=16, stages=3, pieces=4),
    ("backward", "layer", 16384): replace(_TWO, parts=4),
    ("backward", "rms", 8192): Ring(rows=1, parts=1, warps=16, stages=5),
    ("backward", "add_rms", 4096): Ring(rows=1, parts=1, warps=8, stages=4, each=2),
    ("backward", "rms", 1024): Ring(rows=4, parts=1, warps=8, stages=4, each=2),
    ("backward", "layer", 1024): Ring(rows=4, parts=1, warps=8, stages=4, each=2),
}


def takes(x: Tensor, op: str) -> bool:
    """Whether one of both passes of x (rows, width) is here."""
    return _machine(x) and any((pass_, op, x.shape[1]) in CHOSEN for pass_ in ("forward", "backward"))


def choice(
    way: str, pass_: str, op: str, whole: list[Tensor | None], vectors: list[Tensor | None],
    dtypes: list[torch.dtype | None],
) -> Ring | None:  # fmt: skip
    """The tiles in which these kernels take this call, if they do.

    way: "hopper", "auto" or "portable". whole: what is read in rows, (rows, width); vectors: weight and bias;
    dtypes: of what is written in rows.
    """
    x = whole[0]
    assert x is not None
    rows, width = x.shape
    ring = CHOSEN.get((pass_, op, width)) if way != "portable" else None
    if ring is None or not _machine(x) or rows * width >= 2**31 * _LINE:
        return None
    given = [t for t in (*whole, *vectors) if t is not None]
    fits = x.dtype in (torch.bfloat16, torch.float16) and all(
        t.dtype == x.dtype and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in given
    )
    return ring if fits and all(d in (None, x.dtype) for d in dtypes) else None


def _machine(x: Tensor) -> bool:
    return x.is_cuda and not torch.version.hip and capability(x.device) == (9, 0) and gluon_available()


def programs_of_rows(rows: int, ring: Ring, device: torch.device) -> int:
    """How many rows or tiles of rows are worked on at once; each by `ring.parts` programs."""
    return min(-(-rows // ring.rows), multiprocessors(device) * ring.each // ring.parts)


def _maps(ring: Ring, first: Tensor, *others: Tensor | None) -> list:
    """Tensor maps over (rows, lines, 64); the first one stands in for what is not there."""
    rows, width = first.shape
    lines = width // _LINE
    box = (ring.rows, next_power_of_2(-(-lines // ring.parts)), _LINE)
    views = [(first if t is None else t).view(rows, lines, _LINE) for t in (first, *others)]
    return [known_map((x.shape, x.dtype, box), x, partial(_new_map, x=x, box=box)) for x in views]


def _new_map(kind, x: Tensor, box: tuple[int, int, int]):
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return kind(x, list(x.shape), list(x.stride()), list(box), gl.NVMMASharedLayout.get_default_for(list(box), element))


def _notes(ring: Ring, groups: int, x: Tensor) -> Tensor:
    """Zeros, words of 64 bits, by which programs of a row tell each other their sums."""
    from gpu_accel.thunderkittens.gemm_hopper import zero_counters

    if ring.parts == 1:
        return x
    size = (_RING * ring.parts * 2 + 2) * 2 * groups
    zeros = zero_counters(x.device, size + 4)
    return zeros[-zeros.data_ptr() % 16 // 4 :][:size].view(torch.int64)


def _run(
    name: str, op: str, ring: Ring, groups: int, maps: list, tensors: list[Tensor], numbers: tuple, constants: dict
):
    from gpu_accel.thunderkittens import row_ring_kernels

    if name not in _quick:
        _quick[name] = QuickLaunch(getattr(row_ring_kernels, name))
    # what Triton compiles for: boxes, dtypes, and whether addresses are multiples of 16 bytes
    boxes = tuple(tuple(m.block_shape) for m in maps)
    kinds = (boxes, tuple((t.dtype, t.data_ptr() % 16 == 0) for t in tensors), ring.each)
    options = dict(num_warps=ring.warps, maxnreg=min(255, 65536 // (32 * ring.warps * ring.each) // 8 * 8))
    if ring.parts > 1:  # whose programs wait for each other
        options["launch_cooperative_grid"] = True
    exact = maps[0].shape[1] == ring.parts * maps[0].block_shape[1]
    shape = dict(ROWS=ring.rows, STAGES=ring.stages, PARTS=ring.parts, PADDED=next_power_of_2(ring.parts),
                 LATE=ring.late if ring.parts > 1 else 0, WARPS=ring.warps, EXACT=exact)  # fmt: skip
    _quick[name](kinds, groups * ring.parts, (*maps, *tensors, *numbers), dict(OP=OPS[op]) | shape | constants, options)


def forward(
    x: Tensor, y: Tensor, op: str, ring: Ring, weight: Tensor | None = None, bias: Tensor | None = None,
    residual: Tensor | None = None, summed: Tensor | None = None, means: Tensor | None = None,
    rstds: Tensor | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """y (rows, width) of x, and what else is written: summed, means and rstds (rows,) float32."""
    rows, width = x.shape
    groups = programs_of_rows(rows, ring, x.device)
    maps = _maps(ring, x, residual)
    tensors = [y if t is None else t for t in (weight, bias, y, summed, means, rstds)] + [_notes(ring, groups, x)]
    there = dict(WEIGHT=weight is not None, BIAS=bias is not None, RESIDUAL=residual is not None)
    numbers = (rows, -(-rows // ring.rows), width // _LINE, eps)
    _run("forward_rows_kernel", op, ring, groups, maps, tensors, numbers, there)


def backward(
    x: Tensor, dy: Tensor, dx: Tensor, op: str, ring: Ring, weight: Tensor | None = None, means: Tensor | None = None,
    rstds: Tensor | None = None, dsum: Tensor | None = None, dresidual: Tensor | None = None,
    partial_w: Tensor | None = None, partial_b: Tensor | None = None,
) -> None:  # fmt: skip
    """dx (rows, width) of x, softmax or what was normalised, and dy; partial sums (programs_of_rows, width) float32."""
    rows, width = x.shape
    groups = programs_of_rows(rows, ring, x.device)
    maps = _maps(ring, x, dy, dsum)
    optional = (weight, means, rstds, dx, dresidual, partial_w, partial_b)
    tensors = [dx if t is None else t for t in optional] + [_notes(ring, groups, x)]
    there = dict(WEIGHT=weight is not None, BIAS=partial_b is not None, DSUM=dsum is not None,
                 RESIDUAL=dresidual is not None)  # fmt: skip
    numbers = (rows, -(-rows // ring.rows), width // _LINE)
    _run("backward_rows_kernel", op, ring, groups, maps, tensors, numbers, dict(PIECES=ring.pieces) | there)
