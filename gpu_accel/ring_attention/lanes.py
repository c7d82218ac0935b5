"""Two lanes: the halves of the heads on two streams, so that the last tiles of one kernel run beside the next one's.

A step of a ring is one kernel of equal tiles, and their number is seldom a multiple of that of the multiprocessors: of
2048 tiles on 132 the last 68 leave half of them idle for a sixteenth of the time, in every step. Heads have nothing to
do with one another, so each half goes through its steps by itself. Programs of one lane that find no tile left make
room for those of the other:

    lane 0   step 0 |      step 1 |      step 2 |          for that tiles have to be drawn from a queue: a program that
    lane 1     step 0    |   step 1     |   step 2         starts late must do less
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import multiprocessors
from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.streams import on
from gpu_accel.ring_attention.transport import Transport

WANTED = True
_TILE = 128  # rows of a tile, of queries or of keys
_whatever = False
_graph = False
# Rounds of tiles in a lane and step, and in all steps: with fewer the host takes longer to issue a step, or both passes
# of a few steps, than the GPU to compute them. Two H200s, 8k tokens and 32 heads each (8 rounds, 2 steps), both passes:
# 6.23 ms with lanes where the host kept up and 6.6 to 8 where it did not, 6.31 to 6.34 without, every time.
_ROUNDS, _ROUNDS_IN_ALL = 6, 24


def fit(transport: Transport, call: Call) -> bool:
    """Whether keys come without the streams' help, and stay where they came until both lanes have read them: what is
    decoded from a wire of its own lies in memory that the first lane alone would give back."""
    return transport.pushes and call.overlap and call.wire is None


def useful(q: Tensor, k: Tensor, steps: int) -> bool:
    """Whether there are two halves, each with several rounds of tiles for all multiprocessors in each of the steps."""
    if not WANTED or not q.is_cuda or k.shape[2] % 2:
        return False
    if torch.cuda.is_current_stream_capturing() and not _graph:  # a capture by hand, without a warm-up in lanes
        return False
    return _whatever or long_enough(q.shape[0] * q.shape[2] * min(q.shape[1], k.shape[1]), steps, q.device)


def long_enough(rows: int, steps: int, device: torch.device) -> bool:
    """Whether lanes are useful for so many rows of all heads, in so many steps; in a graph nobody issues them."""
    round_of_both = 2 * multiprocessors(device) * _TILE
    return rows >= _ROUNDS * round_of_both and (_graph or rows * steps >= _ROUNDS_IN_ALL * round_of_both)


@contextmanager
def of_any_length(wanted: bool = True) -> Iterator[None]:
    """Short shards in lanes too, to check what long ones do."""
    global _whatever
    before, _whatever = _whatever, wanted
    try:
        yield
    finally:
        _whatever = before


@contextmanager
def in_a_graph(wanted: bool = True) -> Iterator[None]:
    """What is issued meanwhile is, or prepares, a CUDA graph (graphs.py)."""
    global _graph
    before, _graph = _graph, wanted
    try:
        yield
    finally:
        _graph = before


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of (batch, rows, heads, dim), by heads: views."""
    first, second = x.chunk(2, 2)
    return first, second


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class Lanes:
    """The current stream and another beside it, from now to `join`."""

    def __init__(self, device: torch.device) -> None:
        self.main = torch.cuda.current_stream(device.index)
        self.side, self._both = _streams(device)
        if torch.cuda.is_current_stream_capturing():  # a graph knows a stream from when on it follows one of its own
            self.side.wait_stream(self.main)

    def follow(self) -> None:
        """The other lane sees what the first has waited for, and what was written before this step's kernel."""
        self.side.wait_stream(self.main)

    def __iter__(self) -> Iterator[torch.cuda.Stream]:
        return iter((self.main, self.side))

    @contextmanager
    def both(self) -> Iterator[None]:
        """On a stream that waits for what has been issued on either: neither waits for the other."""
        self._both.wait_stream(self.main)
        self._both.wait_stream(self.side)
        with on(self._both):
            yield

    def join(self) -> None:
        self.main.wait_stream(self.side)
        self.main.wait_stream(self._both)
