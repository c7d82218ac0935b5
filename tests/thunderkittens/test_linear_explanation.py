"""What explain_linear says is what a call decides by."""

from __future__ import annotations

import re

import pytest
import torch

import gpu_accel.thunderkittens as tk
from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.thunderkittens import linear, walk_hopper


def make(key_dim=128, value_dim=128, heads=2, heads_q=2, dtype=torch.bfloat16, seqlen=100):
    q = torch.zeros(1, seqlen, heads_q, key_dim, dtype=dtype)
    return q, q, torch.zeros(1, seqlen, heads, value_dim, dtype=dtype)


def test_on_a_cpu():
    told = tk.explain_linear(*make()).splitlines()
    assert told[:2] == ["forward    reference: plain torch", "gradients  reference: plain torch"]
    assert told[2].startswith("not taken  hopper: needs an NVIDIA GPU of compute capability 9.0")
    with pytest.raises(UnsupportedError, match="backend 'hopper': needs an NVIDIA GPU"):
        tk.explain_linear(*make(), backend="hopper")
    with pytest.raises(InvalidInputError, match="q and k must have one shape"):
        q, k, v = make()
        tk.explain_linear(q, k[:, 1:], v)


@pytest.mark.parametrize(
    ("dtype", "key_dim", "way"),
    [(torch.bfloat16, 64, "one walk"), (torch.bfloat16, 16, "all chunks"), (torch.float16, 64, "all chunks")],
    ids=["bf16-K64", "bf16-K16", "fp16-K64"],
)
def test_portable_ways(dtype, key_dim, way):
    told = tk.explain_linear(*make(key_dim, dtype=dtype), backend="portable")
    assert f"forward    portable: plain Triton, {way}" in told


GATES, WEIGHTS = (torch.zeros(1, 100, 2) for _ in range(2))
WANTED = GATES.clone().requires_grad_()
HOPPER = {
    "no-gates": (make(), {}, "hopper: walks"),
    "constant-gates": (make(), dict(g=GATES), "hopper: walks"),
    "gates": (make(), dict(g=WANTED), "hopper: walks"),
    "mamba": (make(128, 64), dict(g=WANTED, w=WEIGHTS), "hopper: walks"),
    "K72": (make(72), {}, "portable: plain Triton .walks in Gluon: not for K = 72, V = 128 without gates' gradients"),
    "shared": (make(heads_q=1), {}, "portable: plain Triton .*heads that share queries and keys"),
    "weights-alone": (make(), dict(g=GATES, w=WEIGHTS), "portable: plain Triton .*weights without gradients"),
    "states": (
        make(64, 64), dict(g=WANTED, w=WEIGHTS, initial_state=torch.zeros(1, 2, 64, 64)), "portable: .*states given",
    ),
}


@pytest.mark.parametrize(("tensors", "more", "gradients"), HOPPER.values(), ids=HOPPER)
def test_on_hopper(tensors, more, gradients, monkeypatch):
    monkeypatch.setattr(walk_hopper, "machine_refusal", lambda *_, **__: None)
    forward, told = tk.explain_linear(*tensors, backend="hopper", **more).splitlines()
    assert forward == "forward    hopper: a walk over the chunks in Gluon"
    assert re.match(f"gradients  {gradients}", told), told


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unasked_on_hopper(dtype, monkeypatch):
    monkeypatch.setattr(walk_hopper, "machine_refusal", lambda *_, **__: None)
    monkeypatch.setattr(linear, "choose", lambda *_, **__: "portable")
    forward, gradients = tk.explain_linear(*make(dtype=dtype)).splitlines()
    assert forward == "forward    hopper: a walk over the chunks in Gluon"
    assert gradients == "gradients  hopper: walks in Gluon"


def test_packed_sequences_are_not_for_hopper(monkeypatch):
    monkeypatch.setattr(walk_hopper, "machine_refusal", lambda *_, **__: None)
    told = tk.explain_linear(*make(), cu_seqlens=torch.tensor([0, 40, 100]), backend="portable")
    assert "not taken  hopper: packed sequences" in told
