"""The `forward` experiment in FP8: our kernels with and without the time of quantising, next to bf16 attention.

    hopper, portable     q, k, v are in FP8 already (as from a cache, or a fused projection): the kernel alone
    ...+quantize         bf16 in, bf16 out: Hadamard, scales and rounding of q, k and v are timed too
    ...-bf16             bf16 attention of the same shape: what FP8 has to be better than

torch offers no FP8 attention on GPUs of compute capability 9.0, so the rivals are 16 bits wide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gpu_accel.flash_attention3 import fp8, hopper_fp8
from gpu_accel.flash_attention3.reference import attention_truth
from gpu_accel.flash_attention3.reference_fp8 import dequantize, fp8_attention_reference
from gpu_accel.testing import QKV
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Timed, Workload

from . import attention
from .judging import Judge, judge_output, poison_free_memory
from .peers import contenders, problem_of

RIVALS = ("hopper", "portable", "sdpa-flash", "sdpa-cudnn", "sdpa-math")
OURS = ("hopper", "portable")
SIGNS = 0  # seed of the random signs of the Hadamard matrix


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """q, k (batch, heads, seqlen, head_dim) and v transposed, in e4m3, with one scale per 128 rows."""

    q8: Tensor
    k8: Tensor
    vt8: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor

    @classmethod
    def of(cls, qkv: QKV) -> Quantized:
        """Quantise (batch, seqlen, heads, head_dim) tensors as `fp8_attention` does."""
        q, k, v = (t.transpose(1, 2) for t in qkv)
        q8, q_scale = fp8.fp8_block_quantize(q, hadamard=True, seed=SIGNS)
        k8, k_scale = fp8.fp8_block_quantize(k, hadamard=True, seed=SIGNS)
        vt8, v_scale = fp8.fp8_block_quantize(v, transpose=True)
        return cls(q8=q8, k8=k8, vt8=vt8, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def attend(self, causal: bool, backend: str) -> Tensor:
        """Our kernel: o (batch, seqlen, heads, head_dim) in bfloat16."""
        return fp8.fp8_attention_quantized(
            self.q8, self.k8, self.vt8, self.q_scale, self.k_scale, self.v_scale, v_transposed=True, causal=causal,
            layout="bshd", backend=backend,
        )  # fmt: skip

    def exact_values(self) -> QKV:
        """What the numbers stand for, in float64, (batch, seqlen, heads, head_dim). Not q itself: q times M."""
        keys = self.k8.shape[2]
        v8 = self.vt8[..., :keys].view(torch.uint8).transpose(-1, -2).view(self.vt8.dtype)
        parts = ((self.q8, self.q_scale), (self.k8, self.k_scale), (v8, self.v_scale))
        return QKV(*(dequantize(x, scale, fp8.BLOCK, torch.float64).transpose(1, 2) for x, scale in parts))

    def emulated(self, causal: bool) -> Tensor:
        """The kernel's arithmetic in plain torch: o (batch, seqlen, heads, head_dim) in bfloat16."""
        o, _ = fp8_attention_reference(
            self.q8, self.k8, self.vt8, self.q_scale, self.k_scale, self.v_scale, v_transposed=True, causal=causal
        )
        return o.transpose(1, 2).to(torch.bfloat16)


