"""Grouped products of fp8 matrices: each 128 rows of `a` times the weights of their own expert, in one launch.

    out = grouped_mm(a, b, groups)        a (M, K)   b (G, N, K)   groups (M,) int32

The rows of `a` are sorted by expert, and those of one expert fill whole blocks of 128 (pad the last with anything):
the "contiguous" layout of DeepGEMM, and `groups` is its m_indices. `group_rows` makes it. Where every expert has room
for as many rows and only the device knows how many it has, `group_room` does: DeepGEMM's "masked" layout. Rows of a
negative group come out as 0, and cost next to nothing. A bias of each expert and an activation are part of the launch,
and `grouped_mm_fp8` rounds what comes out to fp8 there.

    out = k_grouped_mm(a, b, ends)        a (N, M)   b (K, M)   ends (G,) int32     out (G, N, K)

is what gradients of the experts' weights are: sums over the rows of each expert, which are contiguous along M as the
column-wise copies of `quantize` have them (DeepGEMM's k-grouped layout). `group_ends` makes `ends` of sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.launch import launch
from gpu_accel.thunderkittens.gemm_api import ACTIVATIONS, activated
from gpu_accel.transformer_engine import hopper_gemm
from gpu_accel.transformer_engine.checks import (
    check_choice,
    check_floats,
    check_no_gradient,
    check_one_device,
    check_strided,
)
from gpu_accel.transformer_engine.gemm import (
    OUT_DTYPES,
    check_fp8_result,
    of_codes,
    pair_kind,
    plain_backend,
    to_fp8,
)
from gpu_accel.transformer_engine.gemm_kernels import _fp8_kernel
from gpu_accel.transformer_engine.reference_gemm import exact_values
from gpu_accel.transformer_engine.schemes import scheme as find_scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor

BLOCK = 128  # rows that have one expert
_BLOCKS = ((0, 0), (1, 0), (1, 128), (128, 128))


_COUNTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _check_counts(name: str, x: Any) -> None:
    """A tensor of integers (G,): how many rows each expert has."""
    if not isinstance(x, Tensor) or x.dtype not in _COUNTS or x.dim() != 1:
        got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInputError(f"{name} must be a tensor (G,) of integers, got {got}")
    check_strided(name, x)


def _readable(x: Tensor) -> bool:
    """Whether values can be looked at: never wait for a GPU."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def group_rows(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Where the rows of each expert go: (groups (M,), first row of each expert (G,)), M a sum of padded sizes.

    sizes: (G,) integers, how many rows each expert has; read on the host. Rows of padding have group -1. Returns int32
    and int64 on the device of sizes. Raises InvalidInputError for other shapes, dtypes or negative sizes.
    """
    _check_counts("sizes", sizes)
    if sizes.is_meta:
        raise InvalidInputError("sizes is on the meta device and has no values, which are read here")
    counts = [int(n) for n in sizes.tolist()]
    if any(n < 0 for n in counts):
        raise InvalidInputError(f"sizes must not be negative, got {counts}")
    padded = [-(-n // BLOCK) * BLOCK for n in counts]
    if sum(padded) >= 2**31:
        raise InvalidInputError(f"sizes must sum up to less than 2**31, got {shown(counts)}")
    groups = torch.full((sum(padded),), -1, dtype=torch.int32)
    starts, at = [], 0
    for expert, (n, room) in enumerate(zip(counts, padded, strict=True)):
        groups[at : at + n] = expert
        starts.append(at)
        at += room
    return groups.to(sizes.device), torch.tensor(starts, dtype=torch.int64, device=sizes.device)


def group_room(counts: Tensor, room: int) -> Tensor:
    """`groups` (G * room,) for experts that have `room` rows each, of which the first `counts` (G,) are used.

    Nothing is read on the host, so it can be captured in a CUDA graph; counts on a CPU are checked to lie from 0 to
    `room`, and elsewhere less is 0 and more is `room`. room: a multiple of 128. Returns int32; raises InvalidInputError
    for another room, shape or dtype.
    """
    _check_counts("counts", counts)
    if isinstance(room, bool) or not isinstance(room, int) or room < BLOCK or room % BLOCK:
        raise InvalidInputError(f"room must be a multiple of {BLOCK}, got {shown(room)}")
    if _readable(counts) and bool(((counts < 0) | (counts.long() > room)).any()):
        raise InvalidInputError(f"counts must be from 0 to room, {room}, got {counts.tolist()}")
    block = torch.arange(0, room, BLOCK, device=counts.device)
    expert = torch.arange(counts.shape[0], device=counts.device, dtype=torch.int32)
    used = torch.where(block[None, :] < counts[:, None], expert[:, None], -1)
    return used.to(torch.int32).repeat_interleave(BLOCK, 1).view(-1)


def grouped_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    groups: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """out[i] = activation(a[i] (K,) @ b[groups[i]] (N, K).T + bias[groups[i]]), (M, N), of two fp8 operands.

    Args:
        a: (M, K). b: (G, N, K); with scales of 128x128 blocks N must be a multiple of 128, so that no block has rows
            of two experts.
        groups: (M,) int32, contiguous, on the device; read at every 128th row only, so that it stays there. Values
            below 0 mean rows of zeros; values of G and more are refused on a CPU, and not looked for on a GPU.
        bias: (G, N). activation: as of `scaled_mm`, of the float32 sums.
    Raises:
        InvalidInputError, UnsupportedError, HardwareError as `scaled_mm`.
    """
    _check(a, b, groups, out_dtype, bias, activation)
    if hopper_gemm.chosen(a, b, backend, kind=_kind_of(bias, activation)):
        return hopper_grouped_op(*_given(a, b), groups, b.shape[1], bias, activation, out_dtype, *_texts(a, b))
    wanted = out_dtype if activation == "none" else torch.float32  # then sums stay float32, and are rounded once
    if plain_backend(backend, a, "grouped_mm", "fp8") == "reference":
        out = grouped_mm_reference(a, b, groups, bias=bias, out_dtype=wanted)
    else:
        out = grouped_op(*_given(a, b), groups, b.shape[1], bias, wanted, *_texts(a, b))
    return out if activation == "none" else activated(out, activation).to(out_dtype)


def grouped_mm_fp8(
    a: QuantizedTensor,
    b: QuantizedTensor,
    groups: Tensor,
    scale: Tensor,
    *,
    element: str = "e4m3",
    bias: Tensor | None = None,
    activation: str = "none",
    amax: Tensor | None = None,
    backend: str = "auto",
) -> QuantizedTensor:
    """`grouped_mm` rounded to fp8 on its way out: codes = result / scale, saturating; see `scaled_mm_fp8`.

    amax: raised to the largest magnitude of all rows; those of negative groups are 0, padding within a block counts.
    """
    _check(a, b, groups, torch.bfloat16, bias, activation)
    check_fp8_result(a, element, scale, amax)
    if hopper_gemm.chosen(a, b, backend, kind="grouped-finished"):
        codes = hopper_grouped_fp8_op(
            *_given(a, b), groups, b.shape[1], bias, activation, scale, amax, element, *_texts(a, b)
        )
    else:
        out = grouped_mm(
            a, b, groups, bias=bias, activation=activation, out_dtype=torch.float32, backend=backend
        )  # fmt: skip
        codes = to_fp8(out, scale, element, amax)
    return of_codes(codes, scale, element, amax, torch.Size((a.shape[0], b.shape[1])))


def _kind_of(bias: Tensor | None, activation: str) -> str:
    return "grouped" if bias is None and activation == "none" else "grouped-finished"


def _check(
    a: QuantizedTensor, b: QuantizedTensor, groups: Tensor, out_dtype: torch.dtype, bias: Tensor | None,
    activation: str,
) -> None:  # fmt: skip
    kind = pair_kind(a, b)
    if kind != "fp8" or b.scheme.block not in _BLOCKS:
        raise UnsupportedError(f"{a.scheme} x {b.scheme}: grouped products are those of fp8 with float32 scales")
    if a.dim() != 2 or b.dim() != 3 or a.shape[1] != b.shape[2]:
        raise InvalidInputError(f"a must be (M, K) and b (G, N, K), got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.shape[0] and not b.shape[0]:  # rows of no group read one too
        raise InvalidInputError(f"b must have at least one matrix (N, K) for {a.shape[0]} rows, got {tuple(b.shape)}")
    if not isinstance(groups, Tensor) or groups.dtype != torch.int32 or tuple(groups.shape) != (a.shape[0],):
        raise InvalidInputError(f"groups must be ({a.shape[0]},) int32, got {getattr(groups, 'shape', type(groups))}")
    if not groups.is_contiguous():
        raise InvalidInputError("groups must be contiguous")
    check_choice("activation", activation, ACTIVATIONS)
    if bias is not None:
        check_floats("bias", bias)
        if bias.shape != b.shape[:2]:
            raise InvalidInputError(f"bias must be (G, N), {tuple(b.shape[:2])}, got {tuple(bias.shape)}")
    check_one_device(a=a, b=b, groups=groups, bias=bias)
    check_no_gradient(a=a, b=b, bias=bias)
    if out_dtype not in OUT_DTYPES:
        raise InvalidInputError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if b.scheme.block == (128, 128) and b.shape[1] % 128:
        raise UnsupportedError(f"N is {b.shape[1]}: with scales of 128x128 blocks it must be a multiple of 128")
    if _readable(groups):
        _check_members(groups[::BLOCK].tolist(), b.shape[0])


def _check_members(members: list[int], matrices: int) -> None:
    for block, member in enumerate(members):
        if member >= matrices:
            raise InvalidInputError(f"groups[{block * BLOCK}] is {member}, and b has {matrices} matrices, 0 to G - 1")


def group_ends(sizes: Tensor) -> Tensor:
    """(G,) int32: behind the last row of each expert, with the padding that `group_rows` makes.

    sizes: (G,) integers, how many rows each expert has; looked at on a CPU only.
    """
    _check_counts("sizes", sizes)
    if _readable(sizes):
        counts = sizes.tolist()
        if any(n < 0 for n in counts) or sum(-(-n // BLOCK) * BLOCK for n in counts) >= 2**31:
            raise InvalidInputError(f"sizes must be at least 0 and sum up to less than 2**31, got {shown(counts)}")
    return ((sizes.long() + BLOCK - 1) // BLOCK * BLOCK).cumsum(0).to(torch.int32)


def k_grouped_mm(
    a: QuantizedTensor, b: QuantizedTensor, ends: Tensor, *, out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """out[g] = a[:, s:e] (N, e - s) @ b[:, s:e].T (e - s, K) with s = ends[g - 1], e = ends[g]: (G, N, K).

    Args:
        a: (N, M), b: (K, M), fp8 with scales per tensor, per row, or of 1x128. Of the padding of a group (its rows up
            to a multiple of 128) one of the two has zeros, and the other no NaN.
        ends: (G,) int32 on the device, multiples of 128, not falling, the last at most M; looked at on a CPU only.
            A group of no rows gives zeros.
    Raises:
        InvalidInputError, UnsupportedError, HardwareError as `scaled_mm`.
    """
    _check_along(a, b, ends, out_dtype)
    starts = torch.cat((ends.new_zeros(1), ends // BLOCK))
    whole = a.shape[0] % BLOCK == 0
    if backend == "hopper" and not whole:
        raise UnsupportedError(f"hopper: N is {a.shape[0]}, and must be a multiple of 128; use backend='portable'")
    if whole and hopper_gemm.chosen(a, b, backend, kind="along"):
        return _operate_along(hopper_along_op, a, b, starts, out_dtype)
    if plain_backend(backend, a, "k_grouped_mm", "fp8") == "reference":
        return k_grouped_mm_reference(a, b, ends, out_dtype=out_dtype)
    return _operate_along(along_op, a, b, starts, out_dtype)


def _check_along(a: QuantizedTensor, b: QuantizedTensor, ends: Tensor, out_dtype: torch.dtype) -> None:
    kind, blocks = pair_kind(a, b), (a.scheme.block, b.scheme.block)
    if kind != "fp8" or (128, 128) in blocks:
        raise UnsupportedError(
            f"{a.scheme} x {b.scheme}: products grouped along K are those of fp8 with scales per tensor, row or 1x128"
        )
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise InvalidInputError(f"a must be (N, M) and b (K, M), got {tuple(a.shape)} and {tuple(b.shape)}")
    if not isinstance(ends, Tensor) or ends.dtype != torch.int32 or ends.dim() != 1 or not ends.numel():
        raise InvalidInputError(f"ends must be (G,) int32 with G >= 1, got {getattr(ends, 'shape', type(ends))}")
    check_strided("ends", ends)
    check_one_device(a=a, b=b, ends=ends)
    check_no_gradient(a=a, b=b)
    if out_dtype not in OUT_DTYPES:
        raise InvalidInputError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if _readable(ends):
        found = ends.tolist()
        falling = any(x > y for x, y in zip([0, *found], found, strict=False))
        if falling or found[-1] > a.shape[1] or any(n % BLOCK for n in found):
            raise InvalidInputError(f"ends must be multiples of 128 that do not fall, up to {a.shape[1]}, got {found}")


def k_grouped_mm_reference(
    a: QuantizedTensor, b: QuantizedTensor, ends: Tensor, *, out_dtype: torch.dtype = torch.float64,
    dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """The same in plain torch, summed in `dtype`."""
    x, w = exact_values(a, dtype), exact_values(b, dtype)
    edges = [0, *ends.tolist()]
    parts = [x[:, s:e] @ w[:, s:e].t() for s, e in zip(edges, edges[1:], strict=False)]
    return torch.stack(parts).to(out_dtype)


def _operate_along(op, a: QuantizedTensor, b: QuantizedTensor, starts: Tensor, out_dtype: torch.dtype) -> Tensor:
    parts = a._parts(""), b._parts("")
    given = [x for part in parts if part is not None for x in (part.codes, part.scales)]
    return op(*given, starts, out_dtype, a.scheme.text, b.scheme.text)


def grouped_mm_reference(
    a: QuantizedTensor,
    b: QuantizedTensor,
    groups: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float64,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The same in plain torch, summed in `dtype`; one group for each 128 rows, that of the first."""
    x, w = exact_values(a, dtype), exact_values(b, dtype).reshape(b.shape)
    out = torch.zeros(a.shape[0], b.shape[1], dtype=dtype, device=x.device)
    members = groups[::BLOCK].tolist()
    _check_members(members, b.shape[0])
    for row, group in enumerate(members):
        at = slice(row * BLOCK, (row + 1) * BLOCK)
        if group >= 0:
            out[at] = x[at] @ w[group].t()
            if bias is not None:
                out[at] += bias[group].to(dtype)
    return out.to(out_dtype)


