"""The `error` experiment: does the error grow as more ranks take part?

Each schedule runs on N simulated ranks of one process, forward and backward, with 16-bit inputs and float32 partial
results, and is compared with float64 attention of the same inputs. Metrics: the relative error (2-norms) of o, dq, dk
and dv. The yardstick is plain torch in the same dtype, on one device.

A widely read report (github.com/zhuzilin/ring-flash-attention, issue 42) found gradients that get worse with N, because
results of every step were rounded to 16 bits before they were merged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention.simulate import simulate_attention
from gpu_accel.testing import QKV, make_qkv, random_like, relative_error, yardstick_attention
from gpu_accel.testing.truth import yardstick_attention_backward
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload

RANKS = (1, 2, 3, 4, 8)
SCHEDULES = ("kv_ring", "q_ring", "allgather", "ulysses", "usp")
NAMES = ("o_error", "dq_error", "dk_error", "dv_error")
FACTOR = 2.0
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def list_cases(settings: Settings) -> list[Case]:
    """One shape, causal, over numbers of ranks.

    Raises:
        InvalidInputError: a --shape that attention does not take.
    """
    shape = (
        {"batch": 1, "seqlen": 8192, "heads": 8, "heads_kv": 4, "head_dim": 128}
        if settings.on_gpu
        else {"batch": 1, "seqlen": 112, "heads": 2, "heads_kv": 1, "head_dim": 32}
    )
    shapes = [_given(shape, one) for one in settings.shapes] or [shape]
    dtype = settings.precision if settings.precision in _DTYPES else "bf16"
    ranks = RANKS[1:4:2] if settings.quick else RANKS
    rest = {"causal": True, "dtype": dtype, "input": settings.input}
    return [{**shape, **rest, "ranks": n} for shape in shapes for n in ranks]


def _given(usual: Mapping[str, int], shape: Mapping[str, int]) -> dict[str, int]:
    """A --shape, with what it does not say as usual; as many key heads as heads, unless it says how many."""
    if "heads" in shape:
        shape = {"heads_kv": shape["heads"], **shape}
    made = {name: shape.get(name, size) for name, size in usual.items()}
    if made["heads"] % made["heads_kv"]:
        raise InvalidInputError(f"heads ({made['heads']}) must be a multiple of heads_kv ({made['heads_kv']})")
    if made["head_dim"] % 8:
        raise InvalidInputError(f"head_dim must be a multiple of 8, got {made['head_dim']}")
    return made


def build(case: Case, settings: Settings) -> Workload:
    """Every schedule that has a backward."""
    judge = _Judge(case, settings.device)
    return Workload(implementations=[_implementation(name, judge) for name in SCHEDULES])


class _Judge:
    """Results of one case; keeps the truth of the last seed, which does not depend on the number of ranks."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.run = functools.lru_cache(maxsize=2)(self._run)

    def inputs(self, seed: int) -> tuple[QKV, Tensor]:
        return _inputs(_shape(self.case), seed, self.device)

    def _run(self, schedule: str, seed: int) -> tuple[float, ...]:
        qkv, do = self.inputs(seed)
        backend = "auto" if self.device == "cuda" else "reference"
        o, _, *grads = simulate_attention(
            *qkv, do=do, ranks=int(self.case["ranks"]), schedule=schedule, causal=True, backend=backend
        )
        exact, _ = _truth(_shape(self.case), seed, self.device)
        return tuple(relative_error(x, e) for x, e in zip((o, *grads), exact, strict=True))

    def check(self, schedule: str, seed: int) -> Check:
        """The worst of the four, each against twice its own yardstick."""
        found = self.run(schedule, seed)
        _, rulers = _truth(_shape(self.case), seed, self.device)
        shares = [error / (FACTOR * ruler) for error, ruler in zip(found, rulers, strict=True)]
        return Check(max(shares), 1.0, "the largest relative error of o, dq, dk, dv, in units of its bound")


def _shape(case: Case) -> tuple[tuple[str, object], ...]:
    return tuple((name, case[name]) for name in ("batch", "seqlen", "heads", "heads_kv", "head_dim", "dtype"))


def _inputs(shape: tuple, seed: int, device: str) -> tuple[QKV, Tensor]:
    s = dict(shape)
    qkv = make_qkv(
        batch=s["batch"], seqlen_q=s["seqlen"], heads=s["heads"], heads_kv=s["heads_kv"], head_dim=s["head_dim"],
        dtype=_DTYPES[s["dtype"]], device=device, seed=seed,
    )  # fmt: skip
    return qkv, random_like(qkv.q, seed=seed + 1_000_003)


@functools.lru_cache(maxsize=1)
def _truth(shape: tuple, seed: int, device: str) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    """(o, dq, dk, dv) in float64, and the relative errors of torch in the dtype of the inputs."""
    qkv, do = _inputs(shape, seed, device)
    exact = (attention_truth(*qkv, causal=True)[0], *attention_truth_backward(do, *qkv, causal=True))
    ruler = (
        yardstick_attention(*qkv, causal=True)[0],
        *yardstick_attention_backward(do, *qkv, causal=True),
    )
    return exact, tuple(relative_error(x, e) for x, e in zip(ruler, exact, strict=True))


def _implementation(schedule: str, judge: _Judge) -> Implementation:
    def values(seed: int) -> dict[str, tuple[float, str]]:
        return {name: (error, "1") for name, error in zip(NAMES, judge.run(schedule, seed), strict=True)}

    return Implementation(
        name=schedule,
        role="ours",
        check=lambda seed: judge.check(schedule, seed),
        values=values,
        note="zigzag shards, simulated in one process, float32 partial results",
    )
