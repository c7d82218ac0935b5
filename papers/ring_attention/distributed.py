"""Experiments that need one process a GPU: `scaling`, `overlap`, `memory` and `schedules`.

    gpu-accel run ring scaling --nproc 4          # torchrun, then the same command on every rank; rank 0 keeps records

Every rank goes through the same cases and implementations in the same order, so nothing here may depend on a clock: the
number of samples is fixed, and a check is the worst over all ranks. A time is the slowest rank's between two events,
after an all-gather that lines the ranks up. All implementations of a case take turns, each after a rest of twice the
time of the call before it: a card at its power limit keeps the clock that a long call has left behind, and whoever came
after one GPU with the whole sequence took up to a tenth longer. The times of one that fails its check are thrown away.

Results are checked twice: o of the very shape that is timed, on 64 rows of each rank against float64 attention to all
keys, and (with backward) gradients of a short sequence, whole. Where keys travel in 8 bits these are the keys which
arrive (arrival.py), and the bound stays. Inputs are drawn whole from the seed on every rank and then sharded. On a CPU
the ranks talk by gloo, and nothing is timed.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.reference import attention_truth_backward
from gpu_accel.ring_attention import lanes
from gpu_accel.ring_attention.attention import distributed_attention, gather_sequence
from gpu_accel.ring_attention.graphs import capture_step
from gpu_accel.ring_attention.layouts import Layout, make_layout
from gpu_accel.ring_attention.replay import Replay
from gpu_accel.ring_attention.transport import TorchTransport, Transport
from gpu_accel.testing import make_qkv, random_like, relative_error, yardstick_attention, yardstick_attention_backward
from gpu_accel.workbench.experiment import Case, Check, Implementation, Sampled, Settings, Workload

from .arrival import WIRE, arrived

PEERS = ("torch-context-parallel", "torch-context-parallel-alltoall", "ulysses-cudnn")
SCALING = ("kv_ring", "kv_ring-graph", "kv_ring-nccl", "ulysses", "allgather", "usp", *PEERS, "one-gpu")
OVERLAP = ("kv_ring", "kv_ring-graph", "kv_ring-waiting", "kv_ring-nccl", "kv_ring-nccl-waiting", "kv_ring-fp8",
           "kv_ring-nccl-fp8", "compute-only", "compute-only-graph", "kernels-only")  # fmt: skip
MEMORY = ("kv_ring", "allgather", "ulysses", "torch-context-parallel")
SCHEDULES = ("kv_ring", "kv_ring-nccl", "q_ring", "allgather", "ulysses", "usp", "mesh", "double_ring", "concentric",
             "helper")  # fmt: skip
COMPUTING = {"compute-only": "hops", "compute-only-graph": "hops", "kernels-only": "hops and merges"}
GRAPH = "-graph"  # of names: captured once and replayed, so that no host is late
FP8 = "-fp8"  # of names: keys travel as WIRE
REST, MOST_REST = 2.0, 0.25  # before a timed call: times that of the call before, and at most so many seconds
MILLION, ROWS, SHORT = 1 << 20, 64, 512
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def world_size() -> int:
    """Ranks of this run: those of torchrun, or one."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or not 1 <= int(text) <= 2**16:
        raise InvalidInputError(f"WORLD_SIZE is {shown(text, 40)}: torchrun sets it to the number of processes")
    return int(text)


# -- cases


def _case(settings: Settings, *, seqlen: int, heads: int, heads_kv: int, direction: str, scaling: str = "") -> Case:
    dtype = settings.precision if settings.precision in _DTYPES else "bf16"
    if not settings.on_gpu:  # the same code on small shapes, by gloo
        seqlen, heads, heads_kv = 24 * world_size(), 4, min(heads_kv, 2)
    made: Case = {
        "gpus": world_size(), "batch": 1, "seqlen": seqlen, "heads": heads, "heads_kv": heads_kv,
        "head_dim": 128 if settings.on_gpu else 16, "causal": True, "pass": direction, "dtype": dtype,
        "input": settings.input,
    }  # fmt: skip
    return made | ({"scaling": scaling} if scaling else {})