def _given(a: QuantizedTensor, b: QuantizedTensor) -> list[Tensor]:
    parts = a._parts(""), b._parts("")
    return [x for part in parts if part is not None for x in (part.codes, part.scales)]


def _texts(a: QuantizedTensor, b: QuantizedTensor) -> tuple[str, str]:
    return a.scheme.text, b.scheme.text


def _without_product(m: int, n: int, groups: Tensor, bias: Tensor | None) -> Tensor:
    """float32 (m, n) where nothing is multiplied: what each block of rows has of the bias."""
    if bias is None or not m or not n:
        return torch.zeros(m, n, device=groups.device)
    members = groups[::BLOCK].repeat_interleave(BLOCK)[:m]
    return torch.where((members < 0)[:, None], 0.0, bias.float()[members.clamp(min=0).long()])


@torch.library.custom_op("gpu_accel::te_grouped_mm_hopper", mutates_args=())
def hopper_grouped_op(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, groups: Tensor, n: int, bias: Tensor | None,
    activation: str, out_dtype: torch.dtype, text_a: str, text_b: str,
) -> Tensor:  # fmt: skip
    """(M, n) from codes (M, K) and (G * n, K) as bytes."""
    if not a.shape[0] or not n or not a.shape[1]:
        return activated(_without_product(a.shape[0], n, groups, bias), activation).to(out_dtype)
    out = torch.empty(a.shape[0], n, dtype=out_dtype, device=a.device)
    return hopper_gemm.run(a, scale_a, b, scale_b, bias, activation, text_a, text_b, groups=groups, out=out)


