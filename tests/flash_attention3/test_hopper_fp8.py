"""What the Hopper FP8 forward does on the host: the order of keys, padding, refusals, and who is chosen."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3 import hopper_fp8, hopper_fp8_tune
from gpu_accel.flash_attention3.fp8 import describe, fp8_attention_quantized, fp8_block_quantize

gluon = pytest.mark.skipif(not hopper_fp8.gluon_available(), reason="this Triton has no usable Gluon dialect")


def keys(batch: int, heads: int, seqlen: int, dim: int) -> torch.Tensor:
    x = torch.randint(0, 120, (batch, heads, seqlen, dim), generator=torch.Generator().manual_seed(0))
    return x.to(torch.uint8).view(torch.float8_e4m3fn)


@gluon
@pytest.mark.parametrize("seqlen", [1, 16, 100, 256])
def test_the_tensor_map_reads_keys_in_the_order_of_an_operand(seqlen):
    k8 = keys(2, 3, seqlen, 64)
    padded = hopper_fp8.grouped_keys(k8)
    assert padded.shape == (2, 3, -(-seqlen // 16) * 16, 64)
    assert torch.equal(padded[:, :, :seqlen].view(torch.uint8), k8.view(torch.uint8))
    assert (padded[:, :, seqlen:].view(torch.uint8) == 0).all()
    found = hopper_fp8.keys_map(padded, 128, 64)
    assert found.block_shape == [8, 2, 4, 2, 64]
    read = padded.view(torch.uint8).as_strided(found.shape, found.strides).reshape(padded.shape)
    for row in range(padded.shape[2]):
        a, g, t, e = row // 16, row // 8 % 2, row // 2 % 4, row % 2
        assert torch.equal(read[:, :, row], padded[:, :, 16 * a + 4 * t + 2 * g + e].view(torch.uint8)), row


def test_keys_that_need_no_padding_are_not_copied():
    k8 = keys(1, 2, 32, 64)
    assert hopper_fp8.grouped_keys(k8).data_ptr() == k8.data_ptr()


@gluon
@pytest.mark.parametrize(("change", "words"), [
    ({"device_type": "cpu", "capability": None}, "cpu tensor"),
    ({"capability": (8, 9)}, "8.9"),
    ({"capability": (10, 0)}, "10.0"),
    ({"head_dim": 272}, "up to 256"),
    ({"head_dim": 72}, "multiples of 16"),
    ({"k_block": 64, "one_scale": False}, "k_block 64"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_refusals_say_why(change, words):
    good = {"device_type": "cuda", "capability": (9, 0), "head_dim": 128, "k_block": 128, "one_scale": False}
    assert hopper_fp8.refuse(**good) is None
    assert words in hopper_fp8.refuse(**{**good, **change})
    assert hopper_fp8.refuse(**{**good, "k_block": 64, "one_scale": True}) is None


def test_backend_hopper_never_falls_back():
    x8, scale = fp8_block_quantize(torch.ones(1, 1, 32, 64))
    with pytest.raises(UnsupportedError, match="backend='hopper'"):
        fp8_attention_quantized(x8, x8, x8, scale, scale, scale, backend="hopper")


@gluon
def test_describe_says_who_runs_and_why_the_other_does_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # describe then means the card of the table
    for dim, seqlen in ((64, 4096), (96, 4096), (128, 512)):
        words = describe(dim, seqlen_q=seqlen)
        assert "plain Triton" in words["kernel"] and words["not taken"].startswith("hopper: not faster")
    for dim in (64, 112, 128, 144, 192, 256):
        words = describe(dim, causal=True)
        assert words["kernel"] == hopper_fp8.KERNEL and "queue" in words["tile"] and "portable" in words["not taken"]


@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_unrescaled_probabilities_fit_the_format(largest):
    config = hopper_fp8.forward_config(128, causal=False, seqlen_k=1024)
    shift = hopper_fp8.shift_of(largest, config.growth)
    assert 2 ** (shift + config.growth) <= largest < 2 ** (shift + config.growth + 1)


def test_the_tuner_tries_no_configuration_twice():
    for dim, causal in ((64, False), (128, True), (256, False)):
        found = list(hopper_fp8_tune.candidates(dim, causal=causal, seqlen=8192).values())
        assert found[0] == hopper_fp8.forward_config(dim, causal=causal, seqlen_k=8192)
        assert len(set(found)) == len(found) > 3
