"""From the largest magnitude of a block to its scale: one policy for zeros, tiny and huge numbers, Inf and NaN.

A scale is always what codes are multiplied with to get numbers back. Libraries disagree about every row of this table
(Transformer Engine alone has three answers for an infinite maximum); here it is the same in the plain-torch reference,
in the kernels, and in the conformance vectors that others may test against (`conformance.py`, `conformance.json`).

    largest magnitude    fp32, pow2                          e8m0 (MX)               nvfp4
    0                    1                                   2**-127 (code 0)        block 0, tensor 1
    tiny                 at least 2**-126: 1 / scale is      at least 2**-127        tensor at least 2**-126,
                         finite, no scale is subnormal                               block may be 0
    huge                 no limit                            no limit reached        at most 448 per block
    Inf or NaN inside    e4m3, e5m2: these become NaN in     NaN (0xFF): the whole   NaN (0x7F): the whole
                         place, the scale follows the rest;  block is NaN            block is NaN, others
                         others: NaN, the whole block                                are not

So no infinity ever turns into a plausible number, and no finite block ever becomes NaN (within a rounding of FLT_MAX
codes may mean 2**128, which float32 writes as Inf). What is finite but beyond the
largest number of the format (a scale from an older maximum) saturates.

NVFP4 saturates too: the scale of a block is itself rounded to nearest, so the largest values of a block may lie beyond
6 times it, by a sixteenth where the scale is a normal number. Stochastic rounding is unbiased for
all values but these.

Delayed scaling takes its scale from a history of maxima (`update_history`). A maximum that is zero, infinite or NaN
tells nothing about the next tensor: it is not entered, the scale stays, and infinite or NaN ones are counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.transformer_engine.formats import E8M0, FORMATS, UE4M3, decode, encode
from gpu_accel.transformer_engine.schemes import Scheme

INF_BITS = 0x7F800000
MIN_SCALE = 2.0**-126
FLT_MAX = 3.4028234663852886e38
NVFP4_RANGE = 448.0 * 6.0


def amax_bits(x: Tensor, *, finite_only: bool) -> Tensor:
    """|x| as float32 bits (int32), in which NaN > Inf > every number; with `finite_only` both count as 0."""
    size = x.float().contiguous().view(torch.int32) & 0x7FFFFFFF
    return torch.where(size < INF_BITS, size, 0) if finite_only else size


def divide(a: Tensor | float, b: Tensor | float, like: Tensor) -> Tensor:
    """Correctly rounded float32 a / b. Dividing a tensor by a Python number is a multiplication on CUDA."""
    a, b = (v if isinstance(v, Tensor) else torch.full_like(like, v, dtype=torch.float32) for v in (a, b))
    return a / b


def scale_fp32(amax: Tensor, largest: float, *, power_of_two: bool = False) -> Tensor:
    """float32 scales for largest magnitudes (float32); NaN and Inf give NaN."""
    if power_of_two:
        # ceil(log2(amax / largest)) in integers: one more wherever amax has a larger significand than `largest`
        bits = amax.contiguous().view(torch.int32)
        exponent = ((bits + carry(largest)) >> 23) - exponent_of(largest)
        scale = (exponent.clamp(min=1) << 23).view(torch.float32)
    else:
        scale = divide(amax, largest, amax).clamp_min(MIN_SCALE)
    scale = torch.where(amax > 0, scale, 1.0)
    return torch.where(amax < float("inf"), scale, float("nan"))


def exponent_of(largest: float) -> int:
    """floor(log2(largest))."""
    return (_bits(largest) >> 23) - 127


def carry(largest: float) -> int:
    """What added to float32 bits moves the exponent up exactly where the significand exceeds that of `largest`."""
    return 0x7FFFFF - (_bits(largest) & 0x7FFFFF)


def _bits(value: float) -> int:
    import struct

    return struct.unpack("<i", struct.pack("<f", value))[0]


def mx_rounding(scheme: Scheme) -> int:
    """What is added to the bits of the largest magnitude before its exponent is taken, by `rule`.

    floor: nothing (OCP MX v1.0; clips what lies between the largest number and the next power of two). rceil: the least
    power of two with which nothing is clipped (cuBLAS, Transformer Engine). ceil: the next power of two of the
    magnitude. even: the magnitude is first rounded to the element's significand.
    """
    fmt = FORMATS[scheme.element]
    return {
        "floor": 0,
        "rceil": carry(fmt.largest),
        "ceil": 0x7FFFFF,
        "even": 1 << (22 - fmt.mantissa_bits),
    }[scheme.rule]


def mx_codes(bits: Tensor, scheme: Scheme) -> Tensor:
    """Codes in e8m0 (uint8) for the largest magnitudes of blocks, given as float32 bits."""
    code = ((bits + mx_rounding(scheme)) >> 23) - FORMATS[scheme.element].max_exponent
    code = code.clamp(0, 254)
    return torch.where(bits >= INF_BITS, 255, code).to(torch.uint8)


def mx_inverse(codes: Tensor) -> Tensor:
    """1 / scale in float32, NaN for code 255. Exact: codes from blocks are at most 253, so nothing is subnormal."""
    inverse = ((254 - codes.int()).clamp(min=0) << 23).view(torch.float32)
    return torch.where(codes == 255, float("nan"), inverse)


def nvfp4_encode_scale(amax: Tensor) -> Tensor:
    """What a whole tensor is multiplied with before its blocks are scaled: 448 * 6 / amax, 1 for zero.

    At most 2**126, so that the inverse, which is what is kept, is not subnormal.
    """
    scale = divide(NVFP4_RANGE, amax, amax).clamp_max(1 / MIN_SCALE)
    return torch.where(amax > 0, scale, 1.0)


def nvfp4_codes(bits: Tensor, encode_scale: Tensor) -> Tensor:
    """Codes in e4m3 (uint8) of the blocks' scales, relative to the tensor's."""
    amax = bits.view(torch.float32)
    wanted = (amax * divide(encode_scale, 6.0, encode_scale)).clamp_max(448.0)
    codes = encode(torch.where(bits < INF_BITS, wanted, 0.0), UE4M3)
    return torch.where(bits >= INF_BITS, 0x7F, codes.int()).to(torch.uint8)


def nvfp4_inverse(codes: Tensor, encode_scale: Tensor) -> Tensor:
    """What the numbers of a block are multiplied with: the tensor's scale over the *rounded* scale of the block."""
    scale = decode(codes, UE4M3)
    inverse = divide(encode_scale.expand_as(scale), scale, scale).clamp_max(FLT_MAX)
    return torch.where(codes == 0, 0.0, torch.where(scale.isnan(), float("nan"), inverse))


