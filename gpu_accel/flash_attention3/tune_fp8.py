"""Choose tiles for FP8 attention on this GPU: every candidate is checked, then all that passed are timed interleaved.

    python3 -m gpu_accel.flash_attention3.tune_fp8 --out gpu_accel/flash_attention3/tuned/fp8_sm90.toml

A candidate that is wrong is never timed: its output on fresh random tensors, written over NaN, is compared with
`fp8_attention_reference` on the same fp8 tensors. The rows it writes name the winner's rate, card and date. The kernel
itself never searches.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

import torch

from gpu_accel.errors import HardwareError
from gpu_accel.flash_attention3 import portable_fp8
from gpu_accel.flash_attention3.fp8 import fp8_block_quantize
from gpu_accel.flash_attention3.portable_fp8 import Fp8Config
from gpu_accel.flash_attention3.reference_fp8 import fp8_attention_reference

# Of the largest output. Probabilities near a rounding boundary fall to the other side (2**-4 of one of them) when the
# scores differ in their last bits, which Hopper's 14-bit sums make common; wrong tiles err by about the output itself.
BOUND = 0.03
TOKENS = 16384
HIDDEN = 2048


def inputs(batch: int, heads: int, seqlen: int, head_dim: int, seed: int) -> tuple[torch.Tensor, ...]:
    """q8, k8, transposed v8 and their scales of random tensors with blocks of very different size."""
    source = torch.Generator(device="cuda").manual_seed(seed)

    def draw() -> torch.Tensor:
        x = torch.randn(batch, heads, seqlen, head_dim, device="cuda", generator=source)
        size = torch.rand(batch, heads, -(-seqlen // 128), 1, device="cuda", generator=source) * 1.5 + 0.25
        return (x * size.repeat_interleave(128, 2)[:, :, :seqlen]).to(torch.bfloat16)

    q8, qs = fp8_block_quantize(draw())
    k8, ks = fp8_block_quantize(draw())
    v8, vs = fp8_block_quantize(draw(), transpose=True)
    return q8, k8, v8, qs, ks, vs


def call(tensors: tuple[torch.Tensor, ...], o: torch.Tensor, causal: bool, config: Fp8Config) -> torch.Tensor:
    """One launch of one candidate into `o`; returns lse."""
    return portable_fp8.forward(
        *tensors, o, q_block=128, k_block=128, softmax_scale=o.shape[-1] ** -0.5, window_right=0 if causal else -1,
        config=config,
    )  # fmt: skip


def check(config: Fp8Config, head_dim: int, causal: bool, seed: int) -> tuple[float, float]:
    """(largest error relative to the largest output, largest error of lse) over two shapes, one of them odd."""
    worst, worst_lse = 0.0, 0.0
    for batch, heads, seqlen in ((2, 3, 1024), (1, 2, 1337)):
        tensors = inputs(batch, heads, seqlen, head_dim, seed)
        o = torch.full((batch, heads, seqlen, head_dim), float("nan"), dtype=torch.bfloat16, device="cuda")
        lse = call(tensors, o, causal, config)
        truth, lse_truth = fp8_attention_reference(
            *tensors, v_transposed=True, causal=causal, block_n=config.block_n, dtype=torch.float64
        )
        error = ((o.double() - truth).abs().max() / truth.abs().max()).item()
        lse_error = (lse.double() - lse_truth).abs().max().item()
        worst = max(worst, error if error == error else float("inf"))
        worst_lse = max(worst_lse, lse_error if lse_error == lse_error else float("inf"))
    return worst, worst_lse


def tune(
    head_dim: int, causal: bool, *, seqlen: int, seconds: float, two_level: bool = True
) -> list[tuple[float, Fp8Config]]:
    """[(TFLOP/s, config)] of the correct candidates, best first; wrong and failing ones are reported."""
    from gpu_accel.workbench.timing import compare

    heads, batch = HIDDEN // head_dim, TOKENS // seqlen
    flops = 4.0 * batch * heads * seqlen * seqlen * head_dim * (0.5 if causal else 1.0)
    tensors = [inputs(batch, heads, seqlen, head_dim, seed) for seed in (1, 2)]
    o = torch.empty(batch, heads, seqlen, head_dim, dtype=torch.bfloat16, device="cuda")
    names, calls = {}, {}
    for candidate in portable_fp8.candidates(head_dim):
        config = Fp8Config(
            candidate.block_m, candidate.block_n, candidate.num_warps, candidate.num_stages, two_level=two_level
        )
        try:
            error, lse_error = check(config, head_dim, causal, seed=len(names))
        except Exception as e:  # a candidate may exceed shared memory, or the compiler may refuse it
            print(f"  {config}: cannot run: {type(e).__name__}: {str(e)[:120]}", file=sys.stderr)
            continue
        if error > BOUND or lse_error > 1e-2:
            print(f"  {config}: WRONG: error {error:.2g} (bound {BOUND}), lse {lse_error:.2g}", file=sys.stderr)
            continue
        names[str(config)] = config
        calls[str(config)] = [lambda t=t, c=config: call(t, o, causal, c) for t in tensors]
    if not calls:
        return []
    samples = compare(calls, seconds=seconds)
    rates = sorted(((flops / s.median / 1e9, name) for name, s in samples.items() if s.ok), reverse=True)
    for rate, name in rates:
        print(f"  {rate:7.1f} TFLOP/s  {name}", file=sys.stderr)
    return [(rate, names[name]) for rate, name in rates]


def row(head_dim: int, causal: bool, config: Fp8Config, measured: str, card: str) -> str:
    """One [[config]] table of the TOML file."""
    lines = [
        "[[config]]",
        f"head_dim = {head_dim}",
        f"causal = {str(causal).lower()}",
        f"block_m = {config.block_m}",
        f"block_n = {config.block_n}",
        f"num_warps = {config.num_warps}",
        f"num_stages = {config.num_stages}",
        f'measured = "{measured}"',
        f'date = "{datetime.date.today().isoformat()}"',
        f'card = "{card}"',
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m gpu_accel.flash_attention3.tune_fp8", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="TOML file to write")
    parser.add_argument("--seqlen", type=int, default=8192, help="length to time at, with 16384 tokens in all")
    parser.add_argument("--seconds", type=float, default=0.3, help="time per candidate")
    parser.add_argument("--head-dim", type=int, choices=portable_fp8.BUCKETS, action="append", help="default: all")
    parser.add_argument(
        "--tensor-core-sums", action="store_true", help="also time the less accurate sums (never written)"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise HardwareError("tuning needs a CUDA device")
    card = torch.cuda.get_device_name()
    rows = []
    for head_dim in options.head_dim or portable_fp8.BUCKETS:
        for causal in (False, True):
            print(f"head_dim {head_dim}, {'causal' if causal else 'full'}, seqlen {options.seqlen}", file=sys.stderr)
            if options.tensor_core_sums:
                tune(head_dim, causal, seqlen=options.seqlen, seconds=options.seconds, two_level=False)
            rates = tune(head_dim, causal, seqlen=options.seqlen, seconds=options.seconds)
            if not rates:
                print("  nothing passed: the old row stays", file=sys.stderr)
                rows.append(row(head_dim, causal, portable_fp8.table()[head_dim, causal], "no candidate passed", card))
                continue
            best, config = rates[0]
            others = f", next {rates[1][0]:.0f}" if len(rates) > 1 else ""
            measured = f"{best:.0f} TFLOP/s at seqlen {options.seqlen} of {len(rates)} correct candidates{others}"
            rows.append(row(head_dim, causal, config, measured, card))
    head = (
        "# FP8 attention forward: tiles and warps per head_dim bucket, without the time of quantising.\n"
        "# Written by python3 -m gpu_accel.flash_attention3.tune_fp8; candidates were checked before they were timed.\n"
    )
    options.out.write_text(head + "\n" + "\n\n".join(rows) + "\n")
    print(f"wrote {options.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
