"""The order of loads, products and stores of the Hopper FP8 forward, emulated on the CPU (emulate_hopper_fp8.py)."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_accel.flash_attention3 import hopper_fp8

if hopper_fp8.gluon_available():
    from tests.flash_attention3.emulate_hopper_fp8 import Emulation
else:
    pytest.skip("this Triton has no usable Gluon dialect", allow_module_level=True)

KERNELS = {
    "block-by-block": {},
    "in-pieces": {"two_level": False, "chunk": 3, "dim": 256, "stages": 2, "under": 2, "ahead": False},
    "folded": {"two_level": False, "chunk": 3, "fold": True},
    "half-under-the-product": {"under": 1},
    "named": {"named": True},
}


@pytest.mark.parametrize("options", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (64, 32), (100, 90), (33, 640)], ids=str)
def test_lengths_and_masks(options, sq, sk):
    for right, dynamic in ((-1, False), (0, True)):
        call = Emulation(**options, sq=sq, sk=sk, right=right, dynamic=dynamic, programs=3)
        call.run()
        call.check()


@pytest.mark.parametrize("options", KERNELS.values(), ids=KERNELS)
def test_random_calls(options):
    draw = np.random.default_rng(1)
    for seed in range(6):
        call = Emulation(
            **options, sq=int(draw.integers(1, 160)), sk=int(draw.integers(1, 400)),
            right=int(draw.choice([-1, 0, 5, 70])), left=int(draw.choice([-1, -1, 3, 40])),
            dynamic=bool(draw.integers(2)), softcap=float(draw.choice([0, 3.0])),
            programs=int(draw.integers(1, 4)),
            heads=4, heads_kv=2, seed=seed,
        )  # fmt: skip
        call.run()
        call.check()