# -- delayed scaling


def check_margin(margin: int) -> None:
    """A margin is a power of two within the range of float32."""
    if isinstance(margin, bool) or not isinstance(margin, int) or not -126 <= margin <= 127:
        raise InvalidInputError(f"margin must be a whole number from -126 to 127, got {shown(margin)}")


def update_history(history: Tensor, amax: Tensor, scale: Tensor, *, largest: float, margin: int = 0,
                   algorithm: str = "max", power_of_two: bool = False) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One step of delayed scaling: (history, scale, overflowed), all new tensors.

    Args:
        history: (length,) float32, newest first; zeros are entries that were never made.
        amax: () float32, the largest magnitude of the tensor that was just quantised; NaN or Inf if it had any.
        scale: () float32, the scale in use.
        margin: the scale leaves room for a factor of 2**margin.
        algorithm: "max" of the history, or "most_recent".

    `overflowed` is () int64, 1 if amax was NaN or infinite. Then, and for 0, history and scale stay as they are.
    """
    check_margin(margin)
    if algorithm not in ("max", "most_recent"):
        raise InvalidInputError(f"amax_compute_algo must be 'max' or 'most_recent', got {algorithm!r}")
    if history.dim() != 1 or not history.numel():
        raise InvalidInputError(f"the history of maxima must be (length,) with length >= 1, got {tuple(history.shape)}")
    amax = amax.float().reshape(())
    history, scale = next_history(
        history, amax, scale, largest=largest, margin=margin, algorithm=algorithm, power_of_two=power_of_two
    )  # fmt: skip
    return history, scale, (~(amax < float("inf"))).long()


def next_history(history: Tensor, amax: Tensor, scale: Tensor, *, largest: float, margin: int, algorithm: str,
                 power_of_two: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`update_history` of any number of histories at once: (..., length), (...) and (...). Nothing is checked."""
    usable = (amax < float("inf")) & (amax > 0)  # False for NaN
    history = torch.where(usable[..., None], torch.cat((amax[..., None], history[..., :-1]), -1), history)
    chosen = history.amax(-1) if algorithm == "max" else history[..., 0]
    fresh = scale_fp32(chosen * 2.0**margin, largest, power_of_two=power_of_two)
    return history, torch.where(usable & (fresh < float("inf")), fresh, scale)


