"""The `links` experiment: what a hop of a ring takes by itself, every GPU sending to the next and receiving.

    gpu-accel run ring links --nproc 2

    copy-engine          a pull out of symmetric memory, its flags included
    copy-engine-write    a push into symmetric memory, likewise
    nccl                 send and receive of NCCL (gloo on a CPU)

The time is the slowest rank's, from when all are in line; the rate is that of the bytes a GPU sends. The content that
arrives is compared with what was sent, every byte.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_accel.ring_attention.transport import Transport
from gpu_accel.workbench.experiment import Case, Check, Implementation, Sampled, Settings, Workload

from .distributed import _transport, _worst, world_size

WAYS = {
    "copy-engine": "a pull out of symmetric memory",
    "copy-engine-write": "a push into symmetric memory",
    "nccl": "send and receive",
}
MEGABYTES = (1, 4, 16, 64, 256)  # of 10^6 bytes
SAMPLES = 12


def list_cases(settings: Settings) -> list[Case]:
    """One size each."""
    sizes = MEGABYTES[-1:] if settings.quick else MEGABYTES if settings.on_gpu else MEGABYTES[:1]
    return [{"gpus": world_size(), "megabytes": size, "input": settings.input} for size in sizes]


def build(case: Case, settings: Settings) -> Workload:
    """All ways of a hop."""
    return Workload(implementations=[_implementation(name, case, settings) for name in WAYS])


def _implementation(name: str, case: Case, settings: Settings) -> Implementation:
    why = ""
    if world_size() == 1:
        why = f"needs several processes: the same with --nproc 2{'' if settings.on_gpu else ' --device cpu'}"
    elif name != "nccl" and not settings.on_gpu:
        why = "needs GPUs"
    hop = _Hop(name, case, settings)
    return Implementation(
        name=name, role="peer" if name == "nccl" else "ours", unavailable=why, check=hop.check, values=hop.times,
        note=WAYS[name],
    )  # fmt: skip


class _Hop:
    def __init__(self, name: str, case: Case, settings: Settings) -> None:
        self.name, self.settings, self.size = name, settings, int(case["megabytes"]) * 1_000_000

    def made(self) -> tuple[Transport, torch.Tensor, torch.Tensor, Callable[[], None]]:
        """The transport, what is sent, what arrives, and the hop."""
        transport = _transport("nccl" if self.name == "nccl" else "symmetric", self.settings.on_gpu)
        transport.agree(f"links {self.name} {self.size}")
        like = torch.empty(0, dtype=torch.uint8, device=self.settings.device)
        mine, theirs = transport.buffers(2, (self.size,), like)
        to, source = ((transport.rank + way) % transport.size for way in (1, -1))
        if self.name != "copy-engine-write":
            return transport, mine, theirs, lambda: transport.exchange(mine, theirs, to=to, source=source).wait()

        def write() -> None:
            mail = transport.mail()
            arriving = mail.expect(source, theirs)
            mail.send(to, [(mine, 0)], theirs)
            arriving.wait()
            mail.close()

        return transport, mine, theirs, write

    def check(self, seed: int) -> Check:
        """Bytes that are not what the neighbour sent."""
        transport, mine, theirs, hop = self.made()

        def content(rank: int) -> torch.Tensor:
            source = torch.Generator(device=self.settings.device).manual_seed(seed + rank)
            return torch.randint(256, mine.shape, dtype=torch.uint8, device=mine.device, generator=source)

        mine.copy_(content(transport.rank))
        theirs.fill_(0)
        hop()
        wrong = int((theirs != content((transport.rank - 1) % transport.size)).sum())
        return Check(_worst(float(wrong), self.settings), 0.0, "bytes that are not those sent, the worst rank")

    def times(self, seed: int) -> dict[str, Sampled]:
        """Slowest rank."""
        if not self.settings.on_gpu:
            return {}
        _, _, _, hop = self.made()
        samples = []
        for turn in range(SAMPLES + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(6_000_000)  # about 3 ms: the host gets ahead
            _transport("nccl", True).all_gather(torch.zeros(1, device="cuda")).wait()
            start.record()
            hop()
            end.record()
            end.synchronize()
            taken = _worst(start.elapsed_time(end), self.settings)
            samples += [taken] if turn >= 2 else []
        timing = {"method": "events, slowest rank, all ranks at once", "l2": "warm", "mode": "burst"}
        return {"time": Sampled(samples=tuple(samples), unit="ms", work={"bytes": float(self.size)}, timing=timing)}
