"""Tiles of the decode kernel and the number of splits, chosen from shapes alone.

Both depend on nothing that lives on the device, so a captured CUDA graph stays right and no call waits for the GPU.
`candidates` lists what `tune_decode.py` times on a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton

from gpu_accel.compat import INTERPRET
from gpu_accel.flash_attention3.launch import next_power_of_2

FIXED_SPLIT_KEYS = 512  # of batch_invariant: partial results are then 1.6 % of the traffic at 4 rows of 128
MOST_SPLITS = 256
_START = 2.0  # blocks that a program's start costs: reading lengths and page numbers, filling the pipeline, merging
_SMALLEST_TILE = 16  # rows that a matrix instruction takes at least
_PROCESSORS_OF_INTERPRETER = 4
_SHARED_OF_LARGE_CARDS = 160 << 10  # bytes


@dataclass(frozen=True)
class DecodeConfig:
    """`block_n` keys a block; `per_sm` programs that fit on a processor at once, which splits are counted for."""

    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int
    min_blocks: int = 1  # blocks a split has at least
    fused: bool = True  # the last split to arrive merges; otherwise a second kernel does
    prefetch: bool = True  # page numbers one block ahead of their keys
    reason: str = ""

    def merge_chunk(self, splits: int, elements: int) -> int:
        """How many partial results of `elements` numbers are held at once while merging, a power of two.

        32 of 4 rows of 128 dimensions, so that one wait for memory is enough; fewer where the sum itself takes many
        registers, or where they have to suffice for more than two programs.
        """
        room = self.num_warps * (16384 >> max(2, self.per_sm)) // (1 if elements <= 1024 else 2)
        return max(1, min(next_power_of_2(splits), room // elements))

    def __str__(self) -> str:
        extra = "" if self.fused else ", merged by a second kernel"
        extra += "" if self.prefetch else ", no prefetch"
        extra += f", at least {self.min_blocks} blocks" if self.min_blocks > 1 else ""
        return f"{self.block_n} keys, {self.num_warps} warps, {self.num_stages} stages, {self.per_sm} per SM{extra}"


INTERPRETER = DecodeConfig(16, 4, 1, 2, reason="several blocks and splits in short tests")

# (rows in a tile up to, bits of a cached number, head_dim up to) -> config. Chosen so that the blocks in flight (stages
# - 1 of K and V, times programs) are well above the 25 KB a processor of an H100 needs to cover the latency of its
# memory, and that `per_sm` programs fit into 227 KB of shared memory. Of 13 choices for 16 bits at head_dim 128 the
# best three were within 1 % of each other on an H100; the others are not measured.
_TABLE = {
    (16, 16, 64): DecodeConfig(128, 4, 3, 2, reason="a block of 32 KB, as at head_dim 128"),
    (16, 16, 128): DecodeConfig(64, 4, 3, 2, reason="a block of 32 KB, 64 KB in flight in each of two programs"),
    (16, 16, 256): DecodeConfig(32, 4, 3, 2, reason="a block of 32 KB"),
    (16, 8, 64): DecodeConfig(128, 4, 4, 2, reason="half the bytes: more stages"),
    (16, 8, 128): DecodeConfig(128, 4, 3, 2, reason="half the bytes: twice the keys"),
    (16, 8, 256): DecodeConfig(64, 4, 3, 2, reason="half the bytes: twice the keys"),
    (64, 16, 64): DecodeConfig(128, 4, 3, 2, reason="as for 16 rows"),
    (64, 16, 128): DecodeConfig(64, 4, 3, 2, reason="as for 16 rows"),
    (64, 16, 256): DecodeConfig(32, 4, 3, 2, reason="as for 16 rows"),
    (64, 8, 64): DecodeConfig(128, 4, 3, 2, reason="as for 16 rows"),
    (64, 8, 128): DecodeConfig(64, 4, 3, 2, reason="fewer keys: the fp16 copies of K and V take registers"),
    (64, 8, 256): DecodeConfig(32, 4, 3, 2, reason="fewer keys: the fp16 copies of K and V take registers"),
    (128, 16, 64): DecodeConfig(64, 8, 3, 2, reason="chunked prefill: bound by arithmetic"),
    (128, 16, 128): DecodeConfig(64, 8, 3, 1, reason="chunked prefill: bound by arithmetic"),
    (128, 16, 256): DecodeConfig(32, 8, 2, 1, reason="chunked prefill: bound by arithmetic"),
    (128, 8, 64): DecodeConfig(64, 8, 3, 2, reason="chunked prefill: bound by arithmetic"),
    (128, 8, 128): DecodeConfig(64, 8, 3, 1, reason="chunked prefill: bound by arithmetic"),
    (128, 8, 256): DecodeConfig(32, 8, 2, 1, reason="chunked prefill: bound by arithmetic"),
}


def tile_rows(rows: int) -> int:
    """Rows of a tile for `rows` packed rows (group x seqlen_q): 16, 32 or 64, and 128 where there are many."""
    return 128 if rows >= 256 else min(64, max(_SMALLEST_TILE, next_power_of_2(rows)))


def lookup(rows: int, bits: int, head_dim: int, *, token_scales: bool = False, float32: bool = False) -> DecodeConfig:
    """The configuration for `rows` packed rows, numbers of `bits` bits, the larger head_dim; q in float32 or not."""
    if INTERPRET:
        return INTERPRETER
    tile = tile_rows(rows)
    key_rows = 16 if tile == 16 else 64 if tile <= 64 else 128
    key_dim = next(d for d in (64, 128, 256) if head_dim <= d)
    config = _TABLE[key_rows, 16 if bits >= 16 else 8, key_dim]
    if bits == 32:  # float32 takes twice the shared memory
        config = replace(config, block_n=max(16, config.block_n // 2), num_stages=2)
    elif float32:  # registers: codes become float32 numbers
        config = replace(config, block_n=max(16, config.block_n // 4))
    if token_scales:  # 128 keys of e4m3 spilled before codes were read in pairs; now they would fit, not timed
        config = replace(config, block_n=max(16, config.block_n // 2))
    return config


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device; a small number in the interpreter, so that short tests have several splits."""
    if device.type != "cuda":
        return _PROCESSORS_OF_INTERPRETER
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _small_shared_memory(device: torch.device) -> bool:
    """Whether a program has less shared memory than on an A100 or H100 (99 KB on consumer cards)."""
    if device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    limits = triton.runtime.driver.active.utils.get_device_properties(index)
    return limits["max_shared_mem"] < _SHARED_OF_LARGE_CARDS