# -- the order in which tensor cores read scales


def _swizzle_shape(rows: int, cols: int, tile: int) -> tuple[int, int]:
    return -(-rows // tile), -(-cols // 4)


def swizzle_scales(scales: Tensor, *, layout: str = "128x4") -> Tensor:
    """Scales of one byte (rows, cols) in the order that block-scaled matrix products read; padding is zero bytes.

    "128x4" is cuBLAS's order for MX and NVFP4: tiles of 128 rows and 4 columns, 512 bytes each, row by row of tiles;
    inside a tile byte (r % 32) * 16 + r // 32 * 4 + c. "8x4" is what FlashInfer and TensorRT-LLM use for few rows:
    tiles of 8 rows and 4 columns, each row-major. Returns a flat tensor of whole tiles, in the dtype of scales.
    Raises InvalidInputError for another layout, shape or size of an element.
    """
    tile = _layout(layout)
    if not isinstance(scales, Tensor):
        raise InvalidInputError(f"scales must be a tensor, got {type(scales).__name__}")
    if scales.dim() != 2 or scales.element_size() != 1:
        raise InvalidInputError(f"scales must be (rows, cols) of one byte, got {tuple(scales.shape)} {scales.dtype}")
    dtype, (rows, cols) = scales.dtype, scales.shape
    down, across = _swizzle_shape(rows, cols, tile)
    padded = torch.zeros(down * tile, across * 4, dtype=torch.uint8, device=scales.device)
    padded[:rows, :cols] = scales.view(torch.uint8)
    tiles = padded.view(down, tile, across, 4).transpose(1, 2)
    if tile == 128:
        tiles = tiles.reshape(down, across, 4, 32, 4).transpose(2, 3)
    return tiles.reshape(-1).view(dtype)


def unswizzle_scales(flat: Tensor, rows: int, cols: int, *, layout: str = "128x4") -> Tensor:
    """What `swizzle_scales` was given, (rows, cols). Raises InvalidInputError where `flat` has not their bytes."""
    tile = _layout(layout)
    if not isinstance(flat, Tensor) or flat.element_size() != 1:
        raise InvalidInputError(f"flat must be a tensor of bytes, got {getattr(flat, 'dtype', type(flat).__name__)}")
    for name, size in (("rows", rows), ("cols", cols)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InvalidInputError(f"{name} must be an integer from 0 up, got {shown(size)}")
    down, across = _swizzle_shape(rows, cols, tile)
    if flat.numel() != down * across * tile * 4:
        raise InvalidInputError(
            f"{rows} x {cols} scales take {down * across * tile * 4} bytes in the {layout} order, got {flat.numel()}"
        )
    dtype = flat.dtype
    tiles = flat.contiguous().view(torch.uint8)
    if tile == 128:
        tiles = tiles.view(down, across, 32, 4, 4).transpose(2, 3)
    matrix = tiles.reshape(down, across, tile, 4).transpose(1, 2).reshape(down * tile, across * 4)
    return matrix[:rows, :cols].contiguous().view(dtype)


def _layout(layout: str) -> int:
    if layout not in ("128x4", "8x4"):
        raise InvalidInputError(f"layout must be '128x4' or '8x4', got {layout!r}")
    return int(layout.partition("x")[0])


def to_e8m0(scales: Tensor) -> Tensor:
    """float32 scales as e8m0 codes; refuses what is no power of two, since cutting the rest off is wrong by up to 2.

    Raises InvalidInputError (kernels that truncated silently: sglang#39193, vllm PR 53680).
    """
    codes = encode(scales, E8M0)
    if not torch.equal(decode(codes, E8M0).nan_to_num(-1.0), scales.float().nan_to_num(-1.0)):
        raise InvalidInputError("scales are not all powers of two: quantise with scale='pow2' or 'e8m0'")
    return codes
