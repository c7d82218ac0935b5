"""Is a result right? Fresh inputs, poisoned memory for the outputs, every element against float64 truth.

The bound is twice the error that the same arithmetic in plain torch operations makes in the same dtype, plus half a
unit in the last place (see `gpu_accel.testing.errors`). Truth and yardstick are computed once for a case and seed, in
blocks of rows, so that no case is too long for them.

Gradients of rivals may err four times as much instead: torch's FlashAttention for CPUs adds up dk and dv over blocks of
queries and over grouped heads in 16 bits, and its math backend rounds every matrix, which is their choice of precision
and no wrong result. Ours are held to twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gpu_accel.flash_attention3.reference import attention_backward_reference, attention_truth
from gpu_accel.testing import QKV, compare, poison_, random_like, yardstick_attention, yardstick_attention_backward
from gpu_accel.testing.errors import Comparison
from gpu_accel.workbench.experiment import Case, Check

from . import inputs

GRADIENTS = ("dq", "dk", "dv")
FACTOR, RIVALS_FACTOR = 2.0, 4.0
Expected = tuple[tuple[Tensor, Tensor], ...]  # truth and yardstick, once for every tensor of a result


class Judge:
    """Compares results of one case with the truth; keeps the truth of the last seed."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.causal = bool(case["causal"])
        self._kept: dict[str, tuple[int, Expected]] = {}

    def inputs(self, seed: int) -> QKV:
        """q, k, v in (batch, seqlen, heads, head_dim), in fresh memory."""
        return inputs.make(self.case, seed, self.device)

    def expected(self, what: str, seed: int, compute: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> Expected:
        """Truth and yardstick of every tensor of a result, computed anew only when the seed is not the last one."""
        if self._kept.get(what, (None,))[0] != seed:
            self._kept.pop(what, None)  # gives its memory back before more is asked for
            self._kept[what] = seed, tuple(compute())
        return self._kept[what][1]

    def expected_output(self, seed: int) -> tuple[Tensor, Tensor]:
        """Truth and yardstick of o."""

        def compute() -> Iterable[tuple[Tensor, Tensor]]:
            qkv = self.inputs(seed)
            ruler, _ = yardstick_attention(*qkv, causal=self.causal, heads_at_once=True)
            yield attention_truth(*qkv, causal=self.causal)[0], ruler

        return self.expected("o", seed, compute)[0]

    def output_gradient(self, qkv: QKV, seed: int) -> Tensor:
        """What the backward pass starts from, shaped like q."""
        return random_like(qkv.q, seed=seed + 1_000_003)

    def forward(self, seed: int, run: Callable[[QKV], Tensor]) -> Check:
        """Run once and judge o, in (batch, seqlen, heads, head_dim)."""
        expected = self.expected_output(seed)
        qkv = self.inputs(seed)
        poison_free_memory([qkv.q])
        return judge_output(run(qkv), *expected)

    def backward(self, seed: int, run: Callable[[QKV, Tensor], Sequence[Tensor]], *, factor: float = FACTOR) -> Check:
        """Run once and judge dq, dk and dv, each in (batch, seqlen, heads, head_dim).

        They may err `factor` times as much as the yardstick.
        """

        def compute() -> Iterable[tuple[Tensor, Tensor]]:
            qkv = self.inputs(seed)
            do = self.output_gradient(qkv, seed)
            truth = attention_backward_reference(do, *qkv, causal=self.causal, dtype=torch.float64)
            ruler = yardstick_attention_backward(do, *qkv, causal=self.causal, heads_at_once=True)
            return zip(truth, ruler, strict=True)

        expected = self.expected("gradients", seed, compute)
        qkv = self.inputs(seed)
        poison_free_memory(qkv)
        found = run(qkv, self.output_gradient(qkv, seed))
        judged = zip(GRADIENTS, found, expected, strict=True)
        return as_check({name: compare(out, *wanted, factor=factor) for name, out, wanted in judged})


def judge_output(out: Tensor, truth: Tensor, ruler: Tensor) -> Check:
    """Judge o as it is, and once more with every row divided by its own size.

    First rows of causal attention are many times larger than its last ones, so one bound for all would let a last row
    be wholly wrong. Rows of o do not cancel to nothing, so their size is a fair measure; rows that see no key are left.
    """
    found = compare(out, truth, ruler)
    if not found.ok:
        return as_check({"o": found})
    size = truth.abs().amax(-1, keepdim=True)
    size = torch.where(size == 0, 1.0, size)
    floor = 0.5 * torch.finfo(out.dtype).eps
    scaled = compare(out.double() / size, truth / size, ruler.double() / size, floor=floor)
    return as_check({"o": found, "o / size of its row": scaled})


def as_check(found: dict[str, Comparison]) -> Check:
    """The worst of several comparisons, relative to its bound."""
    name, worst = max(found.items(), key=lambda item: _severity(item[1]))
    return Check(worst.error, worst.bound, f"max error of {name}" + (f": {worst.why}" if worst.why else ""))


def _severity(found: Comparison) -> float:
    if found.error != found.error:  # NaN is the worst
        return float("inf")
    return found.error / found.bound if found.bound else (float("inf") if found.error else 0.0)


def poison_free_memory(like: Sequence[Tensor]) -> None:
    """Leave poison in the free memory that outputs of these shapes are likely to be given next.

    torch's caching allocator hands a block just freed to the next request of its size, so an element that a kernel does
    not write shows up as poison.
    """
    blocks = [poison_(torch.empty(t.shape, dtype=t.dtype, device=t.device)) for t in like]
    del blocks
