"""The decode kernels compiled for an H100 that is not there: 16-byte copies and loads, registers, no spills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_CODE = """
import json, re, sys
import torch
from gpu_accel.flash_attention3 import launch, portable_decode
from gpu_accel.flash_attention3.kvcache import make_call
from gpu_accel.testing.compile_only import compile_only, use_target
from gpu_accel.testing.kvcache import make

use_target(90)
CASES = {
    "contiguous": {}, "pages-of-16": {"page": 16},
    "e4m3": {"kind": "e4m3"}, "e4m3-tokens": {"kind": "e4m3", "granularity": "token", "page": 16},
}
rows = []
for name, options in CASES.items():
    arguments = make(batch=1, heads=32, heads_kv=8, dim=128, capacity=4096, lengths=[4096], poison=False, **options)
    call = make_call(**arguments, num_splits=32)

    def hook(kernel, arguments, options):
        c = compile_only(kernel, arguments, options, name=name, capability=90)
        rows.append((c, dict(per_sm=portable_decode.plan(call).config.per_sm)))

    o, lse = torch.empty(1, 1, 32, 128, dtype=torch.bfloat16), torch.empty(1, 32, 1)
    with launch.instead_of_launching(hook):
        portable_decode.forward(call, o, lse)

from gpu_accel.flash_attention3 import hopper_decode
for name, options in {"registers": {"page": 16}, "registers-e4m3": {"kind": "e4m3", "page": 16}}.items():
    arguments = make(batch=1, heads=32, heads_kv=8, dim=128, capacity=4096, lengths=[4096], poison=False, **options)
    call = make_call(**arguments)
    assert hopper_decode.refuse(call) is None and hopper_decode.untimed(call) is None

    def hook(kernel, arguments, options):
        c = compile_only(kernel, arguments, options, name=name, capability=90)
        rows.append((c, dict(keys=options["N"], per_sm=hopper_decode.PER_SM)))

    with launch.instead_of_launching(hook):
        hopper_decode.forward(call, o, lse)

for c, row in rows:  # read last, so that all of it is disassembled at once
    copies = re.findall(r"LDGSTS\\.E[.A-Z]*\\.?(\\d*)", c.sass)
    loads = re.findall(r"LDG\\.E\\.EF([.0-9]*)", c.sass)
    stops = re.findall(r"\\b(?:LDS|STS|LDSM|LDGSTS|BAR)\\b", c.sass[: c.sass.rindex("HMMA")])
    row |= dict(name=c.name, spills=c.spills, registers=c.registers, shared=c.shared, warps=c.num_warps,
                products=c.instructions["HMMA"], copies=len(copies), loads=len(loads), stops=len(stops),
                wide=loads.count(".128") if "keys" in row else copies.count("128"),
                barriers=c.instructions["SYNCS"], warnings=c.warnings)
    print(json.dumps(row))
"""


@pytest.mark.slow
def test_the_decode_kernel_streams_and_fits_as_often_as_splits_assume(compile_environment):
    done = subprocess.run(
        [sys.executable, "-c", _CODE], cwd=ROOT, env=compile_environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    registers = [row for row in rows if row["name"].startswith("registers")]
    rows = [row for row in rows if row not in registers]
    assert len(rows) == 4 and len(registers) == 2
    for row, keys in zip(registers, (16, 32), strict=True):  # from memory to products without a stop
        assert row["spills"] <= 8 and row["stops"] == 0 and not row["barriers"] and not row["warnings"], row
        assert row["keys"] == keys and row["products"] == 2 * keys, row
        assert row["wide"] == row["loads"] == 2 * 16, row
        threads = 32 * row["warps"] * row["per_sm"]
        assert row["registers"] * threads <= 65536 and row["per_sm"] * (row["shared"] + 1024) <= 227 * 1024, row
    for row in rows:
        assert row["spills"] <= 16, row
        assert row["products"] > 0 and row["copies"] > 0, row
        if row["name"] != "e4m3-tokens":  # scales come in copies of their own, 4 bytes each
            assert row["wide"] == row["copies"], row
        threads = 32 * row["warps"] * row["per_sm"]
        assert row["registers"] * threads <= 65536 and row["per_sm"] * (row["shared"] + 1024) <= 227 * 1024, row