def _distinct(cases: list[Case]) -> list[Case]:
    return [case for i, case in enumerate(cases) if case not in cases[:i]]


def scaling_cases(settings: Settings) -> list[Case]:
    """Strong: 32k to 128k tokens in all. Weak: 8k and 32k a GPU. 32 and 8 key heads, without and with backward.

    The most telling ones first, so that a run that is cut short has them.
    """
    sizes = [(32768, 32), (65536, 32), (32768, 8), (65536, 8), (131072, 32)]
    wanted = [("strong", n, kv) for n, kv in sizes]
    weak = [world_size() * c for c in (8192, 32768)]
    wanted[1:1] = [("weak", n, 32) for n in weak if n not in [size for size, _ in sizes]]
    wanted = wanted[: 1 if settings.quick else None]
    return _distinct(
        [_case(settings, seqlen=n, heads=32, heads_kv=kv, direction=d, scaling=kind)
         for kind, n, kv in wanted for d in ("forward", "both")]
    )  # fmt: skip


def overlap_cases(settings: Settings) -> list[Case]:
    """8k tokens a GPU, also with backward, then 4k, 16k and 32k."""
    wanted = [(8192, 32, "forward"), (8192, 32, "both"), (8192, 8, "forward")]
    wanted += [(c, 32, "forward") for c in (4096, 16384, 32768)]
    return _distinct(
        [_case(settings, seqlen=world_size() * c, heads=32, heads_kv=kv, direction=d)
         for c, kv, d in wanted[: 1 if settings.quick else None]]
    )  # fmt: skip


def memory_cases(settings: Settings) -> list[Case]:
    """256k and 64k tokens, and a million, which is timed too; both passes first."""
    lengths = (262144, MILLION, 65536)
    return _distinct(
        [_case(settings, seqlen=n, heads=8, heads_kv=2, direction=d)
         for d in ("both", "forward") for n in ((65536,) if settings.quick else lengths)]
    )  # fmt: skip


def schedule_cases(settings: Settings) -> list[Case]:
    """32k tokens."""
    return _distinct(
        [_case(settings, seqlen=32768, heads=32, heads_kv=32, direction=d) for d in ("forward", "both")]
    )  # fmt: skip


def scaling_names(case: Case) -> tuple[str, ...]:
    """Who takes part: from 64k tokens on the fastest only."""
    seqlen, both = int(case["seqlen"]), case["pass"] == "both"
    if seqlen <= 32768:
        return SCALING
    return ("kv_ring", "ulysses", "torch-context-parallel", *(() if both else ("ulysses-cudnn",)), "one-gpu")


def memory_names(case: Case) -> tuple[str, ...]:
    """Who takes part: of a million tokens only the ring, whose memory they are about."""
    return MEMORY if int(case["seqlen"]) < MILLION else ("kv_ring",)


# -- the ranks


@functools.cache
def _meet(on_gpu: bool) -> str:
    """Why the ranks have no process group, or nothing; tried once, for it may take until a timeout."""
    import torch.distributed as dist

    if dist.is_initialized():
        return ""
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    except (ValueError, RuntimeError) as error:  # a port that is taken, variables that torchrun would have set
        return " ".join(str(error).split()).split(" Exception raised from")[0][:300]
    import atexit

    atexit.register(dist.destroy_process_group)
    return ""


def _join(on_gpu: bool) -> None:
    if why := _meet(on_gpu):
        raise HardwareError(f"the {world_size()} processes cannot meet ({why}): start them with --nproc, or torchrun")


@functools.cache
def _transport(kind: str, on_gpu: bool) -> Transport:
    """ "nccl" (gloo on a CPU) or "symmetric"."""
    _join(on_gpu)
    if kind == "symmetric" and on_gpu:
        from gpu_accel.ring_attention.symmetric import choose_transport

        found = choose_transport()
        if found.name != "symmetric":
            raise HardwareError("these GPUs cannot read one another's memory: see the implementations named -nccl")
        return found
    return TorchTransport()


