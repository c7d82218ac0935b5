"""What a step in a CUDA graph refuses, and when lanes are worth it there; graphs themselves need a GPU."""

from __future__ import annotations

import weakref
from unittest.mock import MagicMock

import pytest
import torch

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import gluon_launch
from gpu_accel.ring_attention import LocalTransport, capture_step, lanes
from gpu_accel.ring_attention.transport import World


def test_what_is_no_step_is_refused(monkeypatch):
    for wrong in (None, torch.zeros(2)):
        with pytest.raises(InvalidInputError, match="function"):
            capture_step(wrong)
    for wrong in (0, 1.0, True, "2"):
        with pytest.raises(InvalidInputError, match="warmup"):
            capture_step(lambda: None, warmup=wrong)
    if not torch.cuda.is_available():
        with pytest.raises(HardwareError, match="CUDA"):
            capture_step(lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for wrong in (LocalTransport(World(2), 0), "nccl"):
        with pytest.raises(UnsupportedError, match="NCCL or symmetric memory"):
            capture_step(lambda: None, wrong)


def test_in_a_graph_shorter_shards_are_in_lanes():
    """Two steps of 8k tokens and 32 heads: a host takes longer to issue them in lanes than a GPU gains."""
    rows, device = 32 * 8192, torch.device("cpu")  # counted as 132 multiprocessors
    assert lanes.long_enough(rows, 4, device) and not lanes.long_enough(rows, 2, device)
    with lanes.in_a_graph():
        assert lanes.long_enough(rows, 2, device) and not lanes.long_enough(rows // 2, 8, device)
    assert not lanes.long_enough(rows, 2, device)


def test_a_graph_has_one_counter_of_tiles_for_each_stream(monkeypatch):
    """Outside `counters_of_a_graph` every launch of a capture has its own."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: object())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    assert gluon_launch.tile_counter(device) is not gluon_launch.tile_counter(device)
    kept: dict = {}
    with gluon_launch.counters_of_a_graph(kept):
        first = gluon_launch.tile_counter(device)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 8, raising=False)
        other = gluon_launch.tile_counter(device)
        assert gluon_launch.tile_counter(device) is other is not first
    assert list(kept.values()) == [first, other] and gluon_launch.tile_counter(device) is not other


def test_a_step_keeps_its_function(monkeypatch):
    """What the graph reads belongs to the function, which its maker may have dropped."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("current_stream", "Stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    calls = []

    def function():
        calls.append(lanes._graph)
        return len(calls)

    there = weakref.ref(function)
    step = capture_step(function, warmup=3)
    del function
    assert there() is not None and calls == [True] * 4 and not lanes._graph
    assert step() == 4 and step.graph.replay.call_count == 1
