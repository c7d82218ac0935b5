"""Ranks that share one GPU: tests of symmetric memory where there are fewer GPUs than ranks.

    GPU_ACCEL_RANKS_SHARE_A_GPU=1 python -m pytest tests/gpu/test_ring_ranks.py

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


def collectives_through_the_host() -> None:
    """From here on torch.distributed's collectives of GPU tensors in this process go over gloo in the host's memory.

    Where they are called by these names, as FSDP2 does. `DTensor.full_tensor` is not: it ends in a C++ collective of
    gloo that reads a GPU's addresses on the host, and the process dies of it (SIGSEGV). `gathered` takes its place.
    """
    dist = torch.distributed
    # torch 2.13 has other names besides
    gathers = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
    scatters = [name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)]
    gather, reduce = getattr(dist, gathers[0]), dist.all_reduce

    def reduced(x: Tensor, op, group) -> Tensor:
        """In float32 where x has 16 bits, rounded once; a mean is a sum divided, gloo has none."""
        mean = op == dist.ReduceOp.AVG
        wide = x.detach().cpu().to(torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype, copy=True)
        reduce(wide, dist.ReduceOp.SUM if mean else op, group=group)
        return (wide / dist.get_world_size(group) if mean else wide).to(x.dtype)

    def all_gather(output_tensor, input_tensor, group=None, async_op=False):
        mine = input_tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        everything = torch.empty(mine.numel() * dist.get_world_size(group), dtype=torch.uint8)
        gather(everything, mine, group=group)
        output_tensor.copy_(everything.view(output_tensor.dtype).reshape(output_tensor.shape))
        return _Done() if async_op else None

    def reduce_scatter(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        begin = dist.get_rank(group) * output.numel()
        output.copy_(reduced(input, op, group).reshape(-1)[begin : begin + output.numel()].reshape(output.shape))
        return _Done() if async_op else None

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        tensor.copy_(reduced(tensor, op, group))
        return _Done() if async_op else None

    for name in gathers:
        setattr(dist, name, all_gather)
    for name in scatters:
        setattr(dist, name, reduce_scatter)
    dist.all_reduce = all_reduce


class _Done:
    """Work that is over."""

    def wait(self, *_: object) -> bool:
        return True


def gathered(t: Tensor) -> Tensor:
    """All of a DTensor that is cut evenly along its first dimension; any other tensor as it is. On all ranks."""
    part = getattr(t, "_local_tensor", None)
    if part is None:
        return t.detach().clone()
    out = part.new_empty(t.shape)
    torch.distributed.all_gather_into_tensor(out, getattr(part, "value", part).detach().contiguous())
    return out


def make_transport(kind: str, ranks: int, *, timeout: float = 600.0) -> TorchTransport:
    """`symmetric`, or `nccl` (gloo where ranks share a GPU). Ranks agree on a statement once, as over NCCL."""
    own, plain = (_SymmetricOverGloo, _ThroughTheHost) if shared(ranks) else (SymmetricTransport, TorchTransport)
    return (own if kind == "symmetric" else plain)(timeout=timeout, check="first")
