"""The first call of a thread: it has no CUDA context yet, and a tensor map cannot be made without one.

Autograd runs backwards in a thread of its own, so this is every backward that begins with such a kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gpu_accel.thunderkittens as tk
from gpu_accel.flash_attention3 import flash_attn_func, launch

from .judging import BF16, randn

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)


def sequences(seqlen: int, heads: int = 4, dim: int = 128) -> list[Tensor]:
    return [randn(1, seqlen, heads, dim, seed=s, dtype=BF16) for s in (1, 2, 3)]


def attention() -> Callable[[], Tensor]:
    q, k, v = sequences(512)
    return lambda: flash_attn_func(q, k, v, causal=True, backend="hopper")


def product() -> Callable[[], Tensor]:
    a, b = (randn(512, 512, seed=s, dtype=BF16) for s in (1, 2))
    return lambda: tk.gemm(a, b.t(), backend="hopper")


def product_in_8_bits() -> Callable[[], Tensor]:
    a, b = (randn(512, 512, seed=s).to(torch.float8_e4m3fn) for s in (1, 2))
    one = torch.ones((), device="cuda")
    return lambda: tk.gemm(a, b.t(), scale_a=one, scale_b=one)


def walk() -> Callable[[], Tensor]:
    q, k, v = sequences(512)
    return lambda: tk.chunk_retention(q, k, v, backend="hopper")[0]


def segments() -> Callable[[], Tensor]:
    q, k, v = sequences(8192)
    return lambda: tk.chunk_retention(q, k, v, backend="hopper")[0]


def delta_rule() -> Callable[[], Tensor]:
    q, k, v = sequences(512)
    k = torch.nn.functional.normalize(k, dim=-1)  # else the state grows without end
    beta = randn(1, 512, 4, seed=4).sigmoid()
    return lambda: tk.chunk_delta_rule(q, k, v, beta, backend="hopper")[0]


def rows() -> Callable[[], Tensor]:
    x = randn(64, 65536, seed=1, dtype=BF16)
    return lambda: tk.softmax(x, backend="hopper")


MAKERS = [attention, product, product_in_8_bits, walk, segments, delta_rule, rows]


def first_of_a_thread(call: Callable[[], Tensor]) -> Tensor | BaseException:
    """What a call gives or raises in a thread that has called nothing before."""
    for _ in range(3):  # compiled, and memory at hand
        call()
    torch.cuda.synchronize()
    found: list[Tensor | BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    return found[0]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_first_call_of_a_thread(make):
    call = make()
    found = first_of_a_thread(call)
    assert isinstance(found, Tensor), found
    assert torch.equal(found, call())


def test_a_thread_has_no_context_of_its_own(monkeypatch):
    """The test above can fail: without `have_context` it does, unless something else has called CUDA before the map."""
    monkeypatch.setattr(launch, "have_context", lambda: None)
    found = [first_of_a_thread(make()) for make in MAKERS]
    assert any("invalid device context" in str(one) for one in found if isinstance(one, RuntimeError)), found