@torch.library.custom_op("gpu_accel::te_grouped_mm_hopper_fp8", mutates_args=("amax",))
def hopper_grouped_fp8_op(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, groups: Tensor, n: int, bias: Tensor | None,
    activation: str, scale: Tensor, amax: Tensor | None, element: str, text_a: str, text_b: str,
) -> Tensor:  # fmt: skip
    """The same in codes of `element`, of the result / `scale`; `amax` is raised to the result's largest magnitude."""
    if not a.shape[0] or not n or not a.shape[1]:
        nothing = activated(_without_product(a.shape[0], n, groups, bias), activation)
        return to_fp8(nothing, scale, element, amax)
    out = torch.empty(a.shape[0], n, dtype=hopper_gemm.ELEMENTS[element], device=a.device)
    factor = (1.0 / scale).reshape(())
    return hopper_gemm.run(
        a, scale_a, b, scale_b, bias, activation, text_a, text_b, groups=groups, out=out, out_scale=factor, amax=amax
    )  # fmt: skip


@hopper_grouped_fp8_op.register_fake
def _(a, scale_a, b, scale_b, groups, n, bias, activation, scale, amax, element, text_a, text_b):
    return a.new_empty((a.shape[0], n), dtype=hopper_gemm.ELEMENTS[element])


