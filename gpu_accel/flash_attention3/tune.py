"""Choose tiles for the plain-Triton attention kernels on this GPU: check every candidate, then time what passed.

    python3 -m gpu_accel.flash_attention3.tune --out gpu_accel/flash_attention3/tuned/sm90.toml

Candidates (`config.candidates`) are compiled in parallel processes into Triton's cache, checked against float64 on
fresh inputs with outputs poisoned by NaN, and timed interleaved. A candidate that is wrong is reported and never
chosen: compilers are wrong on some tiles. Rows written name rate, card and date; rows of other keys are kept.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gpu_accel.errors import HardwareError
from gpu_accel.flash_attention3 import config as configs
from gpu_accel.flash_attention3 import launch, portable_backward, portable_forward
from gpu_accel.flash_attention3.config import BUCKETS, PASSES, Config
from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward

TOKENS, HIDDEN = 16384, 2048
CHECKS = ((2, 640, 640, 4, 2), (1, 777, 1000, 2, 1))  # (batch, sq, sk, heads, heads_kv): whole blocks; odd, grouped
_PRODUCTS = {"forward": 2, "backward_dkdv": 4, "backward_dq": 3}  # matrix products of S x S x D each
Key = tuple[str, int, bool]


def head_dims(bucket: int) -> tuple[int, int]:
    """What a bucket is tuned with: its own size, and for 192 the usual 192 with 128 for v."""
    return bucket, 128 if bucket == 192 else bucket


def make(shape: tuple[int, ...], bucket: int, seed: int) -> tuple[Tensor, ...]:
    """q, k, v, do in bfloat16."""
    batch, sq, sk, heads, heads_kv = shape
    d, dv = head_dims(bucket)
    source = torch.Generator(device="cuda").manual_seed(seed)
    sizes = ((batch, sq, heads, d), (batch, sk, heads_kv, d), (batch, sk, heads_kv, dv), (batch, sq, heads, dv))
    return tuple(torch.randn(s, device="cuda", generator=source).to(torch.bfloat16) for s in sizes)


def timed_shape(bucket: int, seqlen: int) -> tuple[int, ...]:
    heads = max(1, HIDDEN // bucket)
    return max(1, TOKENS // seqlen), seqlen, seqlen, heads, heads


def run(pass_: str, tensors: tuple[Tensor, ...], causal: bool, config: Config, forward=None):
    """(o, lse) or the gradients that this pass makes, with `config` for this pass and the table for the others."""
    q, k, v, do = tensors
    call = {"softmax_scale": q.shape[-1] ** -0.5, "window_right": 0 if causal else -1}
    if pass_ == "forward":
        return portable_forward.forward(q, k, v, config=config, **call)
    o, lse = forward or portable_forward.forward(q, k, v, **call)
    mine = {"config_dkdv" if pass_ == "backward_dkdv" else "config_dq": config}
    dq, dk, dv = portable_backward.backward(do, q, k, v, o, lse, **mine, **call)
    return (dk, dv) if pass_ == "backward_dkdv" else (dq,)


def kernel_of(pass_: str, tensors, causal: bool, config: Config, forward=None, *, prepare: bool = False):
    """The launch of this pass, not yet made: (kernel, programs, arguments, options). `prepare` runs what it needs."""
    with launch.recording() as entries:
        run(pass_, tensors, causal, config, forward)
    name = f"attention_{pass_}"
    for entry in entries:
        if prepare and entry[0].__name__ == "attention_delta":
            launch.launch(*entry)
    return next(entry for entry in entries if entry[0].__name__ == name)


def compile_candidate(job: tuple[Key, Config, int]) -> str:
    """In a process of its own: compile one candidate for every shape that will be run. Returns why it failed, or ''."""
    (pass_, bucket, causal), config, seqlen = job
    try:
        for shape in (timed_shape(bucket, seqlen), *CHECKS):
            q, k, v, do = make(shape, bucket, 0)
            o, lse = torch.empty_like(do), torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda")
            kernel, _, arguments, options = kernel_of(pass_, (q, k, v, do), causal, config, (o, lse))
            kernel.warmup(*arguments, grid=(1,), **options)
    except Exception as error:  # out of shared memory, or the compiler refuses: not a candidate on this GPU
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return ""


def check(key: Key, config: Config, seed: int) -> tuple[bool, str]:
    """Compare with float64 at twice the error of plain torch operations; outputs start as NaN."""
    from gpu_accel.testing import error_and_bound, yardstick_attention, yardstick_attention_backward

    pass_, bucket, causal = key
    worst, ok = 0.0, True
    for shape in CHECKS:
        q, k, v, do = tensors = make(shape, bucket, seed)
        forward = None
        if pass_ != "forward":
            o, lse = attention_truth(q, k, v, causal=causal)
            forward = o.to(q.dtype), lse.float()
        torch.use_deterministic_algorithms(True)  # torch.empty fills with NaN
        try:
            results = run(pass_, tensors, causal, config, forward)
        finally:
            torch.use_deterministic_algorithms(False)
        if pass_ == "forward":
            truths = attention_truth(q, k, v, causal=causal)
            rulers = yardstick_attention(q, k, v, causal=causal)
        else:
            take = slice(1, 3) if pass_ == "backward_dkdv" else slice(0, 1)
            truths = attention_truth_backward(do, q, k, v, causal=causal)[take]
            rulers = yardstick_attention_backward(do, q, k, v, causal=causal)[take]
        for result, truth, ruler in zip(results, truths, rulers, strict=True):
            error, bound = error_and_bound(result, truth, ruler)
            ok = ok and error <= bound
            worst = max(worst, error / bound if error == error and bound else float("inf"))
    return ok, f"{worst:.2f} of the bound"


def tune(keys: list[Key], *, seqlen: int, seconds: float, jobs: int) -> dict[Key, list[tuple[float, Config]]]:
    """For each key the correct candidates with their TFLOP/s, best first. Progress goes to stderr."""
    from gpu_accel.workbench.timing import compare

    work = [(key, c, seqlen) for key in keys for c in configs.candidates(key[0], key[1])]
    started = time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        reasons = pool.map(compile_candidate, work)
        failed = {(key, c): why for (key, c, _), why in zip(work, reasons, strict=True) if why}
    print(f"compiled {len(work)} candidates in {time.perf_counter() - started:.0f} s", file=sys.stderr)

    found: dict[Key, list[tuple[float, Config]]] = {}
    for key in keys:
        pass_, bucket, causal = key
        print(f"{pass_}, head_dim {bucket}, {'causal' if causal else 'full'}", file=sys.stderr)
        shape = timed_shape(bucket, seqlen)
        inputs = [make(shape, bucket, seed) for seed in (1, 2)]
        forwards = [portable_forward.forward(*x[:3], softmax_scale=bucket**-0.5, window_right=0 if causal else -1)
                    for x in inputs]  # fmt: skip
        names, calls = {}, {}
        for config in configs.candidates(pass_, bucket):
            if (key, config) in failed:
                print(f"  {config}: cannot run: {failed[key, config]}", file=sys.stderr)
                continue
            try:
                ok, how = check(key, config, seed=len(names))
            except Exception as error:
                print(f"  {config}: cannot run: {type(error).__name__}: {str(error)[:160]}", file=sys.stderr)
                continue
            if not ok:
                print(f"  {config}: WRONG, {how}: not a candidate", file=sys.stderr)
                continue
            entries = [
                kernel_of(pass_, x, causal, config, f, prepare=True) for x, f in zip(inputs, forwards, strict=True)
            ]
            names[str(config)] = config
            calls[str(config)] = [lambda entry=entry: launch.launch(*entry) for entry in entries]
        samples = compare(calls, seconds=seconds) if calls else {}
        d, dv = head_dims(bucket)
        batch, sq, sk, heads, _ = shape
        per_product = 2.0 * batch * heads * sq * sk * (d + dv) / 2 * (0.5 if causal else 1.0)
        flops = _PRODUCTS[pass_] * per_product
        rates = [(flops / s.median / 1e9, names[name]) for name, s in samples.items() if s.ok]
        found[key] = sorted(rates, key=lambda rate: -rate[0])
        for rate, config in found[key]:
            print(f"  {rate:7.1f} TFLOP/s  {config}", file=sys.stderr)
    return found


def row(key: tuple[str, int, bool, int], config: Config) -> str:
    """One [[config]] table of the TOML file."""
    pass_, bucket, causal, dtype_bytes = key
    lines = [
        "[[config]]",
        f'pass = "{pass_}"',
        f"head_dim = {bucket}",
        f"causal = {str(causal).lower()}",
        f"dtype_bytes = {dtype_bytes}",
        f"block_m = {config.block_m}",
        f"block_n = {config.block_n}",
        f"num_warps = {config.num_warps}",
        f"num_stages = {config.num_stages}",
        f'measured = "{config.measured}"',
        *([f'date = "{config.date}"', f'card = "{config.card}"'] if config.card else []),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m gpu_accel.flash_attention3.tune", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="TOML file to write")
    parser.add_argument("--pass", dest="passes", choices=PASSES, action="append", help="default: all")
    parser.add_argument("--head-dim", type=int, choices=BUCKETS, action="append", help="default: 64, 128, 256")
    parser.add_argument("--seqlen", type=int, default=8192, help="length to time at, with 16384 tokens in all")
    parser.add_argument("--seconds", type=float, default=0.15, help="time per candidate")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1), help="processes that compile")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise HardwareError("tuning needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    card, today = torch.cuda.get_device_name(), datetime.date.today().isoformat()
    dims = options.head_dim or [64, 128, 256]
    keys = [(p, d, c) for p in options.passes or PASSES for d in dims for c in (False, True)]
    found = tune(keys, seqlen=options.seqlen, seconds=options.seconds, jobs=options.jobs)

    table = dict(configs.table(configs.table_name(device)))
    print("| pass | head_dim | mask | tiles | TFLOP/s | next best |\n|---|---|---|---|---|---|")
    for key, rates in found.items():
        pass_, bucket, causal = key
        if not rates:
            print(f"| {pass_} | {bucket} | {causal} | no candidate passed: the old row stays | | |")
            continue
        best, config = rates[0]
        after = f"{rates[1][0]:.0f} ({rates[1][1]})" if len(rates) > 1 else ""
        print(f"| {pass_} | {bucket} | {'causal' if causal else 'full'} | {config} | {best:.0f} | {after} |")
        measured = f"{best:.0f} TFLOP/s at seqlen {options.seqlen}, best of {len(rates)} correct candidates"
        table[(*key, 2)] = replace(config, measured=measured, date=today, card=card)
    head = f"# Written by `python3 -m gpu_accel.flash_attention3.tune`, {today}, {card}.\n\n"
    options.out.write_text(head + "\n".join(row(key, config) for key, config in sorted(table.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
