"""Which calls take the faster forms of the Hopper kernels, and which configurations are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3 import hopper, hopper_backward
from gpu_accel.flash_attention3.features import NONE, Features
from gpu_accel.flash_attention3.gluon_launch import programs_for


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
    assert hopper._plain(config, NONE, packed=False)
    assert hopper._plain(config, Features(batch_invariant=True), packed=False)
    for more in (dict(sinks=torch.zeros(2)), dict(alibi_slopes=torch.zeros(2)), dict(mask_mod="band"),
                 dict(score_mod="cap"), dict(return_max_logits=True), dict(block_lists=(torch.zeros(1),))):  # fmt: skip
        assert not hopper._plain(config, Features(**more), packed=False), more
    assert not hopper._plain(config, NONE, packed=True)
    for name in ("pipelined", "specialized"):
        assert not hopper._plain(replace(config, **{name: False}), NONE, packed=False)


@pytest.mark.parametrize("change", [{"q_slots": 1}, {"stages": 6}], ids=str)
def test_what_would_wait_for_itself_is_refused(change):
    config = hopper.forward_config(128, causal=True, seqlen_k=1000)
    with pytest.raises(InvalidInputError, match=r"seamless=True needs q_slots=2.*Use seamless=False"):
        replace(config, **change)
    replace(config, seamless=False, **change)


@pytest.mark.parametrize("d", [64, 128])
def test_seamless_by_itself_only_for_what_was_timed(d):
    def timed(left=-1, right=-1, softcap=0.0, seqlen_k=512, dtype=torch.bfloat16):
        config = hopper.forward_config(d, causal=right >= 0, seqlen_k=seqlen_k)
        return hopper._timed(config, dtype, seqlen_k, window=(left, right), softcap=softcap)

    assert timed() and timed(right=0) and timed(right=0, seqlen_k=500) and timed(dtype=torch.float16)
    assert timed(seqlen_k=500) == timed(right=0, softcap=30.0) == (d == 64)
    assert timed(left=99, right=0) and not timed(left=99, right=0, softcap=30.0)
    assert not timed(left=99) and not timed(left=99, right=9) and not timed(right=9) and not timed(softcap=30.0)
    assert not timed(left=99, right=0, dtype=torch.float16)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 128])
def test_which_backward_has_dq_apart(d, causal):
    def apart(features=(), bounded=False, packed=False):
        return hopper_backward._plain(frozenset(features), bounded=bounded, packed=packed)

    def early(seqlen_k):
        return hopper_backward.backward_config(d, causal=causal, apart=True, seqlen_k=seqlen_k).early

    config = hopper_backward.backward_config(d, causal=causal, apart=True)
    assert config.apart
    assert early(4096) and early(1024) != causal and early(512) == (d == 128 and not causal)
    assert not hopper_backward.backward_config(d, causal=causal).apart
    assert apart() and apart(features=("sinks", "batch_invariant"))
    assert not apart(bounded=True) and not apart(packed=True)
    assert not any(apart(features=(name,)) for name in ("alibi_slopes", "score_mod", "mask_mod", "block_mask"))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 128])
def test_which_backward_takes_tiles_from_a_queue(d, causal):
    def config(seqlen_k, apart=True):
        return hopper_backward.backward_config(d, causal=causal, apart=apart, seqlen_k=seqlen_k)

    assert config(512).dynamic == config(2048, apart=False).dynamic == causal
    assert config(513).dynamic == config(16384).dynamic == (causal or d == 64)
    assert config(1024).share == (16 if causal else 32) << 20
    assert config(1025).share == config(1024, apart=False).share == 32 << 20


def test_programs_end_together():
    device = torch.device("cpu")  # counts as 132 multiprocessors
    for tiles, programs in ((0, 0), (1, 1), (132, 132), (133, 67), (1024, 128), (2048, 128), (4096, 128), (2752, 132)):
        assert programs_for(tiles, device, queue=False) == programs
        assert programs_for(tiles, device, queue=True) == min(tiles, 132)


def test_names_that_differ_between_tritons_are_in_one_place():
    # the packed kernels did not compile with Triton 3.9 for a method spelled out in one of them
    renamed = ("._reinterpret(", ".async_copy_global_to_shared(", ".async_copy_shared_to_global(", "gl.barrier(")
    package = Path(hopper.__file__).parents[1]
    for path in package.rglob("*.py"):
        text = path.read_text()
        assert path.name == "gluon_compat.py" or not any(name in text for name in renamed), path