@torch.library.custom_op("gpu_accel::te_grouped_mm", mutates_args=())
def grouped_op(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, groups: Tensor, n: int, bias: Tensor | None,
    out_dtype: torch.dtype, text_a: str, text_b: str,
) -> Tensor:  # fmt: skip
    """(M, n) in plain Triton, without an activation."""
    m, k = a.shape
    if not m or not n or not k:
        return _without_product(m, n, groups, bias).to(out_dtype)
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    schemes = find_scheme(text_a), find_scheme(text_b)
    bm = bn = 128
    places = []
    for scales, what in ((scale_a, schemes[0]), (scale_b, schemes[1])):
        across = scales.shape[1]
        strides = {(0, 0): (0, 0, 1), (1, 0): (1, 0, 1), (1, 128): (across, 1, 1), (128, 128): (across, 1, 128)}
        places.append(strides[what.block])
    rows_b = schemes[1].block[0]
    between = places[1][0] * (n // rows_b) if rows_b else 0
    tiles_m, tiles_n = triton.cdiv(m, bm), triton.cdiv(n, bn)
    given = out if bias is None else bias.contiguous()
    arguments = (a, b, scale_a, scale_b, given, out, groups, m, n, k, tiles_m, tiles_n, between, *places[0][:2],
                 *places[1][:2])  # fmt: skip
    options = dict(
        BM=bm, BN=bn, BK=128, GROUP=8, A_E5M2=schemes[0].element == "e5m2", B_E5M2=schemes[1].element == "e5m2",
        BLOCKED=schemes[0].block[1] == 128, ROWS_A=places[0][2], ROWS_B=places[1][2], BIAS=bias is not None,
        EVEN=k % 128 == 0, GROUPED=1, num_warps=8, num_stages=3,
    )  # fmt: skip
    launch(_fp8_kernel, tiles_m * tiles_n, arguments, options)
    return out


@torch.library.custom_op("gpu_accel::te_k_grouped_mm_hopper", mutates_args=())
def hopper_along_op(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, starts: Tensor, out_dtype: torch.dtype, text_a: str,
    text_b: str,
) -> Tensor:  # fmt: skip
    """(G, N, K) from codes (N, M) and (K, M) as bytes; starts (G + 1,): first slices of 128 of M."""
    out = torch.empty(starts.shape[0] - 1, a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    if not out.numel() or not a.shape[1]:
        return out.zero_()
    hopper_gemm.run(
        a, scale_a, b, scale_b, None, "none", text_a, text_b, along=starts, out=out.view(-1, b.shape[0])
    )  # fmt: skip
    return out


@torch.library.custom_op("gpu_accel::te_k_grouped_mm", mutates_args=())
def along_op(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, starts: Tensor, out_dtype: torch.dtype, text_a: str,
    text_b: str,
) -> Tensor:  # fmt: skip
    """The same in plain Triton."""
    (m, k), n, count = a.shape, b.shape[0], starts.shape[0] - 1
    out = torch.empty(count, m, n, dtype=out_dtype, device=a.device)
    if not out.numel() or not k:
        return out.zero_()
    schemes = find_scheme(text_a), find_scheme(text_b)
    places = []
    for scales, what in ((scale_a, schemes[0]), (scale_b, schemes[1])):
        places.append({(0, 0): (0, 0), (1, 0): (1, 0), (1, 128): (scales.shape[1], 1)}[what.block])
    tiles_m, tiles_n = count * triton.cdiv(m, 128), triton.cdiv(n, 128)
    arguments = (a, b, scale_a, scale_b, out, out, starts, m, n, k, tiles_m, tiles_n, m, *places[0], *places[1])
    options = dict(
        BM=128, BN=128, BK=128, GROUP=8, A_E5M2=schemes[0].element == "e5m2", B_E5M2=schemes[1].element == "e5m2",
        BLOCKED=schemes[0].block[1] == 128, ROWS_A=1, ROWS_B=1, BIAS=False, EVEN=k % 128 == 0, GROUPED=2, num_warps=8,
        num_stages=3,
    )  # fmt: skip
    launch(_fp8_kernel, tiles_m * tiles_n, arguments, options)
    return out


@hopper_along_op.register_fake
@along_op.register_fake
def _(a, scale_a, b, scale_b, starts, out_dtype, text_a, text_b):
    return a.new_empty((starts.shape[0] - 1, a.shape[0], b.shape[0]), dtype=out_dtype)


@hopper_grouped_op.register_fake
def _(a, scale_a, b, scale_b, groups, n, bias, activation, out_dtype, text_a, text_b):
    return a.new_empty((a.shape[0], n), dtype=out_dtype)


@grouped_op.register_fake
def _(a, scale_a, b, scale_b, groups, n, bias, out_dtype, text_a, text_b):
    return a.new_empty((a.shape[0], n), dtype=out_dtype)
