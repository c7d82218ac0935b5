"""Launches that are known by their addresses: the second of two equal calls has the arguments of the first."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from gpu_accel.flash_attention3 import gluon_launch, launch
from gpu_accel.ring_attention import hopper_backward, hopper_merge
from gpu_accel.ring_attention.masks import Piece

WHOLE = Piece(0, 256, 0, 256)


class Compiled:
    """A compiled kernel that writes down what it is launched with."""

    def __init__(self) -> None:
        self.launched: list[tuple] = []

    def __getitem__(self, grid: tuple):
        return lambda *arguments: self.launched.append((grid, *(_plain(x) for x in arguments)))


def _plain(x: object) -> object:
    if hasattr(x, "base"):
        return (x.base.data_ptr(), x.base.dtype, x.shape, x.strides, x.block_shape)
    return x.data_ptr() if hasattr(x, "data_ptr") else x


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    made = Compiled()

    def kernel(key: tuple, programs: int, arguments: tuple, constants: dict, options: dict) -> tuple:
        made[programs, 1, 1](*arguments, *constants.values())
        made.launched.append(("worked out",))
        return made, (programs, 1, 1), (*arguments, *constants.values())

    monkeypatch.setattr(hopper_backward, "_kernel", lambda apart=False: kernel)
    monkeypatch.setattr(hopper_merge, "_kernel", lambda: kernel)
    for module in (hopper_backward, hopper_merge):
        monkeypatch.setattr(module, "_known", gluon_launch.Known())
    counter = torch.zeros(1, dtype=torch.int32)  # of a stream, as on a GPU
    for module in (gluon_launch, hopper_backward, hopper_merge):
        monkeypatch.setattr(module, "tile_counter", lambda device: counter)
    return made


def _backward(half: int | None):
    q = torch.zeros(1, 256, 4, 128, dtype=torch.bfloat16)
    statistics = torch.zeros(1, 4, 256)
    work = hopper_backward.Gradients(q, q, statistics, statistics, softmax_scale=0.1, softcap=0.0)
    into = torch.zeros(hopper_backward.sum_size(q))
    return lambda piece=WHOLE, k=q: work.add(piece, k, k, into, half)


def _forward(half: int | None):
    q, o, lse = torch.zeros(1, 256, 4, 128, dtype=torch.bfloat16), torch.zeros(1, 256, 4, 128), torch.zeros(1, 4, 256)
    options = {"first": False, "done": (0, 100), "softmax_scale": 0.1, "queued": half is not None}
    return lambda piece=WHOLE, k=q: hopper_merge.forward_merge(
        q[:, piece.q0 :], k, k, o, lse, q, row=piece.q0, **options
    )


@pytest.mark.parametrize("half", [None, 0])
@pytest.mark.parametrize("make", [_backward, _forward])
def test_the_second_call_has_the_arguments_of_the_first(make, half: int | None, compiled: Compiled):
    run = make(half)
    assert run() == run()
    first, worked_out, second = compiled.launched
    assert worked_out == ("worked out",) and first == second


@pytest.mark.parametrize("make", [_backward, _forward])
def test_what_differs_is_worked_out(make, compiled: Compiled):
    run = make(None)
    run()
    kept = torch.zeros(1, 256, 4, 128, dtype=torch.bfloat16)
    for change in ({"k": kept}, {"k": kept[:, :128]}, {"piece": Piece(64, 192, 0, 256)}):
        before = len(compiled.launched)
        run(**change)
        assert compiled.launched[before + 1] == ("worked out",), change
        run(**change)
        assert len(compiled.launched) == before + 3


@pytest.mark.parametrize("make", [_backward, _forward])
def test_who_looks_on_sees_every_launch(make, compiled: Compiled, monkeypatch: pytest.MonkeyPatch):
    run = make(None)
    run()
    monkeypatch.setattr(launch, "_seen", lambda *_: None)
    run()
    assert compiled.launched.count(("worked out",)) == 2


def test_what_is_known_keeps_no_memory(compiled: Compiled):
    k = torch.zeros(1, 256, 4, 128, dtype=torch.bfloat16)
    gone = weakref.ref(k)
    _backward(None)(k=k)
    del k
    gc.collect()
    assert gone() is None and len(hopper_backward._known._launches) == 1


def test_of_many_the_oldest_are_forgotten():
    known, made = gluon_launch.Known(most=2), Compiled()
    for i in range(5):
        known.keep((i,), (made, (1, 1, 1), (i,)), None)
    device = torch.device("cpu")
    assert known.again((0,), device) is None and known.again((4,), device) is True
    assert made.launched == [((1, 1, 1), 4)]
