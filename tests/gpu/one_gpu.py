"""Ranks that share one GPU: tests of symmetric memory where there are fewer GPUs than ranks.

    GPU_ACCEL_RANKS_SHARE_A_GPU=1 python -m pytest tests/gpu/test_ring_attention.py -k "2] or 4]"

What is real: a process a rank, memory that all of them have mapped, flags that streams write and wait for, the kernels
and their order. What is not: copies go from the GPU to itself, and processes take turns on it by time slices, so no
link is tried and no time means anything. NCCL refuses two ranks on one GPU; what it would carry goes over gloo and
through the host, which orders more than NCCL does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_accel.ring_attention import SymmetricTransport, TorchTransport
from gpu_accel.ring_attention.transport import Pending, PointToPoint

VARIABLE = "GPU_ACCEL_RANKS_SHARE_A_GPU"


def shared(ranks: int) -> bool:
    """Whether so many ranks are to share GPUs: they outnumber them, and whoever runs the tests wants it."""
    return 0 < torch.cuda.device_count() < ranks and os.environ.get(VARIABLE) == "1"


def why_not(ranks: int) -> str:
    """Why so many ranks cannot run here, or nothing."""
    there = torch.cuda.device_count()
    return "" if there >= ranks or shared(ranks) else f"needs {ranks} GPUs, there are {there} ({VARIABLE}=1 shares one)"


def card(rank: int) -> str:
    """The GPU of a rank."""
    return f"cuda:{rank % torch.cuda.device_count()}"


def start(rank: int, ranks: int, port: int) -> None:
    """Joins the group: over NCCL, or gloo where ranks share a GPU."""
    if shared(ranks):
        # torch's own word for tests like these; multicast wants a GPU a rank
        os.environ.update(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(card(rank))
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    torch.distributed.init_process_group("gloo" if shared(ranks) else "nccl", store=store, rank=rank, world_size=ranks)


class _ThroughTheHost(TorchTransport):
    """Messages of GPU tensors over gloo."""

    def transfer(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Pending:
        landed = [(torch.empty(x.shape, dtype=x.dtype), source) for x, source in receives]
        pending = super().transfer([(x.detach().cpu(), to) for x, to in sends], landed)

        def arrive() -> None:
            pending.wait()
            for (x, _), (found, _) in zip(receives, landed, strict=True):
                x.copy_(found)

        return Pending(arrive)

    def all_gather(self, x: Tensor, ranks: Sequence[int] | None = None) -> Pending:
        return PointToPoint.all_gather(self, x, ranks) if x.is_cuda else super().all_gather(x, ranks)


class _SymmetricOverGloo(_ThroughTheHost, SymmetricTransport):
    carrier = "gloo"


def make_transport(kind: str, ranks: int, *, timeout: float = 600.0) -> TorchTransport:
    """`symmetric`, or `nccl` (gloo where ranks share a GPU). Ranks agree on a statement once, as over NCCL."""
    own, plain = (_SymmetricOverGloo, _ThroughTheHost) if shared(ranks) else (SymmetricTransport, TorchTransport)
    return (own if kind == "symmetric" else plain)(timeout=timeout, check="first")
