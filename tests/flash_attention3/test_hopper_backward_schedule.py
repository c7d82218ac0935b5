"""The order of loads, products and stores of the backward with dQ apart, emulated (emulate_hopper_backward.py)."""

from __future__ import annotations

import pytest

from gpu_accel.flash_attention3 import hopper_fp8

if hopper_fp8.gluon_available():
    from tests.flash_attention3.emulate_hopper_backward import Emulation
else:
    pytest.skip("this Triton has no usable Gluon dialect", allow_module_level=True)


@pytest.mark.parametrize("early", [False, True], ids=["behind-s", "early"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("sq", "sk", "heads", "heads_kv", "causal", "left"),
    [(1, 1, 1, 1, False, -1), (300, 700, 4, 2, True, -1), (700, 130, 3, 1, True, 90), (513, 640, 2, 2, False, -1)],
    ids=str,
)
def test_lengths_and_masks(sq, sk, heads, heads_kv, causal, left, dim, early):
    shape = dict(sq=sq, sk=sk, dim=dim, heads=heads, heads_kv=heads_kv)
    call = Emulation(**shape, causal=causal, left=left, dynamic=causal or early, early=early, ahead=early)
    call.run()
    call.check()
