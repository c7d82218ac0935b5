"""Try the switches of the Hopper FP8 forward on this GPU: each is checked, then all that passed are timed interleaved.

    python3 -m gpu_accel.flash_attention3.hopper_fp8_tune --head-dim 128 --seqlen 8192

Nothing is written: the winners belong in `hopper_fp8.forward_config`. Times are without quantising, beside torch's
cuDNN attention in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_accel.errors import HardwareError
from gpu_accel.flash_attention3 import hopper_fp8
from gpu_accel.flash_attention3.reference_fp8 import fp8_attention_reference
from gpu_accel.flash_attention3.tune_fp8 import HIDDEN, TOKENS, inputs

BOUND = 1.15  # times the error of the recipe in plain torch, against float64
SWITCHES: dict[str, dict] = {
    "as chosen": {},
    "maxima under P V": {"under": 0},
    "half of softmax under P V": {"under": 1},
    "softmax under P V": {"under": 2},
    "each wait at its product": {"ahead": False},
    "named barriers": {"named": True},
    "4 stages": {"stages": 4},
    "2 stages": {"stages": 2},
    "no ping-pong": {"ping_pong": False},
    "8 blocks in the tensor cores": {"two_level": False},
    "v_scale in the exponents": {"fold": True},
    "both": {"two_level": False, "fold": True},
    "queue": {"dynamic": True},
    "growth 1.75": {"growth": 1.75},
}


def candidates(head_dim: int, *, causal: bool, seqlen: int) -> dict[str, hopper_fp8.Fp8ForwardConfig]:
    """The configurations to try, without repetitions; head_dim 256 has room for two stages and one kind of sum."""
    chosen = hopper_fp8.forward_config(head_dim, causal=causal, seqlen_k=seqlen)
    found: dict[str, hopper_fp8.Fp8ForwardConfig] = {}
    for name, change in SWITCHES.items():
        if head_dim > 128 and set(change) & {"two_level", "stages"}:
            continue
        config = replace(chosen, **change)
        if config not in found.values():
            found[name] = config
    return found


def run(tensors: tuple, o: torch.Tensor, causal: bool, config: hopper_fp8.Fp8ForwardConfig) -> torch.Tensor:
    return hopper_fp8.forward(
        *tensors, o, q_block=128, k_block=128, softmax_scale=o.shape[-1] ** -0.5, window_right=0 if causal else -1,
        config=config,
    )  # fmt: skip


def error_ratio(head_dim: int, causal: bool, config: hopper_fp8.Fp8ForwardConfig) -> float:
    """Error against float64 over that of the recipe in plain torch, the worse of two shapes; inf if lse is wrong."""
    worst = 0.0
    for batch, heads, seqlen in ((3, 8, 1024), (1, 2, 1337)):
        tensors = inputs(batch, heads, seqlen, head_dim, seed=seqlen)
        o = torch.full((batch, heads, seqlen, head_dim), float("nan"), dtype=torch.bfloat16, device="cuda")
        lse = run(tensors, o, causal, config)
        options = {"v_transposed": True, "causal": causal}
        truth, lse_truth = fp8_attention_reference(*tensors, quantize_p=False, dtype=torch.float64, **options)
        twin, _ = fp8_attention_reference(*tensors, **options)
        error = (o.double() - truth).norm() / (twin.to(o.dtype).double() - truth).norm()
        lse_error = (lse.double() - lse_truth).abs().max().item()
        worst = max(worst, error.item() if lse_error < 1e-2 and torch.isfinite(error) else float("inf"))
    return worst


def main(arguments: list[str] | None = None) -> int:
    from gpu_accel.workbench.timing import compare

    parser = argparse.ArgumentParser(prog="python3 -m gpu_accel.flash_attention3.hopper_fp8_tune", description=__doc__)
    parser.add_argument("--head-dim", type=int, choices=(64, 128, 256), default=128)
    parser.add_argument("--seqlen", type=int, action="append", help="16384 tokens in all (default: 2048, 8192)")
    parser.add_argument("--seconds", type=float, default=0.2, help="time per length and mask")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise HardwareError("these kernels run on compute capability 9.0 (H100, H200)")
    dim, heads = options.head_dim, HIDDEN // options.head_dim
    for causal in (False, True):
        good = {}
        for name, config in candidates(dim, causal=causal, seqlen=8192).items():
            ratio = error_ratio(dim, causal, config)
            print(f"  {name}: error {ratio:.2f} of the recipe's in plain torch", file=sys.stderr)
            if ratio <= BOUND:
                good[name] = config
        for seqlen in options.seqlen or (2048, 8192):
            batch = TOKENS // seqlen
            tensors = inputs(batch, heads, seqlen, dim, seed=1)
            q, k, v = (torch.randn(batch, heads, seqlen, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            o = torch.empty_like(q)

            def cudnn(q=q, k=k, v=v, causal=causal):
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return scaled_dot_product_attention(q, k, v, is_causal=causal)

            calls = {n: [lambda t=tensors, o=o, m=causal, c=c: run(t, o, m, c)] for n, c in good.items()}
            times = compare({"cudnn-bf16": [cudnn], **calls}, seconds=options.seconds)
            flops = 4.0 * batch * heads * seqlen * seqlen * dim * (0.5 if causal else 1.0)
            rates = {n: flops / t.median / 1e9 for n, t in times.items() if t.ok}
            for name, rate in sorted(rates.items(), key=lambda x: -x[1]):
                ratio = rate / rates.get("cudnn-bf16", float("nan"))
                print(f"{dim} {'causal' if causal else 'full'} {seqlen}: {rate:6.0f} TFLOP/s ({ratio:.2f})  {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
