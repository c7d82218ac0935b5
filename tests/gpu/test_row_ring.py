"""Rows that stay in shared memory on Hopper: norms, softmax and their gradients on a GPU."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.thunderkittens import row_ring, rows
from gpu_accel.thunderkittens.row_ring import Ring

from .judging import BF16, FP16, judge, randn

# tiles of several rows whose last one is not full; a row each; a row in parts and in pieces; several programs an SM
FORMS = {
    "1024-rows": (1024, 4001, Ring(rows=4, parts=1, warps=8, stages=4, each=2)),
    "320-rows": (320, 4003, Ring(rows=8, parts=1, warps=8, stages=4, each=2)),
    "4096": (4096, 999, Ring(rows=1, parts=1, warps=8, stages=4, each=2)),
    "5120": (5120, 400, Ring(rows=1, parts=1, warps=8, stages=2, each=2)),  # 80 of 128 lines
    "16384-parts": (16384, 301, Ring(rows=1, parts=4, warps=8, stages=4, each=2, late=2)),
    "50304-parts": (50304, 150, Ring(rows=1, parts=7, warps=16, stages=4)),  # the last one has 18 of 128 lines
    "65536-parts": (65536, 170, Ring(rows=1, parts=8, warps=16, stages=4)),
    "65536-pieces": (65536, 170, Ring(rows=1, parts=16, warps=4, stages=4, each=2, pieces=4, late=2)),
    "65536-one-row": (65536, 1, Ring(rows=1, parts=8, warps=16, stages=4)),
}
OPS = ("softmax", "rms", "layer", "add_rms")


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200")


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Names of the kernels that are launched."""
    names: list[str] = []
    run = row_ring._run
    monkeypatch.setattr(row_ring, "_run", lambda name, *a: names.append(name) or run(name, *a))
    return names


def take(monkeypatch, op: str, width: int, ring: Ring) -> None:
    """Have `auto` take it."""
    monkeypatch.setattr(row_ring, "CHOSEN", {(pass_, op, width): ring for pass_ in ("forward", "backward")})


def function(op: str, backend: str):
    backend = "auto" if backend == "portable" else backend
    if op == "softmax":
        return lambda x: rows.softmax(x, backend=backend)
    if op == "add_rms":
        return lambda x, w, r: rows.rms_norm(x, w, residual=r, prenorm=True, backend=backend)
    if op == "rms":
        return lambda x, w: rows.rms_norm(x, w, backend=backend)
    return lambda x, w, b: rows.layer_norm(x, w, b, backend=backend)


def inputs(op: str, width: int, height: int, dtype: torch.dtype) -> list[torch.Tensor]:
    tensors = [3 + 2 * randn(height, width, seed=1, dtype=dtype)]
    if op != "softmax":
        tensors.append(randn(width, seed=2, dtype=dtype))
    if op == "layer":
        tensors.append(randn(width, seed=3, dtype=dtype))
    return [*tensors, randn(height, width, seed=4, dtype=dtype)] if op == "add_rms" else tensors


def compare(op: str, width: int, height: int, dtype: torch.dtype) -> None:
    names = {"softmax": ["y", "dx"], "rms": ["y", "dx", "dw"], "layer": ["y", "dx", "dw", "db"],
             "add_rms": ["y", "h", "dx", "dw", "dr"]}[op]  # fmt: skip
    tensors = inputs(op, width, height, dtype)
    grads = [randn(height, width, seed=5), randn(height, width, seed=6)][: 1 + (op == "add_rms")]
    floors = {}
    if op == "softmax":  # of y as it was kept, rounded, and rounded itself: half an epsilon of dx each
        y = torch.softmax(tensors[0].double(), 1)
        dx = y * (grads[0].double() - (y * grads[0].double()).sum(1, keepdim=True))
        floors["dx"] = torch.finfo(dtype).eps * dx.abs().max().item()
    judge(names, lambda backend: function(op, backend), tensors, grads, floors=floors)


@pytest.mark.parametrize(("width", "height", "ring"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_rows(dtype, op, width, height, ring, monkeypatch, launched):
    take(monkeypatch, op, width, ring)
    compare(op, width, height, dtype)
    assert launched == ["forward_rows_kernel", "backward_rows_kernel"]


@pytest.mark.parametrize(("op", "width"), sorted({key[1:] for key in row_ring.CHOSEN}))
def test_what_auto_takes(op, width, launched):
    compare(op, width, 4001 if width == 1024 else 301, BF16)
    passes = [pass_ for pass_ in ("forward", "backward") if (pass_, op, width) in row_ring.CHOSEN]
    assert launched == [f"{pass_}_rows_kernel" for pass_ in passes]


@pytest.mark.parametrize("form", ["16384-parts", "65536-parts"])
def test_softmax_of_what_only_differences_keep_in_range(form, monkeypatch):
    width, _, ring = FORMS[form]
    take(monkeypatch, "softmax", width, ring)
    x = randn(3, width, seed=1, dtype=BF16) * 4
    x[0, 100:] = -torch.inf
    x[1, ::3] = 3e4
    x[2] = -torch.inf
    found, wanted = rows.softmax(x), torch.softmax(x.double(), -1)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("op", ["softmax", "layer"])
def test_programs_of_a_row_hear_of_this_launch(op, monkeypatch):
    """Again and again by one buffer of notes, in a graph whose inputs change, and on two streams at once."""
    width, _, ring = FORMS["65536-parts"]
    take(monkeypatch, op, width, ring)
    xs = [inputs(op, width, 129, BF16)[0] * (i + 1) / 4 for i in range(6)]
    run = function(op, "auto")
    more = inputs(op, width, 1, BF16)[1:]
    wanted = [function(op, "reference")(x, *more) for x in xs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    held = xs[0].clone()
    run(held, *more)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(held, *more)
    found = []
    for i, x in enumerate(xs):
        held.copy_(x)
        graph.replay()
        found.append((i, out.clone()))
    torch.cuda.synchronize()
    for i, x in enumerate(xs):
        with torch.cuda.stream(streams[i % 2]):
            found.extend((i, run(x, *more)) for _ in range(5))
    torch.cuda.synchronize()
    for i, y in found:
        torch.testing.assert_close(y.float(), wanted[i].float(), rtol=2**-7, atol=2**-7)
        assert torch.equal(y, next(first for n, first in found if n == i))
