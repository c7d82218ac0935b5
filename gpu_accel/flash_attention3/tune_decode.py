"""Time other configurations of the decode kernel on this GPU: check each first, then time what passed, interleaved.

    python3 -m gpu_accel.flash_attention3.tune_decode --json decode.json

32 query heads, 8 key heads, head_dim 128, one query. Prints microseconds (clean L2) and GB/s of the keys and values
read, next to a copy measured in the same run. On a Hopper GPU the Gluon kernel's configurations are among them. Nothing
is changed: `decode_config.py` and `hopper_decode.default_config` hold the choice.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import GpuAccelError, HardwareError
from gpu_accel.flash_attention3 import decode_config, launch, portable_decode, reference_kvcache
from gpu_accel.flash_attention3.decode_config import DecodeConfig
from gpu_accel.flash_attention3.gluon_launch import gluon_available
from gpu_accel.flash_attention3.kvcache import make_call
from gpu_accel.flash_attention3.kvcache_problem import KVCall

if gluon_available():
    from gpu_accel.flash_attention3 import hopper_decode

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
CASES = ((1, 4096), (1, 32768), (16, 4096), (16, 32768), (128, 4096))
CHECKED = (2, 1000)
KINDS = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
_COPY_BYTES = 1 << 30


def kernel_of(config: Any) -> Any:
    """The module whose `plan` and `forward` take a configuration."""
    return portable_decode if isinstance(config, DecodeConfig) else hopper_decode


def configurations(kind: str) -> list[Any]:
    """The chosen one of the plain-Triton kernel first."""
    found: list[Any] = list(dict.fromkeys([_chosen(kind), *decode_config.candidates(_bits(kind))]))
    if gluon_available() and launch.capability(torch.device("cuda")) == (9, 0):
        found += hopper_decode.candidates(kind)
    return found


def make(batch: int, keys: int, page: int, kind: str, seed: int) -> KVCall:
    """A call with every sequence full, pages in random order."""
    source = torch.Generator(device="cuda").manual_seed(seed)
    options = {}
    lead = (batch, keys)
    if page:
        each = -(-keys // page)
        order = torch.randperm(batch * each, device="cuda", generator=source)
        options["page_table"] = order.view(batch, each).int()
        lead = (batch * each, page)
    caches = []
    for _ in range(2):
        x = torch.empty(*lead, HEADS_KV, HEAD_DIM, device="cuda", dtype=torch.bfloat16).normal_(generator=source)
        caches.append(x.to(KINDS[kind]) if kind != "bf16" else x)
    q = torch.randn(batch, 1, HEADS, HEAD_DIM, device="cuda", generator=source).bfloat16()
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    if kind != "bf16":
        options |= {n: torch.ones(HEADS_KV, device="cuda") for n in ("k_descale", "v_descale")}
    return make_call(q, *caches, cache_seqlens=lengths, **options)


def outputs(call: KVCall) -> tuple[Tensor, Tensor]:
    """o and lse full of NaN."""
    o = torch.full_like(call.q, float("nan"))
    return o, torch.full((o.shape[0], o.shape[2], o.shape[1]), float("nan"), device="cuda")


def compile_one(job: tuple[Any, int, str]) -> str:
    """In a process of its own: compile a configuration into Triton's cache. Returns why it failed, or ''."""
    config, page, kind = job
    try:
        call = make(*CHECKED, page, kind, 0)
        with launch.recording() as entries:
            kernel_of(config).forward(call, *outputs(call), config)
        for kernel, _, arguments, options in entries:
            kernel.warmup(*arguments, grid=(1,), **options)
    except Exception as error:  # out of shared memory, or the compiler refuses: not a candidate on this GPU
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return ""


def check(config: Any, page: int, kind: str) -> str:
    """Why a configuration is wrong, or ''. Float64 on uneven lengths; twice, so that counters have to come back."""
    from gpu_accel.testing.errors import compare
    from gpu_accel.testing.kvcache import yardstick

    call = make(*CHECKED, page, kind, 7)
    call.cache_seqlens[1] = 333
    o_true, lse_true = reference_kvcache.forward(call.q, call, torch.float64)
    o_ruler, lse_ruler = yardstick(call)
    for _ in range(2):
        o, lse = outputs(call)
        kernel_of(config).forward(call, o, lse, config)
        for name, found in (
            ("o", compare(o, o_true, o_ruler)),
            ("lse", compare(lse, lse_true, lse_ruler, floor=1e-4)),
        ):
            if not found.ok:
                return f"{name}: error {found.error:.2e} above {found.bound:.2e} {found.why}"
    return ""