def _worst(value: float, settings: Settings) -> float:
    """The largest of all ranks' values, the same on all."""
    device = torch.device("cuda") if settings.on_gpu else torch.device("cpu")
    transport = _transport("nccl", settings.on_gpu)
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    found = transport.all_gather(mine).wait()
    return float(found.max()) if not found.isnan().any() else float("nan")


# -- implementations


def build(
    case: Case, settings: Settings, *, names: Callable[[Case], tuple[str, ...]] | tuple[str, ...], memory: bool = False
) -> Workload:
    """The contenders named; on one process all but `one-gpu` say what to start instead."""
    run = _Run(case, settings)
    names = names if isinstance(names, tuple) else names(case)
    chosen = [n for n in names if (not settings.only or n in settings.only) and n not in settings.skip]
    race = _Race(run, [n for n in chosen if not _unavailable(n, run)])
    found = [_implementation(name, run, race, memory) for name in names]
    work = 4.0 * int(case["seqlen"]) ** 2 * int(case["heads"]) * int(case["head_dim"]) / 2
    return Workload(implementations=found, flops=work * (3.5 if case["pass"] == "both" else 1.0))


def _schedule(name: str) -> str:
    return name.removesuffix(FP8).removesuffix("-waiting").removesuffix("-nccl").removesuffix(GRAPH)


def _wire(name: str) -> torch.dtype | None:
    return WIRE if name.endswith(FP8) else None


def _unavailable(name: str, run: _Run) -> str:
    if run.ranks == 1 and name != "one-gpu":
        return f"needs several processes: the same with --nproc 4{'' if run.settings.on_gpu else ' --device cpu'}"
    if (name in PEERS or name.endswith(GRAPH)) and not run.settings.on_gpu:
        return "needs GPUs"
    if run.both and (name in ("ulysses-cudnn", "kernels-only") or _wire(name)):
        return "forward only"
    if name in ("double_ring", "concentric") and (run.ranks < 4 or run.ranks % 2):
        return f"two {'nested rings' if name == 'double_ring' else 'teams'} need 4, 6, 8, ... ranks"
    return ""


def _implementation(name: str, run: _Run, race: _Race, memory: bool) -> Implementation:
    long = int(run.case["seqlen"]) >= MILLION  # of a million tokens it is worth knowing how long they take
    role = "peer" if name in PEERS else "reference" if name in ("one-gpu", *COMPUTING) else "ours"
    return Implementation(
        name=name,
        role=role,
        unavailable=_unavailable(name, run),
        check=lambda seed: run.check(name, seed),
        values=lambda seed: {
            **(run.memory(name) if memory else {}),
            **(race.times(name, seed) if long or not memory else {}),
        },
        note=run.describe(name),
    )


_GRADIENTS: dict[tuple, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}  # exact and by plain torch


