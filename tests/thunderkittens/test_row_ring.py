"""Rows that stay in shared memory on Hopper: what the source of the kernels does, run in torch on a CPU."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.thunderkittens import row_ring, rows
from gpu_accel.thunderkittens.row_ring import Ring
from tests import gluon_in_torch
from tests.thunderkittens.helpers import close, randn, run

BF16, FP16 = torch.bfloat16, torch.float16
# tiles of several rows whose last one is not full; several tiles a program; a row in parts, and in pieces of a part
RINGS = {
    "rows": (512, 21, Ring(rows=4, parts=1, warps=4, stages=2)),
    "pieces": (1024, 5, Ring(rows=1, parts=1, warps=2, stages=3, pieces=2)),
    "parts": (1024, 11, Ring(rows=1, parts=2, warps=2, stages=3)),
    "parts-pieces": (2048, 3, Ring(rows=1, parts=4, warps=1, stages=3, pieces=2)),
    "rows-not-full": (320, 14, Ring(rows=4, parts=1, warps=4, stages=2)),
    "parts-not-full": (1088, 9, Ring(rows=1, parts=3, warps=2, stages=3)),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(row_ring, "_machine", lambda _: True)
    monkeypatch.setattr(row_ring, "multiprocessors", lambda _: 4)


def taken(monkeypatch, op: str, width: int, ring: Ring) -> None:
    monkeypatch.setattr(row_ring, "CHOSEN", {(pass_, op, width): ring for pass_ in ("forward", "backward")})


@pytest.mark.parametrize(("width", "count", "ring"), RINGS.values(), ids=RINGS)
@pytest.mark.parametrize("op", ["rms", "layer", "add_rms"])
def test_norms(op, width, count, ring, monkeypatch):
    taken(monkeypatch, op, width, ring)
    dtype = FP16 if op == "layer" else BF16
    tensors = [(3 + randn(count, width, seed=1)).to(dtype), randn(width, seed=2, dtype=dtype)]
    tensors.append(randn(width, seed=3, dtype=dtype) if op == "layer" else None)
    tensors.append(randn(count, width, seed=4, dtype=dtype) if op == "add_rms" else None)

    def norm(way):
        def call(x, w, b, r):
            if way == "reference":
                return rows._norm(x, w, b, r, 1e-5, 0.0, 0, r is not None, way, op == "layer")
            y, h, _, _ = rows.norm_op(x, r, w, b, 1e-5, op == "layer", 0.0, 0, r is not None, rows.WHOLE, way)
            return y if r is None else (y, h)

        return call

    grads = [randn(count, width, seed=s) for s in (5, 6)][: 1 + (op == "add_rms")]
    with gluon_in_torch.kernels_on_a_cpu() as done:
        mine = run(norm("auto"), tensors, grads)
    assert done == ["forward_rows_kernel", "backward_rows_kernel"]
    truth, ruler = (run(norm("reference"), tensors, grads, kind) for kind in (torch.float64, None))
    names = ("y", "h", "dx", "dw", "db", "dr") if op == "add_rms" else ("y", "dx", "dw", "db", "dr")
    for name, *three in zip(names, mine, truth, ruler, strict=True):
        if three[0] is not None:
            close(name, *three)


@pytest.mark.parametrize(("width", "count", "ring"), RINGS.values(), ids=RINGS)
def test_softmax(width, count, ring, monkeypatch):
    taken(monkeypatch, "softmax", width, ring)
    x = randn(count, width, seed=1, dtype=BF16) * 4
    x[0, 100:] = -torch.inf  # threads and parts of nothing
    x[1, ::3] = 1e30  # numbers that only differences keep in range
    grads = [randn(count, width, seed=2)]
    with gluon_in_torch.kernels_on_a_cpu() as done:
        mine = run(lambda t: rows.softmax_op(t, rows.WHOLE, "auto"), [x], grads)
        nothing = rows.softmax_op(torch.full_like(x, -torch.inf), rows.WHOLE, "auto")
    assert done == ["forward_rows_kernel", "backward_rows_kernel", "forward_rows_kernel"]
    assert nothing.isnan().all()
    truth, ruler = (run(lambda t: torch.softmax(t, -1), [x], grads, kind) for kind in (torch.float64, None))
    for name, *three in zip(("y", "dx"), mine, truth, ruler, strict=True):
        close(name, *three)


def test_what_programs_told_each_other_is_cleared(monkeypatch):
    """Notes of a launch would be taken for those of the next one."""
    width, count, ring = RINGS["parts"]
    taken(monkeypatch, "softmax", width, ring)
    found = []
    made = row_ring._notes
    monkeypatch.setattr(row_ring, "_notes", lambda *a: found.append(made(*a)) or found[-1])
    with gluon_in_torch.kernels_on_a_cpu():
        rows.softmax_op(randn(count, width, seed=1, dtype=BF16), rows.WHOLE, "auto")
    assert found[0].dtype == torch.int64 and not found[0].any()


def test_a_large_mean_does_not_spoil_the_variance(monkeypatch):
    for width, _, ring in RINGS.values():
        taken(monkeypatch, "layer", width, ring)
        x = (1000 + 16 * randn(2, width, seed=1)).to(BF16)
        with gluon_in_torch.kernels_on_a_cpu() as done:
            y, _, means, rstds = rows.norm_op(x, None, None, None, 1e-5, True, 0.0, 0, False, rows.WHOLE, "auto")
        assert done
        wide = x.double()
        torch.testing.assert_close(means.double(), wide.mean(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(rstds.double(), (wide.var(1, correction=0) + 1e-5).rsqrt(), rtol=1e-5, atol=0)


NOT_TAKEN = {
    "portable": dict(way="portable"),
    "another-width": dict(width=256),
    "float32": dict(dtype=torch.float32),
    "weight-in-float32": dict(weight=torch.float32),
    "a-view": dict(step=2),
    "dropout": dict(dropout=0.5),
}


@pytest.mark.parametrize("case", NOT_TAKEN.values(), ids=NOT_TAKEN)
def test_what_plain_triton_gets(case, monkeypatch, device):
    taken(monkeypatch, "rms", 512, Ring(rows=4, parts=1, warps=4, stages=2))
    case = dict(way="auto", width=512, dtype=BF16, weight=None, step=1, dropout=0.0) | case
    x = randn(2, case["width"] * case["step"], seed=1, dtype=case["dtype"])[:, : case["width"]]
    w = randn(case["width"], seed=2, dtype=case["weight"] or case["dtype"])
    with gluon_in_torch.kernels_on_a_cpu() as done:
        rows.norm_op(x, None, w, None, 1e-5, False, case["dropout"], 1, case["dropout"] > 0, rows.WHOLE, case["way"])
    assert not done


@pytest.mark.parametrize(("key", "ring"), row_ring.CHOSEN.items(), ids=str)
def test_forms_fit_an_sm(key, ring):
    pass_, op, width = key
    lines = rows.next_power_of_2(-(-(width // 64) // ring.parts)) * ring.rows
    tensors = 1 + (pass_ == "backward") + (op == "add_rms")
    vectors = 0 if op == "softmax" else 2 if (pass_, op) == ("forward", "layer") else 1
    shared = 128 * lines * (ring.stages * tensors + vectors / ring.rows) + 700  # barriers, and what reductions pass on
    assert ring.each * (shared + 1024) <= 228 * 1024  # each program takes 1 KB more
    assert ring.each * ring.warps <= 16 and lines % (4 * ring.warps * ring.pieces) == 0
    assert (ring.parts - 1) * lines < width // 64 or ring.parts == 1  # no part is empty


def test_a_form_that_would_wait_for_itself_is_refused():
    with pytest.raises(ValueError, match="would wait for itself"):
        Ring(rows=1, parts=4, warps=4, stages=3, late=2)
