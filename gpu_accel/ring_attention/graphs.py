"""A step as a CUDA graph: both passes of a ring, or a whole step of training, that nobody has to issue.

    step = capture_step(lambda: both_passes(q, k, v, do), transport)      all ranks together
    q.copy_(...); results = step()                                        again and again, with what is in q, k, v now

A ring of short shards takes the host about as long to issue as the GPUs to run, and a rank whose host is late makes all
of them wait. A graph is issued in one call. What differs from a capture by hand (`torch.cuda.graph` around a call that
has been made before, which is right, too):

    lanes      the halves of the heads on two streams are worth it from shorter shards on, since they cost no issuing
    counters   kernels that draw tiles share one counter a stream, in place of a new one filled by a kernel each
    watching   waits for other ranks are watched in a replay as they are outside: a lost rank is an error, no hang
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.gluon_launch import counters_of_a_graph
from gpu_accel.ring_attention import lanes
from gpu_accel.ring_attention.transport import TorchTransport


class CapturedStep:
    """What `capture_step` returns. `result`: what the function returned, in memory that every replay writes anew."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Any, transport: TorchTransport | None, kept: Any) -> None:
        """`kept`: whatever holds memory that the graph reads and does not own."""
        self.graph, self.result = graph, result
        self._transport, self._kept = transport, kept

    def __call__(self) -> Any:
        """Replay on the current stream. All ranks do, in the same order.

        Raises:
            CommunicationError: another rank was lost before.
        """
        if self._transport is None:
            self.graph.replay()
        else:
            self._transport.replay(self.graph)
        return self.result


def capture_step(
    function: Callable[[], Any], transport: TorchTransport | None = None, *, warmup: int = 2
) -> CapturedStep:
    """A CUDA graph of what `function` does on this rank's GPU. All ranks call it together.

    Args:
        function: takes nothing, reads tensors that stay where they are (it is kept, and with it what it refers to), and
            returns tensors in any nest; forward, autograd and an optimizer may be part of it. It must not wait for the
            GPU (no `.item()`, no check_finite).
        transport: through which its attention talks to other ranks; None: it does not.
        warmup: how often it is called before, at least once: what it does then is done.

    Raises:
        InvalidInputError: no function, or a number of calls that is none. UnsupportedError: a transport whose messages
        the host carries (gloo, simulated ranks). HardwareError: no CUDA GPU.
    """
    _check(function, transport, warmup)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    kept: dict = {}
    with lanes.in_a_graph():
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(warmup):
                function()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        watched = nullcontext() if transport is None else transport.captured()
        with watched, counters_of_a_graph(kept), torch.cuda.graph(graph):
            result = function()
    return CapturedStep(graph, result, transport, (function, kept))


def _check(function: object, transport: object, warmup: object) -> None:
    if not callable(function):
        raise InvalidInputError(f"function must be one that takes nothing, got {shown(function)}")
    if type(warmup) is not int or warmup < 1:
        raise InvalidInputError(f"warmup must be a whole number of at least 1, got {shown(warmup)}")
    if not torch.cuda.is_available():
        raise HardwareError("a CUDA graph needs a CUDA GPU: call the function as it is")
    if transport is not None and (not isinstance(transport, TorchTransport) or transport.name == "gloo"):
        raise UnsupportedError("what the host carries cannot be part of a CUDA graph: use NCCL or symmetric memory")
