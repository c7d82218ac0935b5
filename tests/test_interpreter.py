"""The quicker preparation of Triton's interpreter: the same results, nothing left behind, and still worth having."""

from __future__ import annotations

import inspect
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from gpu_accel.compat import INTERPRET, widen
from gpu_accel.interpreter import quicken

pytestmark = pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")


@triton.jit
def _twice(x):
    return tl.sum(x.to(tl.float32), 0) + tl.sum(x, axis=0)


@triton.jit
def _kernel(x_ptr, y_ptr, N: tl.constexpr, WRONG: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.static_assert(not WRONG, "asked for")
    tl.store(y_ptr + tl.program_id(0), _twice(x))


def language() -> dict[tuple[str, str], object]:
    places = (tl, tl.core, tl.tensor, tl.math, tl.dtype, tl.core.tensor_descriptor_base)
    return {(repr(place), name): getattr(place, name) for place in places for name in dir(place)}


def test_device_functions_work_and_the_language_is_as_before() -> None:
    before = language()
    x, y = torch.arange(16.0), torch.full((3,), float("nan"))
    for _ in range(2):
        _kernel[(3,)](x, y, 16, False)
        assert (y == 240).all()
        after = language()
        assert before.keys() == after.keys()
        assert [key for key in before if before[key] != after[key]] == []


@triton.jit
def _count(n_ptr, y_ptr):
    total = 0
    for _ in tl.range(0, tl.load(n_ptr)):
        total += 1
    tl.store(y_ptr, total)


SCRIPT = """import sys, torch
sys.path.insert(0, sys.argv[1])
import gpu_accel.compat
from test_interpreter import _count
y = torch.zeros(1, dtype=torch.int32)
_count[(1,)](torch.tensor([5], dtype=torch.int32), y)
print(int(y))
"""


@pytest.mark.parametrize("compile_environment", ["3.6.0"], indirect=True)
def test_a_loop_to_a_number_that_was_loaded(compile_environment: dict[str, str]) -> None:
    """NumPy 2.4 makes no int of an array of one element, which is what Triton 3.6.0 asks of it."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)], capture_output=True, text=True,
        env={**compile_environment, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.stdout == "5\n", done.stderr[-2000:]


def test_an_error_leaves_nothing_behind_either() -> None:
    before = language()
    with pytest.raises(Exception, match="asked for"):
        _kernel[(1,)](torch.ones(16), torch.ones(1), 16, True)
    assert before == language()


def test_threads_launch_one_after_the_other() -> None:
    """The end of one launch took the language away from another that was under way."""

    def launched(number: int) -> list[float]:
        x, y = torch.full((16,), float(number)), torch.zeros(40)
        for _ in range(3):
            _kernel[(40,)](x, y, 16, False)
        return y.tolist()

    before = language()
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(launched, range(6))) == [[32.0 * number] * 40 for number in range(6)]
    with ThreadPoolExecutor(1) as threads, pytest.raises(Exception, match="asked for"):
        threads.submit(_kernel[(1,)], torch.ones(16), torch.ones(1), 16, True).result()
    assert launched(1) == [32.0] * 40 and before == language()


def test_a_launch_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    x, y = torch.ones(16), torch.zeros(3)
    _kernel[(3,)](x, y, 16, False)
    prepared = []
    prepare = interpreter._patch_lang
    monkeypatch.setattr(interpreter, "_patch_lang", lambda fn: prepared.append(fn) or prepare(fn))
    _kernel[(3,)](x, y, 16, False)
    assert len(prepared) == 1


def test_triton_still_needs_it() -> None:
    """By itself the interpreter prepares the language in each call of a device function: otherwise this can go."""
    from triton.runtime import interpreter

    assert quicken(), "not the interpreter that is known"
    text = inspect.getsource(interpreter)
    call = text.split("class InterpretedFunction")[1].split("def __call__")[1]
    assert "_patch_lang(self.fn)" in call and "getmembers" in text


@triton.jit
def _widen_kernel(x, y, N: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, widen(tl.load(x + i).to(KIND, bitcast=True), y.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "eight"), [(tl.float8e4nv, torch.float8_e4m3fn), (tl.float8e5, torch.float8_e5m2)])
def test_every_number_of_eight_bits_is_widened(kind, eight, dtype):
    codes, wide = torch.arange(256).to(torch.uint8), torch.zeros(256, dtype=dtype)
    _widen_kernel[(1,)](codes, wide, 256, kind)
    right = codes.view(eight).to(dtype)
    assert (right.isnan().sum(), right.isinf().sum()) == ((2, 0) if eight == torch.float8_e4m3fn else (6, 2))
    torch.testing.assert_close(wide, right, rtol=0, atol=0, equal_nan=True)


def test_numpy_types_are_those_that_the_interpreter_stores() -> None:
    from triton.runtime import interpreter

    stored = {tl.float32: "float32", tl.bfloat16: "uint16", tl.float8e4nv: "uint8", tl.int1: "bool", tl.int64: "int64"}
    for dtype, name in stored.items():
        for one in (dtype, tl.block_type(dtype, [4]), dtype):
            assert interpreter._get_np_dtype(one).name == name
    address = tl.pointer_type(tl.float32)
    assert {interpreter._get_np_dtype(one).name for one in (address, tl.block_type(address, [4]))} == {"uint64"}