class Fp8Judge(Judge):
    """Compares FP8 results with float64; the yardstick is the same recipe in plain torch.

    `sixteen` judges the 16-bit rivals on the same inputs, so its truth is ours too.
    """

    def __init__(self, case: Case, device: str, sixteen: Judge) -> None:
        super().__init__(case, device)
        self.sixteen = sixteen

    def kernel(self, seed: int, backend: str) -> Check:
        """The kernel alone: against float64 attention of the numbers that it is given, so quantising is no excuse."""
        with torch.no_grad():
            given = Quantized.of(self.inputs(seed))
            return self.kernel_on(seed, given, lambda: given.attend(self.causal, backend))

    def kernel_on(self, seed: int, given: Quantized, call: Callable[[], Tensor]) -> Check:
        """The same on numbers that are there already, those of the seed; `call` is the kernel applied to them."""

        def compute() -> Iterator[tuple[Tensor, Tensor]]:
            yield attention_truth(*given.exact_values(), causal=self.causal)[0], given.emulated(self.causal)

        with torch.no_grad():
            ((truth, ruler),) = self.expected("kernel", seed, compute)
            poison_free_memory([ruler])
            return judge_output(call(), truth, ruler)

    def whole(self, seed: int, run: Callable[[QKV], Tensor]) -> Check:
        """Quantising and the kernel: against float64 attention of the 16-bit inputs."""

        def compute() -> Iterator[tuple[Tensor, Tensor]]:
            yield self.sixteen.expected_output(seed)[0], Quantized.of(self.inputs(seed)).emulated(self.causal)

        with torch.no_grad():
            ((truth, ruler),) = self.expected("whole", seed, compute)
            poison_free_memory([ruler])
            return judge_output(run(self.inputs(seed)), truth, ruler)


def build(case: Case, settings: Settings) -> Workload:
    """The FP8 forward of one shape and its 16-bit rivals."""
    case_16 = {**case, "dtype": "bf16"}
    judge_16 = Judge(case_16, settings.device)
    judge = Fp8Judge(case, settings.device, judge_16)
    causal = bool(case["causal"])
    problem = problem_of(case, settings.device)
    refused = {
        "hopper": hopper_fp8.refuse(problem.device_type, problem.capability, problem.head_dim, fp8.BLOCK, False) or "",
        "portable": fp8.refuse(problem) or "",
    }

    def attend(qkv: QKV, backend: str) -> Tensor:
        return fp8.fp8_attention(*qkv, causal=causal, layout="bshd", seed=SIGNS, backend=backend)

    def make_kernel(seed: int, backend: str) -> Callable[[], object]:
        given = Quantized.of(judge.inputs(seed))

        def call() -> Tensor:
            return given.attend(causal, backend)

        def verify() -> Check:
            fresh = Quantized.of(judge.inputs(seed))
            names = [field.name for field in fields(Quantized)]
            attention.refuse_changes([getattr(fresh, n) for n in names], [getattr(given, n) for n in names])
            return judge.kernel_on(seed, given, call)

        return Timed(call, verify)

    def make_whole(seed: int, backend: str) -> Callable[[], object]:
        qkv = judge.inputs(seed)

        def call() -> Tensor:
            return attend(qkv, backend)

        def as_timed(fresh: QKV) -> Tensor:
            attention.refuse_changes(fresh, qkv)
            return call()

        def negated(fresh: QKV) -> Tensor:  # o is linear in v
            qkv.v.neg_()
            return -call()

        return Timed(call, lambda: attention.worse(judge.whole(seed, as_timed), judge.whole(seed, negated)))

    kernels = []
    for name in OURS:
        kernels += [
            Implementation(
                name=name,
                role="ours",
                unavailable=refused[name],
                check=functools.partial(judge.kernel, backend=name),
                make=functools.partial(make_kernel, backend=name),
                note="q, k, v quantised beforehand: e4m3, a scale per 128 rows, Hadamard on q and k; bfloat16 out",
            ),
            Implementation(
                name=f"{name}+quantize",
                role="ours",
                unavailable=refused[name],
                check=lambda seed, name=name: judge.whole(seed, functools.partial(attend, backend=name)),
                make=functools.partial(make_whole, backend=name),
                note="bfloat16 in and out; quantising q, k and v is part of the time",
            ),
        ]
    rivals = [
        attention.forward_implementation(contender, judge_16, name=f"{contender.name}-bf16")
        for contender in contenders(case_16, settings)
        if contender.name in RIVALS
    ]
    return attention.workload(case, kernels + rivals)
