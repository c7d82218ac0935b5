"""Which calls of the Hopper forward leave out the seams between tiles, and which configurations it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3 import hopper
from gpu_accel.flash_attention3.features import NONE, Features

PLAIN = dict(packed=False, bounded=False)


@pytest.mark.parametrize("causal", [False, True])
def test_seamless_where_it_was_timed(causal, monkeypatch):
    def seamless(*head_dims, seqlen_k=1000):
        return hopper.forward_config(*head_dims, causal=causal, seqlen_k=seqlen_k).seamless

    assert seamless(64) and seamless(40) and seamless(128) and seamless(128, seqlen_k=9000)
    assert not any(seamless(*d) for d in ((256,), (192,), (64, 128), (128, 64), (192, 128)))
    monkeypatch.setattr(hopper, "_TRITON", (3, 8))
    assert seamless(64, seqlen_k=9000)
    monkeypatch.setattr(hopper, "_TRITON", (3, 9))  # three consumers without a mask spill inside the steps there
    assert seamless(64, seqlen_k=9000) == causal and seamless(64)


def test_only_plain_calls():
    config = hopper.forward_config(128, causal=True, seqlen_k=1000)
    assert hopper._plain(config, NONE, **PLAIN) and hopper._plain(config, Features(batch_invariant=True), **PLAIN)
    for more in (dict(sinks=torch.zeros(2)), dict(alibi_slopes=torch.zeros(2)), dict(mask_mod="band"),
                 dict(score_mod="cap"), dict(return_max_logits=True), dict(block_lists=(torch.zeros(1),))):  # fmt: skip
        assert not hopper._plain(config, Features(**more), **PLAIN), more
    for name in PLAIN:
        assert not hopper._plain(config, NONE, **(PLAIN | {name: True}))
    for name in ("pipelined", "specialized"):
        assert not hopper._plain(replace(config, **{name: False}), NONE, **PLAIN)


@pytest.mark.parametrize("change", [{"q_slots": 1}, {"stages": 6}], ids=str)
def test_what_would_wait_for_itself_is_refused(change):
    config = hopper.forward_config(128, causal=True, seqlen_k=1000)
    with pytest.raises(InvalidInputError, match=r"seamless=True needs q_slots=2.*Use seamless=False"):
        replace(config, **change)
    replace(config, seamless=False, **change)


def test_seamless_by_itself_only_for_what_a_gpu_has_run():
    def timed(q=(2, 512, 4, 64), k=(2, 512, 4, 64), dtype=torch.bfloat16, **more):
        return hopper._timed(torch.empty(q, dtype=dtype), torch.empty(k, dtype=dtype), Features(**more))

    assert timed() and not timed(dtype=torch.float16) and not timed(batch_invariant=True)
    assert not timed(k=(2, 512, 2, 64)) and not timed(k=(2, 384, 4, 64)) and not timed(k=(2, 640, 4, 64))
    assert not timed((2, 500, 4, 64), (2, 500, 4, 64))