def fitted(config: DecodeConfig, device: torch.device) -> DecodeConfig:
    """The configuration with fewer stages, and one program a processor, where shared memory is small."""
    return replace(config, num_stages=2, per_sm=1) if _small_shared_memory(device) else config


@functools.lru_cache(4096)
def automatic_splits(tiles: int, blocks: int, slots: int, min_blocks: int = 1) -> int:
    """Splits for `tiles` tiles of `blocks` blocks each on a machine that runs `slots` programs at once.

    Takes the split with the shortest time when every program costs its blocks plus a start and programs run in waves;
    the smallest one of equals. 8 tiles of 64 blocks on 264 slots -> 32 splits of 2 blocks.
    """
    best, best_cost = 1, float("inf")
    for splits in range(1, max(1, min(blocks // max(1, min_blocks), MOST_SPLITS)) + 1):
        each = -(-blocks // splits)
        used = -(-blocks // each) if each else 1
        waves = -(-tiles * used // slots)
        cost = waves * (each + _START)
        if used == splits and cost < best_cost:
            best, best_cost = splits, cost
    return best


def candidates(bits: int = 16) -> list[DecodeConfig]:
    """Alternatives for one query row a head at head_dim 128, worth timing on a GPU."""
    if bits >= 16:
        rows = [
            (64, 4, 3, 2), (64, 4, 4, 2), (64, 4, 2, 3), (64, 4, 3, 3), (64, 4, 3, 4), (32, 4, 4, 4), (32, 2, 4, 4),
            (128, 4, 2, 2), (128, 4, 3, 1), (128, 8, 3, 1), (64, 4, 5, 1), (64, 8, 5, 1), (64, 2, 3, 2), (64, 8, 3, 2),
        ]  # fmt: skip
    else:
        rows = [
            (128, 4, 3, 2), (128, 4, 4, 2), (128, 4, 2, 3), (64, 4, 4, 3), (64, 4, 4, 4), (128, 8, 3, 2),
            (256, 8, 3, 1), (64, 2, 4, 4),
        ]  # fmt: skip
    found = [DecodeConfig(*row) for row in rows]
    first = found[0]
    return [*found, replace(first, fused=False), replace(first, min_blocks=2)]
