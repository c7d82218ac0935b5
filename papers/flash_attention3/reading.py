"""A kernel that only reads: what attention over a cache cannot be faster than, under the same timing.

A copy of as many bytes is no ceiling for it: it leaves tens of megabytes of its results in the second-level cache,
whose way to memory nobody times. For the same reason the cache is clean before each timed call (`timing.compare`): a
flush by writing alone leaves as much for whoever reads to wait for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # words of each tensor in a step: with 256 threads, four 16-byte loads of each in flight
_PROGRAMS_OF_INTERPRETER = 3


@triton.jit
def read_words(a, b, out, words, BLOCK: tl.constexpr):
    """out[program] (int64) = sum of all words (int32) of a and b that this program reads."""
    program = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int64)
    for block in range(program, tl.cdiv(words, BLOCK), tl.num_programs(0)):
        at = tl.full((), BLOCK, tl.int64) * block + tl.arange(0, BLOCK)
        live = at < words
        # read once, so first to be evicted: up to 1 % faster on a clean L2, and what a ceiling is for is the fastest
        found += tl.load(a + at, mask=live, other=0, eviction_policy="evict_first")
        found += tl.load(b + at, mask=live, other=0, eviction_policy="evict_first")
    tl.store(out + program, tl.sum(found, 0))


def words_of(x: Tensor) -> Tensor:
    """A contiguous tensor as int32; its size in bytes must be a multiple of 4."""
    return x.view(-1).view(torch.int32)


def read_both(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Read two tensors of one size; `out` (int64) has one place for each program."""
    a, b = words_of(a), words_of(b)
    read_words[(len(out),)](a, b, out, len(a), BLOCK=_BLOCK, num_warps=8)


def programs(device: torch.device) -> int:
    """Four on every multiprocessor."""
    if device.type != "cuda":
        return _PROGRAMS_OF_INTERPRETER
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count
