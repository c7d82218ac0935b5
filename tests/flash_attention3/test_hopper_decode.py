"""The Gluon decode kernel without a GPU: its PTX is executed on the CPU and compared with float64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_CODE = """
import sys
import numpy as np
import torch
from gpu_accel.flash_attention3 import hopper_decode, launch, reference_kvcache
from gpu_accel.flash_attention3.kvcache import make_call
from gpu_accel.testing.compile_only import use_target
from gpu_accel.testing.errors import assert_close_to_truth
from gpu_accel.testing.kvcache import make, yardstick
from tests.flash_attention3 import emulate_ptx

use_target(90)
# two splits, the second of odd length, NaN behind it; two pages a step, in another order
arguments = make(batch=1, heads=4, heads_kv=1, dim=64, capacity=192, lengths=[141], num_splits=2, seqlen_q=3,
                 causal=True, kind="e4m3", page=16)
call = make_call(**arguments)
config = hopper_decode.Config(keys=32)
assert hopper_decode.refuse(call) is None
o = torch.full_like(call.q, float("nan"))
lse = torch.full((1, 4, 3), float("nan"))
with launch.recording() as entries:
    hopper_decode.forward(call, o, lse, config)
kernel, blocks, given, options = entries[-1]
compiled = kernel.warmup(*given, grid=(1,), **options)
memory, parameters = emulate_ptx.Memory(), []
held = {}
for name, value in zip(kernel.arg_names, given):
    if compiled.src.signature[name] == "constexpr":
        continue
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() not in held:
            held[storage.data_ptr()] = memory.add(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        parameters.append(held[storage.data_ptr()] + value.storage_offset() * value.element_size())
    else:
        parameters.append(int(np.float32(value).view(np.uint32)) if isinstance(value, float) else value)
true, true_lse = reference_kvcache.forward(call.q, call, torch.float64)
ruler, ruler_lse = yardstick(call)
emulate_ptx.launch(compiled.asm["ptx"], [x & (1 << 64) - 1 for x in parameters + [0, 0]], memory,
                   shared=compiled.metadata.shared, blocks=blocks, num_warps=4)
assert_close_to_truth("o", o, true, ruler)
assert_close_to_truth("lse", lse, true_lse, ruler_lse, floor=2e-5)
counters = given[kernel.arg_names.index("counters")]
assert counters.dtype == torch.int32 and not counters.any(), "counters have to come back"
print("right:", blocks, "programs")
"""


@pytest.mark.slow
@pytest.mark.parametrize("compile_environment", ["installed"], indirect=True)  # others are compiled elsewhere
def test_what_the_compiler_made_is_right(compile_environment):
    done = subprocess.run(
        [sys.executable, "-c", _CODE], cwd=ROOT, env=compile_environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["right: 2 programs"]