class _Run:
    """One case on this rank."""

    def __init__(self, case: Case, settings: Settings) -> None:
        self.case, self.settings = case, settings
        self.ranks = world_size()
        self.both = case["pass"] == "both"
        self.dtype = _DTYPES[str(case["dtype"])]

        self._kept: dict[tuple, Any] = {}
        self._peaks: dict[str, int] = {}

    def keep(self, key: tuple, make: Callable[[], Any]) -> Any:
        """What several implementations need, made once."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def describe(self, name: str) -> str:
        """What its records say of it."""
        if name == "one-gpu":
            return "the whole sequence on each GPU"
        if name in PEERS:
            return "cuDNN attention over NCCL"
        network = "symmetric memory" if self.over_symmetric(name) else "NCCL" if self.settings.on_gpu else "gloo"
        keys = f", keys travel as {str(wire).removeprefix('torch.')}" if (wire := _wire(name)) else ""
        return f"{self.layout(name, self.ranks).name} shards over {network}{keys}"

    def over_symmetric(self, name: str) -> bool:
        ring = name.startswith(("kv_ring", "q_ring", "double_ring", "concentric")) and "-nccl" not in name
        return ring and self.settings.on_gpu

    def layout(self, name: str, seqlen: int) -> Layout:
        kind = "contiguous" if name in ("helper", "ulysses", "ulysses-cudnn") else "zigzag"
        return make_layout(kind, seqlen=seqlen, ranks=self.ranks)

    def whole(self, seqlen: int, seed: int) -> list[Tensor]:
        """q, k, v and the gradient of o, the same on every rank."""
        return self.keep(("whole", seqlen, seed), lambda: self._whole(seqlen, seed))

    def _whole(self, seqlen: int, seed: int) -> list[Tensor]:
        qkv = make_qkv(
            batch=1, seqlen_q=seqlen, heads=int(self.case["heads"]), heads_kv=int(self.case["heads_kv"]),
            head_dim=int(self.case["head_dim"]), dtype=self.dtype, device=self.settings.device, seed=seed,
        )  # fmt: skip
        return [*qkv, random_like(qkv.q, seed=seed + 1_000_003)]

    def call(self, name: str, tensors: list[Tensor], seqlen: int) -> Callable[[], tuple[Tensor, ...]]:
        """What is run: o of this rank, and with backward the gradients of its shards."""
        if name.endswith(GRAPH):
            plain = name.removesuffix(GRAPH)
            return _captured(self.call(plain, tensors, seqlen), None if name in COMPUTING else self.transport(name))
        schedule = _schedule(name)
        if name == "one-gpu":
            attend = _one_gpu
        elif name.startswith("torch-context-parallel"):
            return _context_parallel(tensors, self.both, "alltoall" if name.endswith("alltoall") else "allgather")
        elif name == "ulysses-cudnn":
            attend = _ulysses_cudnn
        elif name in COMPUTING:
            return _compute_only(tensors, self.layout(name, seqlen), self.transport(name).rank, self.both, name)
        else:
            options: dict[str, Any] = {"inner": self.ranks // 2} if name == "double_ring" else {}
            if name == "concentric":
                options = {"mesh": (2, self.ranks // 2)}
            attend = functools.partial(
                _ours, layout=self.layout(name, seqlen), transport=self.transport(name), schedule=schedule,
                overlap=not name.endswith("-waiting"), wire=_wire(name), **options,
            )  # fmt: skip
        q, k, v, do = tensors
        if not self.both:
            return lambda: (attend(q, k, v),)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def both() -> tuple[Tensor, ...]:
            o = attend(*leaves)
            return o.detach(), *torch.autograd.grad(o, leaves, do)

        return both

    def transport(self, name: str) -> Transport:
        return _transport("symmetric" if self.over_symmetric(name) else "nccl", self.settings.on_gpu)

    def shards(self, name: str, seqlen: int, seed: int) -> list[Tensor]:
        whole = self.whole(seqlen, seed)
        if name == "one-gpu":
            return whole
        layout, rank = self.layout(name, seqlen), _transport("nccl", self.settings.on_gpu).rank
        return self.keep(("shards", layout.name, seqlen, seed), lambda: [layout.shard(x, rank) for x in whole])

    def check(self, name: str, seed: int) -> Check:
        """The worst share of its bound, over ranks, of o on some rows at full size, and of gradients when short."""
        if name in COMPUTING:
            return Check(0.0, 1.0, f"nothing to compare for the kv_ring without its {COMPUTING[name]}")
        seqlen = int(self.case["seqlen"])
        call = self.call(name, self.shards(name, seqlen, seed), seqlen)
        self._peaks[name], found = self._watched(name, call)
        worst = self._rows(name, found, seqlen, seed)
        if self.both and name not in PEERS:
            short = min(seqlen, SHORT * self.ranks)
            worst = max(worst, self._gradients(name, short, seed))
        if self.ranks > 1:
            worst = _worst(worst, self.settings)
        return Check(worst, 1.0, "relative error of o (64 rows a rank) and of short gradients, in units of its bound")

    def _rows(self, name: str, o: Tensor, seqlen: int, seed: int) -> float:
        """Rows of o against float64 attention to all keys, in units of twice the error of plain torch."""
        kind = "whole" if name == "one-gpu" else self.layout(name, seqlen).name
        key = ("rows", kind, _wire(name), seqlen, seed)
        rows, exact, theirs = self.keep(key, lambda: self._exact_rows(name, seqlen, seed))
        ours = relative_error(o[:, rows.to(o.device)], exact)
        return ours / (2 * theirs + torch.finfo(self.dtype).eps / 2)

    def _exact_rows(self, name: str, seqlen: int, seed: int) -> tuple[Tensor, Tensor, float]:
        """ROWS rows of the shard, o of them in float64, and the error that plain torch makes on a few of them."""
        q, k, v, _ = self.whole(seqlen, seed)
        positions = torch.arange(seqlen)
        if name != "one-gpu":
            layout, rank = self.layout(name, seqlen), _transport("nccl", self.settings.on_gpu).rank
            positions = layout.positions(rank)
            if wire := _wire(name):
                k, v = (arrived(x, layout, rank, wire) for x in (k, v))
        rows = (positions >= 0).nonzero()[:, 0]
        rows = rows[torch.linspace(0, len(rows) - 1, min(ROWS, len(rows))).long()]
        at = positions[rows].to(q.device)
        exact = torch.empty((1, len(rows), *v.shape[2:]), dtype=torch.float64, device=q.device)
        exact = exact.repeat_interleave(q.shape[2] // v.shape[2], 2)
        hidden = torch.arange(seqlen, device=q.device) > at[:, None]
        for head in range(q.shape[2]):
            other = head // (q.shape[2] // k.shape[2])
            scores = q[0, at, head].double() @ k[0, :, other].double().T * q.shape[-1] ** -0.5
            exact[0, :, head] = torch.softmax(scores.masked_fill(hidden, float("-inf")), 1) @ v[0, :, other].double()
        few = list(range(0, len(rows), max(1, len(rows) // 8)))
        rulers = [yardstick_attention(q[:, at[i] : at[i] + 1], k[:, : at[i] + 1], v[:, : at[i] + 1])[0] for i in few]
        return rows, exact, relative_error(torch.cat(rulers, 1), exact[:, few])

    def _gradients(self, name: str, seqlen: int, seed: int) -> float:
        q, k, *_ = self.shards(name, int(self.case["seqlen"]), seed)
        with lanes.in_a_graph(name.endswith(GRAPH)):
            timed_in_lanes = lanes.useful(q, k, self.ranks)
        with lanes.of_any_length(timed_in_lanes):  # what is timed is what is checked
            found = self.call(name, self.shards(name, seqlen, seed), seqlen)()[1:]
        if name != "one-gpu":
            cut, transport = self.layout(name, seqlen), _transport("nccl", self.settings.on_gpu)
            found = tuple(gather_sequence(x.contiguous(), cut, transport) for x in found)
        key = (seqlen, self.case["heads"], self.case["heads_kv"], self.case["head_dim"], self.dtype, seed)
        if key not in _GRADIENTS:
            _GRADIENTS.clear()  # those of the case before
            _GRADIENTS[key] = self._exact_gradients(seqlen, seed)
        exact, ruler = _GRADIENTS[key]
        return max(
            relative_error(x, e) / (2 * relative_error(r, e)) for x, e, r in zip(found, exact, ruler, strict=True)
        )

    def _exact_gradients(self, seqlen: int, seed: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        q, k, v, do = self.whole(seqlen, seed)
        both = (attention_truth_backward, yardstick_attention_backward)
        exact, ruler = (function(do, q, k, v, causal=True) for function in both)
        return exact, ruler

    def _watched(self, name: str, call: Callable[[], tuple[Tensor, ...]]) -> tuple[int, Tensor]:
        """Peak bytes of a call beyond the shards, its results included, and o.

        Those of the caching allocator; symmetric memory lies outside it and is added.
        """
        if not self.settings.on_gpu:
            return 0, call()[0]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found: list[Tensor] = []
        extra = 0
        if self.over_symmetric(name):
            extra = self.transport(name).bytes_used(lambda: found.append(call()[0]))
        else:
            found.append(call()[0])
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before + extra, found[0]

    def memory(self, name: str) -> dict[str, tuple[float, str]]:
        """Peak bytes of the call that was checked, the largest of all ranks."""
        if not self.settings.on_gpu:
            return {}
        return {"peak_bytes": (_worst(self._peaks[name], self.settings), "bytes")}


@dataclass(frozen=True)
class _Within:
    """A call inside a context, which is entered before the clock starts."""

    call: Callable[[], tuple[Tensor, ...]]
    around: Callable[[], Any] = nullcontext

    def __call__(self) -> tuple[Tensor, ...]:
        with self.around():
            return self.call()


class _Race:
    """The times of all implementations of a case, taken in turns when the first of them is asked for."""

    def __init__(self, run: _Run, names: list[str]) -> None:
        self.run, self.names = run, names
        self.samples: dict[int, dict[str, list[float]]] = {}

    def times(self, name: str, seed: int) -> dict[str, Sampled]:
        """Times of the slowest rank."""
        run = self.run
        if not run.settings.on_gpu:
            return {}
        if seed not in self.samples:
            self.samples[seed] = self._take(seed)
        seqlen, case = int(run.case["seqlen"]), run.case
        flops = 2.0 * seqlen**2 * int(case["heads"]) * int(case["head_dim"]) * (3.5 if run.both else 1.0)
        if name not in self.samples[seed]:
            raise UnsupportedError(f"{name} does not run here")
        method = f"events, slowest rank, implementations in turns, each after {REST:g} times the call before of rest"
        timing = {"method": method, "l2": "warm", "mode": "burst"}
        share = 1 if name == "one-gpu" else run.ranks  # rates are per GPU
        samples = tuple(self.samples[seed][name])
        found = {"time": Sampled(samples=samples, unit="ms", work={"flops": flops / share}, timing=timing)}
        # of the same rounds: what part of the time is computing, what part attention without merges, and the
        # efficiency against one GPU with the same work
        bases = {"computing": "compute-only", "attending": "kernels-only", "efficiency": "one-gpu"}
        for metric, base in bases.items():
            parts = run.ranks if base == "one-gpu" else 1
            if name.endswith(GRAPH) and metric == "computing":
                base += GRAPH  # in a graph short shards are in lanes, with their hops and without
            others = self.samples[seed].get(base)
            if others is not None and base != name and name != "kernels-only":
                shares = tuple(other / parts / mine for other, mine in zip(others, samples, strict=True))
                found[metric] = Sampled(samples=shares, unit="1", timing=timing)
        return found

    def _take(self, seed: int) -> dict[str, list[float]]:
        seqlen, calls = int(self.run.case["seqlen"]), {}
        for name in self.names:
            failed = 0.0
            try:
                calls[name] = self.run.call(name, self.run.shards(name, seqlen, seed), seqlen)
                for _ in range(2 if seqlen < MILLION else 0):  # of a million the call that was checked is enough
                    calls[name]()
            except Exception:  # whatever a rival raises: its check says why
                failed = 1.0
            if self._worst(failed):
                calls.pop(name, None)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        order, same = list(calls), random.Random(seqlen)  # on all ranks
        before = 0.0
        gc.collect()  # and not while a rank launches what the others wait for
        gc.disable()
        for _ in range(10 if seqlen <= 32768 else 6 if seqlen <= 65536 else 4 if seqlen < MILLION else 2):
            same.shuffle(order)  # nobody always comes after the one that heats the GPU most
            for name in order:
                time.sleep(min(MOST_REST, REST * before))
                samples[name].append(self._once(calls[name]))
                before = samples[name][-1] / 1e3
        gc.enable()
        return samples

    def _once(self, call: Callable[[], Any]) -> float:
        inside = call if isinstance(call, _Within) else _Within(call)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with inside.around():
            torch.cuda._sleep(6_000_000)  # about 3 ms: the host gets ahead
            self._line_up()
            start.record()
            inside.call()
            end.record()
        end.synchronize()
        return self._worst(start.elapsed_time(end))

    def _line_up(self) -> None:
        if self.run.ranks > 1:
            _transport("nccl", True).all_gather(torch.zeros(1, device="cuda")).wait()

    def _worst(self, value: float) -> float:
        return _worst(value, self.run.settings) if self.run.ranks > 1 else value


def _ours(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    return distributed_attention(q, k, v, causal=True, **settings)[0]


def _compute_only(
    tensors: list[Tensor], layout: Layout, rank: int, both: bool, name: str
) -> Callable[[], tuple[Tensor, ...]]:
    """The kernel calls and merges of this rank's ring, on its own keys: what is left when hops take no time.

    "kernels-only": the calls without their merges.
    """
    *qkv, do = tensors
    replay = Replay(*qkv, layout=layout, rank=rank, causal=True)
    if name == "kernels-only":
        return lambda: replay.kernels()[0]

    def call() -> tuple[Tensor, ...]:
        o, lse = replay.forward()
        return (o, replay.backward(do, o, lse)) if both else (o,)

    return call


def _captured(call: Callable[[], tuple[Tensor, ...]], transport: Any) -> Callable[[], tuple[Tensor, ...]]:
    """The same from a CUDA graph, which is made when it is called first."""
    made = functools.cache(lambda: capture_step(call, transport))
    return lambda: made()()


def _one_gpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from gpu_accel.flash_attention3 import flash_attn_func

    backend = "auto" if q.is_cuda else "reference"
    o = flash_attn_func(q, k, v, causal=True, backend=backend)
    assert isinstance(o, Tensor)
    return o


def _ulysses_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Ulysses by hand: one packed all-to-all, cuDNN attention to the whole sequence, one all-to-all back."""
    import torch.distributed as dist
    from torch.nn.attention import SDPBackend, sdpa_kernel

    n, (_, c, heads, dim), heads_kv = dist.get_world_size(), q.shape, k.shape[2]
    if heads_kv % n:
        raise UnsupportedError(f"{heads_kv} key heads do not divide among {n} ranks")
    packed = torch.cat([x.view(c, n, x.shape[2] // n, dim).transpose(0, 1) for x in (q, k, v)], 2)
    back = torch.empty_like(packed)
    dist.all_to_all_single(back, packed)
    back = back.view(1, n * c, -1, dim).transpose(1, 2)
    parts = back.split((heads // n, heads_kv // n, heads_kv // n), 1)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    o = o.transpose(1, 2).reshape(n, c, heads // n, dim).contiguous()
    out = torch.empty_like(o)
    dist.all_to_all_single(out, o)
    return out.transpose(0, 1).reshape(1, c, heads, dim)


def _context_parallel(tensors: list[Tensor], both: bool, rotate: str = "allgather") -> Callable[[], tuple[Tensor, ...]]:
    """torch's own, on shards that are cut as it cuts them: head and tail chunks, which are those of zigzag."""
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method
    except ImportError as error:
        raise UnsupportedError(f"this torch has no context_parallel: {error}") from error
    import torch.distributed as dist
    from torch.nn.attention import SDPBackend, sdpa_kernel

    on_gpu = tensors[0].is_cuda
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (ranks,))
    q, k, v, do = (x.transpose(1, 2).contiguous() for x in tensors)
    leaves = [x.detach().requires_grad_(both) for x in (q, k, v)]
    grouped = q.shape[1] != k.shape[1]

    def call() -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if on_gpu else SDPBackend.FLASH_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=grouped)
            grads = torch.autograd.grad(o, leaves, do) if both else ()
        return o.detach().transpose(1, 2), *(g.transpose(1, 2) for g in grads)

    def around() -> Any:
        set_rotate_method(rotate)
        # the shards are cut already: something small, so that the context has a buffer to cut
        nothing = torch.zeros(2 * ranks, device=tensors[0].device)
        return context_parallel(mesh, buffers=[nothing], buffer_seq_dims=[0], no_restore_buffers={nothing})

    return _Within(call, around)