def copy_rate(seconds: float) -> float:
    """GB/s of a device-to-device copy, read and written."""
    from gpu_accel.workbench.timing import compare

    a, b = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    samples = compare({"copy": [lambda: b.copy_(a)]}, seconds=seconds)["copy"]
    return 2 * _COPY_BYTES / samples.median / 1e6


def time_case(batch: int, keys: int, page: int, kind: str, configs: list[Any], seconds: float) -> list[dict]:
    """Rows of one case, fastest first."""
    from gpu_accel.workbench.timing import compare

    calls = [make(batch, keys, page, kind, seed) for seed in range(2 if batch * keys <= 1 << 19 else 1)]
    results = [outputs(call) for call in calls]
    ways, by_name = {}, {}
    for config in configs:
        name = str(config)
        by_name[name] = config
        ways[name] = [
            lambda call=call, result=result, config=config: kernel_of(config).forward(call, *result, config)
            for call, result in zip(calls, results, strict=True)
        ]
    moved = sum(x.numel() * x.element_size() for x in (calls[0].k_cache, calls[0].v_cache))
    rows = []
    for name, samples in compare(ways, seconds=seconds, min_rounds=20, clean_l2=True).items():
        row = {"batch": batch, "keys": keys, "page": page, "kind": kind, "config": name, **asdict(by_name[name])}
        row["splits"] = kernel_of(by_name[name]).plan(calls[0], by_name[name]).splits
        if samples.ok:
            row |= {"us": samples.median * 1e3, "gbps": moved / samples.median / 1e6, "method": samples.method}
        else:
            row["failed"] = str(samples.failed)
        rows.append(row)
    return sorted(rows, key=lambda r: r.get("us", float("inf")))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m gpu_accel.flash_attention3.tune_decode", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for every row")
    parser.add_argument("--kind", choices=KINDS, action="append", help="format of the cache; default: all")
    parser.add_argument("--page", type=int, action="append", help="page size, 0 for none; default: 0 and 16")
    parser.add_argument("--case", action="append", help="batch x keys, such as 1x4096; default: five of them")
    parser.add_argument("--seconds", type=float, default=0.05, help="time per configuration and case")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1), help="processes that compile")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise HardwareError("timing needs a CUDA device")
    cases = [tuple(int(n) for n in c.split("x")) for c in options.case] if options.case else CASES
    pages, kinds = options.page or [0, 16], options.kind or list(KINDS)
    table = {kind: configurations(kind) for kind in kinds}
    work = [(config, page, kind) for kind in kinds for page in pages for config in table[kind]]
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        wrong = {job: why for job, why in zip(work, pool.map(compile_one, work), strict=True) if why}
    for job in work:
        if job not in wrong:
            try:
                why = check(*job)
            except (GpuAccelError, RuntimeError) as error:
                why = f"{type(error).__name__}: {str(error)[:160]}"
            if why:
                wrong[job] = f"WRONG, {why}"
    for (config, page, kind), why in wrong.items():
        print(f"not timed: {kind}, page {page}, {config}: {why}", file=sys.stderr)
    ceiling = copy_rate(0.3)
    print(f"{torch.cuda.get_device_name()}: copy {ceiling:.0f} GB/s; {len(work) - len(wrong)} of {len(work)} correct")
    found = []
    for kind in kinds:
        for page in pages:
            good = [config for config in table[kind] if (config, page, kind) not in wrong]
            for batch, keys in cases:
                rows = time_case(batch, keys, page, kind, good, options.seconds) if good else []
                found += [row | {"copy_gbps": ceiling} for row in rows]
                shown = [f"{r['us']:.1f} us {r['gbps']:.0f} ({r['config']}; {r['splits']})" for r in rows if "us" in r]
                mine = next((r for r in rows if r["config"] == str(_chosen(kind)) and "us" in r), None)
                chosen = f"chosen {mine['us']:.1f} us; " if mine else ""
                print(f"{kind} page {page} B{batch} {keys}: {chosen}" + " | ".join(shown[:3]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": found, "wrong": [f"{j}: {w}" for j, w in wrong.items()]}, indent=1))
    return 0 if not any(why.startswith("WRONG") for why in wrong.values()) else 3


def _bits(kind: str) -> int:
    return 8 * KINDS[kind].itemsize


def _chosen(kind: str) -> DecodeConfig:
    """What the table holds for these cases, without its reason, so that it equals a candidate."""
    config = decode_config.lookup(HEADS // HEADS_KV, _bits(kind), HEAD_DIM)
    return DecodeConfig(config.block_n, config.num_warps, config.num_stages, config.per_sm, config.min_blocks)


if __name__ == "__main__":
    sys.exit(main())
