"""Gated linear attention on Hopper, with its two kernels done by torch in their order: they need a Hopper GPU.

What is tested is the arithmetic (blocks that double, what they keep and pass on, roundings), the walk and its segments,
and what the op, gradients and `explain_gla` make of them.
"""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.thunderkittens import gla, gla_hopper
from gpu_accel.thunderkittens.gla import chunk_gla, explain_gla, gated_linear_attention
from tests import gluon_in_torch
from tests.thunderkittens.helpers import run
from tests.thunderkittens.test_gla import compare, make, truth_of

CHUNK, LEVELS = gla_hopper.CHUNK, 6


def halves(x, level):
    """Steps of first and of second blocks of 2^level steps."""
    return x.unflatten(-2, (-1, 2, 2**level)).unbind(-3)


def whole(first, second):
    return torch.stack((first, second), -3).flatten(-4, -2)


def pairs_in_torch(q, k, g, scale):
    """What `gla_pairs_kernel` does, all chunks at once, with its roundings."""
    dtype, chunks = q.dtype, -(-q.shape[1] // CHUNK)

    def cut(x):
        x = torch.nn.functional.pad(x.float().transpose(1, 2), (0, 0, 0, chunks * CHUNK - x.shape[1]))
        return x.unflatten(2, (chunks, CHUNK))

    def rounded(x):
        return x.to(dtype).float()

    q, k, kept = cut(q), cut(k), (cut(g) * math.log2(math.e)).exp2()
    passed, total = torch.ones_like(kept), kept
    apart = torch.arange(CHUNK)[:, None] ^ torch.arange(CHUNK)
    scores = torch.where(apart == 0, q @ k.mT, 0.0)
    for level in range(LEVELS):
        (_, q_second), (k_first, _) = halves(q, level), halves(k, level)
        (kept_first, kept_second), (passed_first, passed_second) = halves(kept, level), halves(passed, level)
        x = rounded(whole(k_first * passed_first, q_second * kept_second))
        scores += torch.where(apart >> level == 1, x @ x.mT, 0.0)
        total_first, total_second = halves(total, level)
        kept = whole(kept_first, kept_second * total_first)
        passed = whole(passed_first * total_second, passed_second)
        total = whole(total_first * total_second, total_first * total_second)

    def laid_out(x):
        return x.to(dtype).flatten(2, 3).transpose(1, 2)

    block = gla_hopper.block_keys(q.shape[-1])
    ends = torch.nn.functional.pad(total[..., 0, :], (0, block - q.shape[-1]), value=1.0)
    return *map(laid_out, (q * scale * kept, k * passed, scores.tril() * scale)), ends


def walk_in_torch(made, v, initial, segments):
    """What `gla_walk_kernel` does, a chunk at a time: first what every segment adds, then o."""
    queries, keys, weights, ends = made
    dtype, chunks, seqlen = v.dtype, ends.shape[2], v.shape[1]
    v = torch.nn.functional.pad(v.transpose(1, 2).float(), (0, 0, 0, chunks * CHUNK - seqlen))
    queries, keys, weights = (x.transpose(1, 2).float() for x in (queries, keys, weights))
    zero = v.new_zeros(*v.shape[:2], keys.shape[3], v.shape[3])
    out, final = torch.full_like(v, math.nan), torch.full_like(zero, math.nan)
    each, local, decays = -(-chunks // segments), [], []
    for only_sums in (True, False):
        for position in range(segments - only_sums):
            state, left = zero, ends.new_ones(ends[:, :, 0].shape)
            if not only_sums:
                state = zero if initial is None else initial
                for before in range(position):
                    state = state * decays[before][..., : keys.shape[3], None] + local[before]
            for chunk in range(position * each, min(chunks, position * each + each)):
                at = slice(chunk * CHUNK, chunk * CHUNK + CHUNK)
                decay = ends[:, :, chunk]
                if not only_sums:
                    out[:, :, at] = queries[:, :, at] @ state.to(dtype).float() + weights[:, :, at] @ v[:, :, at]
                state = state * decay[..., : keys.shape[3], None] + keys[:, :, at].mT @ v[:, :, at]
                left = left * decay
            if only_sums:
                local.append(state)
                decays.append(left)
            elif position == segments - 1:
                final = state
    return out[:, :, :seqlen].transpose(1, 2).to(dtype).contiguous(), final


@pytest.fixture
def on_a_cpu(monkeypatch, device):
    """The segments that calls were cut into."""
    seen = []

    def walk(made, v, initial, segments):
        seen.append(segments)
        return walk_in_torch(made, v, initial, segments)

    monkeypatch.setattr(gla_hopper, "machine_refusal", lambda _: None)
    monkeypatch.setattr(gla_hopper, "pairs", pairs_in_torch)
    monkeypatch.setattr(gla_hopper, "walk", walk)
    return seen


def ours(backend, scale=0.3):
    def call(q, k, v, g, h):
        return gated_linear_attention(q, k, v, g, scale=scale, initial_state=h, backend=backend)

    return call


CASES = {
    "T70-K24-V40": dict(seqlen=70, heads=1),
    "T1-no-state": dict(seqlen=1, batch=2, initial=False),
    "T130-strong-gates": dict(seqlen=130, heads=1, gates=30.0),
    "T64-hardly-any-gates-K72": dict(seqlen=64, key_dim=72, value_dim=16, heads=1, gates=1e-4),
    "T0": dict(seqlen=0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_the_recurrence(case, on_a_cpu, device):
    tensors, grads = make(device, dtype=torch.bfloat16, **case)
    compare(run(ours("hopper"), tensors, grads), truth_of(tensors, grads), run(ours("reference"), tensors, grads))
    assert on_a_cpu == ([1] if case["seqlen"] else [])


@pytest.mark.parametrize("gate", [-30.0, -math.inf])
def test_gates_that_forget(gate, on_a_cpu, device):
    """No difference of sums is taken, so what is beside such gates keeps all its digits."""
    tensors, grads = make(device, dtype=torch.bfloat16, heads=1, seqlen=70)
    tensors[3][:, 2::3, :, ::2] = gate
    compare(run(ours("hopper"), tensors, grads), truth_of(tensors, grads), run(ours("reference"), tensors, grads))


def test_how_many_segments_the_walk_takes():
    """Sequences are cut while programs, one a head and 64 columns of v, are fewer than SMs."""
    for shape, segments in {(1, 16384, 16, 128): 4, (8, 2048, 16, 64): 1, (8, 2048, 16, 128): 1,
                            (1, 4096, 2, 128): 8, (1, 300, 1, 64): 1}.items():  # fmt: skip
        assert gla_hopper.segments_for(torch.empty(shape, device="meta"), 64) == segments


@pytest.mark.parametrize("segments", [2, 3])
def test_segments(segments, on_a_cpu, device, monkeypatch):
    """The last of three is empty."""
    monkeypatch.setattr(gla_hopper, "segments_for", lambda *_: segments)
    tensors, grads = make(device, dtype=torch.bfloat16, heads=1, seqlen=200)
    compare(run(ours("hopper"), tensors, grads), truth_of(tensors, grads), run(ours("reference"), tensors, grads))
    assert on_a_cpu == [segments]


def test_what_it_does_not_take(on_a_cpu, device):
    (q, k, v, g, _), _ = make(device, dtype=torch.bfloat16, key_dim=256)
    with pytest.raises(UnsupportedError, match="K must be a multiple of 8 from 16 to 128"):
        chunk_gla(q, k, v, g, backend="hopper")
    with pytest.raises(UnsupportedError, match="K must be a multiple of 8"):
        explain_gla(q, v, backend="hopper")
    for wrong in (None, q[0]):
        with pytest.raises(InvalidInputError, match="q must be"):
            explain_gla(wrong, v)
    cu = torch.tensor([0, 37], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="packed sequences"):
        chunk_gla(q[..., :64], k[..., :64], v, g[..., :64], cu_seqlens=cu, backend="hopper")
    with pytest.raises(UnsupportedError, match="chunks have 64 steps"):
        gated_linear_attention(q[..., :64], k[..., :64], v, g[..., :64], chunk=32, backend="hopper")


def test_auto_and_what_is_said_about_it(on_a_cpu, device, monkeypatch):
    """Taken where K and V are padded to what was timed: from 33 to 128."""
    narrow, wide = (make(device, dtype=torch.bfloat16, heads=1, key_dim=k, value_dim=128)[0][:4] for k in (32, 72))
    chunk_gla(*narrow)
    assert on_a_cpu == [] and "33 to 127 are padded" in explain_gla(narrow[0], narrow[2])
    chunk_gla(*wide)
    assert on_a_cpu == [1]
    for backend in ("auto", "hopper"):
        assert "gradients: plain Triton" in explain_gla(wide[0], wide[2], backend=backend)
    assert "another backend" in explain_gla(wide[0], wide[2], backend="reference")
    monkeypatch.setattr(gla_hopper, "machine_refusal", lambda _: "no such machine")
    chunk_gla(*wide)
    assert on_a_cpu == [1] and "no such machine" in explain_gla(wide[0], wide[2])
    with pytest.raises(UnsupportedError, match="no such machine"):
        explain_gla(wide[0], wide[2], backend="hopper")


def test_opcheck(on_a_cpu, device):
    (q, k, v, g, h), _ = make(device, seqlen=18, key_dim=16, value_dim=16, heads=1, dtype=torch.bfloat16)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, h)]
    torch.library.opcheck(gla.gla_hopper_op, (*leaves, None, 0.25, CHUNK), test_utils=tests)


SOURCES = {
    "T70-K128-V64": dict(seqlen=70, key_dim=128, value_dim=64, heads=1),
    "T130-K72-V72-no-state": dict(seqlen=130, key_dim=72, value_dim=72, heads=1, initial=False),
    "B2-T200-K24-V40-segments3": dict(batch=2, seqlen=200, key_dim=24, value_dim=40, segments=3),
    "T5-K64-V16-strong-gates": dict(seqlen=5, key_dim=64, value_dim=16, gates=30.0),
    "T300-K128-V8-segments2": dict(seqlen=300, key_dim=128, value_dim=8, heads=1, segments=2),
}


@pytest.mark.parametrize("case", SOURCES.values(), ids=SOURCES)
def test_the_source_of_the_kernels(case, device):
    """As it stands, in torch: what it does is what the emulation does, to the bit but for the order of sums."""
    case = dict(case)
    segments = case.pop("segments", 1)
    (q, k, v, g, h), _ = make("cpu", dtype=torch.bfloat16, **case)

    with gluon_in_torch.kernels_on_a_cpu():
        made = gla_hopper.pairs(q, k, g, 0.3)
        found = gla_hopper.walk(made, v, h, segments)
    expected = pairs_in_torch(q, k, g, 0.3)
    for one, other in zip((*made, *found), (*expected, *walk_in_torch(expected, v, h, segments)), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))
        assert float((one.double() - other.double()).norm()) <= 2e-3 * float(other.double().norm())
