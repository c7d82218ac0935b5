"""Block masks: torch's `BlockMask` (torch.nn.attention.flex_attention) as the arrays that the kernels walk.

A block mask lists, for every block of query rows, the blocks of keys that are seen in part and those that are seen as a
whole. Blocks in neither list are never touched; whole ones are not masked. The backward of k and v walks the transposed
lists, which BlockMask keeps too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError

_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
          "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")  # fmt: skip
_SMALLEST_BLOCK = 16


def _sizes(x: Tensor) -> str:
    return "(" + ", ".join(str(n) for n in x.shape) + ")"


def _check_lists(name: str, counts: Tensor, indices: Tensor | None, batch: int, heads: int, rows: int, device) -> None:
    """counts (batch or 1, heads or 1, rows) and indices (..., rows, columns), int32."""
    for x, what in ((counts, f"{name}_num_blocks"), (indices, f"{name}_indices")):
        if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.device != device:
            got = f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInputError(f"block_mask.{what} must be an int32 tensor on {device}, got {got}")
    assert indices is not None
    shape = tuple(counts.shape)
    if len(shape) != 3 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2] != rows:
        raise InvalidInputError(
            f"block_mask.{name}_num_blocks must be (batch {batch} or 1, heads {heads} or 1, blocks {rows}), got "
            f"{_sizes(counts)}: build the mask for these lengths, heads and batch"
        )
    if indices.dim() != 4 or tuple(indices.shape[:3]) != shape:
        raise InvalidInputError(
            f"block_mask.{name}_indices must be {_sizes(counts)} with one more dimension, got {_sizes(indices)}"
        )


def _check_values(name: str, counts: Tensor, indices: Tensor, full_counts, full_indices, columns: int) -> None:
    """Every listed block exists and is listed once: others would be read anyway, or counted twice."""
    for row in range(counts.numel()):
        listed: list[int] = []
        for count, blocks in ((counts, indices), (full_counts, full_indices)):
            if not count.numel():
                continue
            width, n = blocks.shape[-1], int(count.flatten()[row])
            if not 0 <= n <= width:
                raise InvalidInputError(f"block_mask lists {n} blocks in row {row} of {name}, with room for {width}")
            listed += blocks.reshape(-1, width)[row, :n].tolist()
        if any(not 0 <= block < columns for block in listed) or len(set(listed)) < len(listed):
            raise InvalidInputError(
                f"block_mask lists blocks {str(listed):.80} in row {row} of {name}: each must be from 0 to "
                f"{columns - 1} and listed once, partial or whole"
            )


def block_mask_lists(
    block_mask: Any, *, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device, has_mask_mod: bool
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """The eight lists of a block mask, contiguous, empty where the mask has none, and (query rows, keys) of a block.

    Raises:
        InvalidInputError: not a BlockMask, made for other lengths, or with a mask_mod that the call does not have; on a
            CPU also blocks that do not exist or are listed twice.
    """
    if not hasattr(block_mask, "kv_num_blocks") or not hasattr(block_mask, "BLOCK_SIZE"):
        raise InvalidInputError(
            "block_mask must be a torch.nn.attention.flex_attention.BlockMask (create_block_mask, or "
            f"BlockMask.from_kv_blocks), got {type(block_mask).__name__}"
        )
    if not has_mask_mod and not _every_block_whole(block_mask):
        raise InvalidInputError(
            "block_mask was made from a Python mask_mod, which no kernel can call: pass the same function as a Triton "
            "device function, mask_mod=..., beside it"
        )
    q_block, kv_block = block_mask.BLOCK_SIZE
    for size in (q_block, kv_block):
        if size < _SMALLEST_BLOCK or size % _SMALLEST_BLOCK:
            raise UnsupportedError(
                f"block_mask.BLOCK_SIZE must be multiples of {_SMALLEST_BLOCK}, got {(q_block, kv_block)}: build the "
                "mask with BLOCK_SIZE=128"
            )
    rows, columns = -(-seqlen_q // q_block), -(-seqlen_k // kv_block)
    lengths = getattr(block_mask, "seq_lengths", None)
    if lengths is not None and tuple(lengths) != (seqlen_q, seqlen_k):  # FlexAttention refuses these too
        raise InvalidInputError(
            f"block_mask is for {lengths[0]} queries and {lengths[1]} keys, but q has {seqlen_q} and k {seqlen_k}: "
            f"build it with Q_LEN={seqlen_q}, KV_LEN={seqlen_k} (BlockMask.from_kv_blocks: "
            f"seq_lengths=({seqlen_q}, {seqlen_k}), which are whole blocks otherwise)"
        )
    lists = []
    for at, (name, n) in enumerate((("kv", rows), ("full_kv", rows), ("q", columns), ("full_q", columns))):
        counts, indices = (getattr(block_mask, f"{name}{end}") for end in ("_num_blocks", "_indices"))
        if counts is None and at > 0:
            empty = torch.empty(0, dtype=torch.int32, device=device)
            lists += [empty, empty]
            continue
        _check_lists(name, counts, indices, batch, heads, n, device)
        if at % 2 == 1 and counts.shape != lists[-2].shape:
            raise InvalidInputError(
                f"block_mask's partial and whole blocks must be broadcast alike, got {_sizes(lists[-2])} and "
                f"{_sizes(counts)}"
            )
        lists += [counts.contiguous(), indices.contiguous()]
    if device.type == "cpu" and not torch.compiler.is_compiling():  # as with cu_seqlens: never wait for a GPU
        _check_values("kv_indices", *lists[:4], columns)
        if lists[4].numel():
            _check_values("q_indices", *lists[4:], rows)
    return tuple(lists), (q_block, kv_block)


def _every_block_whole(block_mask: Any) -> bool:
    from torch.nn.attention.flex_attention import noop_mask

    mask_mod = getattr(block_mask, "mask_mod", None)
    return mask_mod is None or mask_mod is noop_mask
