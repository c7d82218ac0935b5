"""The experiment `energy`: joules per operation and per token, from the energy counter of the card.

    case       op       matmul (size x size x size, through torch), attention (forward, size tokens, 16 heads of 128);
                        wgmma, mma.sync: that instruction alone, by the kernels of `tensor-cores`, size is its n
               dtype    bf16, fp16, e4m3
               data     random, or zeros: what flips no bits draws less
               size
    metrics    energy_j [J]             of one call, above idle
               energy_gross_j [J]       with idle
               idle_w, power_w [W]      before, and in the window
               efficiency [TFLOP/J]     operations / energy_j
               efficiency_gross [TFLOP/J]  operations / energy_gross_j
               energy_per_token_j [J]   attention only: of its forward pass, for each token
               resolution_percent [%]   of energy_j, from the steps of the counter (see gpu_accel.hardware.energy)

A window lasts three seconds at least, whatever --seconds says (the counter moves every 100 ms), two with --quick.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_accel.hardware import attention_flops
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, SimpleExperiment, Workload

from . import matmul

WINDOW, QUICK_WINDOW = 3.0, 2.0  # seconds
HEADS, HEAD_DIM = 16, 128
_CASES = (
    ("matmul", "bf16", "random"),
    ("matmul", "bf16", "zeros"),
    ("matmul", "e4m3", "random"),
    ("attention", "bf16", "random"),
    ("attention", "e4m3", "random"),
)
_INSTRUCTIONS = {"wgmma": 256, "mma.sync": 8}  # and their columns


def list_cases(settings: Settings) -> list[Case]:
    """Products and attention of 8192, in two dtypes, zeros beside random numbers; two instructions, on a GPU alone."""
    size = {"matmul": 8192 if settings.on_gpu else 64, "attention": 8192 if settings.on_gpu else 48}
    kept = _CASES[::2] if settings.quick else _CASES
    found: list[Case] = [{"op": op, "dtype": dtype, "data": data, "size": size[op]} for op, dtype, data in kept]
    if not (settings.on_gpu and settings.quick):
        found += [{"op": op, "dtype": "fp16", "data": "random", "size": n} for op, n in _INSTRUCTIONS.items()]
    return found


def build(case: Case, settings: Settings) -> Workload:
    """One implementation a case: torch's product, or this library's attention beside torch's."""
    dtype, size = str(case["dtype"]), int(case["size"])
    if case["op"] in _INSTRUCTIONS:
        return _instruction(str(case["op"]), size, dtype, str(case["data"]), settings)
    if case["op"] == "matmul":
        flops, moved = matmul.work(dtype, size)
        call = lambda seed: matmul.prepared(  # noqa: E731
            dtype, size, seed, data=str(case["data"]), device=settings.device
        )
        check = lambda seed: matmul.check(dtype, size, seed, device=settings.device)  # noqa: E731
        # "ours" as the probe of this experiment: the card is what is measured, so a wrong product fails the run.
        probe = _implementation("torch", "ours", call, check, settings, flops=flops)
        return Workload(implementations=[probe], flops=flops, bytes_moved=moved)
    flops = float(attention_flops(batch=1, seqlen_q=size, heads=HEADS, head_dim=HEAD_DIM))
    made = [
        _implementation(
            name, role, lambda seed, f=forward: _prepared(f, size, seed, settings.device),
            lambda seed, f=forward: _checked(f, size, seed, settings.device, eight_bit=dtype == "e4m3"),
            settings, flops=flops, tokens=size,
        )
        for name, role, forward in _forwards(dtype)
    ]  # fmt: skip
    return Workload(implementations=made, flops=flops)


def _instruction(op: str, n: int, dtype: str, data: str, settings: Settings) -> Workload:
    """A matrix instruction on all SMs, operands in shared memory (wgmma) or registers (mma.sync)."""
    from gpu_accel.hardware.microbenchmarks import launch, tensor

    a = "shared" if op == "wgmma" else "registers"
    shape = tensor.Shape(n=n, dtype=dtype, a=a, instruction=op)
    if why := launch.unavailable(settings.device):
        return Workload(implementations=[Implementation(name="kernel", role="ours", unavailable=why)])
    flops = tensor.load_flops(shape)
    check = lambda seed: tensor.measure(shape, data, seed).check  # noqa: E731
    call = lambda seed: tensor.load(shape, data, seed)  # noqa: E731
    probe = _implementation("kernel", "ours", call, check, settings, flops=flops)
    return Workload(implementations=[probe], flops=flops)


def _implementation(
    name: str,
    role: str,
    call: Callable[[int], Callable[[], object]],
    check: Callable[[int], Check],
    settings: Settings,
    *,
    flops: float,
    tokens: int = 0,
) -> Implementation:
    def values(seed: int) -> dict[str, tuple[float, str]]:
        from gpu_accel.hardware.energy import measure_energy

        window = max(settings.seconds, QUICK_WINDOW if settings.quick else WINDOW)
        found = measure_energy(call(seed), seconds=window)
        known = {
            "energy_j": (found.joules_per_call, "J"),
            "energy_gross_j": (found.gross_joules_per_call, "J"),
            "idle_w": (found.idle_w, "W"),
            "power_w": (found.power_w, "W"),
            "efficiency": (flops / found.joules_per_call / 1e12, "TFLOP/J"),
            "efficiency_gross": (flops / found.gross_joules_per_call / 1e12, "TFLOP/J"),
            "resolution_percent": (100 * found.resolution, "%"),
        }
        return known | ({"energy_per_token_j": (found.per(tokens), "J")} if tokens else {})

    return Implementation(name=name, role=role, check=check, values=values if settings.on_gpu else None)


def _forwards(dtype: str) -> list[tuple[str, str, Callable]]:
    from torch.nn.functional import scaled_dot_product_attention

    from gpu_accel.flash_attention3 import flash_attn_func, fp8_attention

    if dtype == "e4m3":
        return [("gpu-accel", "ours", lambda q, k, v: fp8_attention(q, k, v, layout="bshd"))]

    def torchs(q, k, v):
        return scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    return [("gpu-accel", "ours", flash_attn_func), ("torch", "peer", torchs)]


def _inputs(size: int, seed: int, device: str) -> tuple[torch.Tensor, ...]:
    from gpu_accel.testing import make_qkv

    qkv = make_qkv(batch=1, seqlen_q=size, heads=HEADS if device == "cuda" else 1, head_dim=HEAD_DIM, seed=seed,
                   dtype=torch.bfloat16, device=device)  # fmt: skip
    return tuple(qkv)


def _prepared(forward: Callable, size: int, seed: int, device: str) -> Callable[[], object]:
    q, k, v = _inputs(size, seed, device)
    return lambda: forward(q, k, v)


def _checked(forward: Callable, size: int, seed: int, device: str, *, eight_bit: bool) -> Check:
    """In root mean squares of the output, as for products; FP8 keeps 3 bits of a number."""
    from gpu_accel.testing import attention_truth

    q, k, v = _inputs(size, seed, device)
    truth, _ = attention_truth(q, k, v)
    error = (forward(q, k, v).double() - truth).abs().max() / truth.square().mean().sqrt()
    return Check(error.item(), 1.0 if eight_bit else 0.06, "max_abs / rms")


EXPERIMENT = SimpleExperiment(
    name="energy",
    title="Joules per operation and per token, from the energy counter",
    list_cases=list_cases,
    build_case=build,
)
