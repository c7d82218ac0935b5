"""Host side shared by the Hopper kernels: what they refuse, tensor maps, tile counters, and launching without detours.

`kernel[grid](...)` looks at every argument of every call to choose a compiled variant: 70 us of Python for a kernel
with four tensor maps. Kernels that specialise on nothing (integers in `do_not_specialize`) have one variant per set of
constants, so the caller can name it by a key, and tensor maps of a shape already seen are copied, not validated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpu_accel.flash_attention3 import launch
from gpu_accel.flash_attention3.problem import Problem

_LOG2_E = 1.4426950408889634
_MOST_SHAPES = 4096
_L2_SHARE = 32 * 2**20  # bytes that the heads walked together may hold; the H100 has 50 MB of L2
_maps: dict[tuple, dict] = {}
Launch = tuple[Any, tuple[int, ...], tuple]  # compiled kernel, grid, arguments


class QuickLaunch:
    """One Gluon kernel and its compiled variants."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self._compiled: dict[tuple, Any] = {}

    def __call__(
        self, key: tuple, programs: int | tuple[int, int], arguments: tuple, constants: dict, options: dict
    ) -> Launch | None:
        """Run on a grid of one dimension, or two. Returns what was launched, for `Known`; None where nothing was.

        Args:
            key: everything that tells one variant from another, beside `constants` and the device.
            arguments: run-time arguments, in the kernel's order. constants: constexpr arguments, in the kernel's order.
            options: num_warps and the like.
        """
        if launch._hook is not None:
            launch.launch(self.kernel, programs, arguments, {**constants, **options})
            return None
        launch.have_context()
        values = tuple(constants.values())
        variant = (torch.cuda.current_device(), key, values)
        compiled = self._compiled.get(variant)
        grid = programs if isinstance(programs, tuple) else (programs,)
        if compiled is None:
            compiled = self._compiled[variant] = self.kernel[grid](*arguments, **constants, **options)
        else:
            compiled[(*grid, 1, 1)[:3]](*arguments, *values)
        if (seen := launch._seen) is not None:
            seen(self.kernel, compiled, grid, arguments, {**constants, **options})
        return compiled, (*grid, 1, 1)[:3], (*arguments, *values)


class _At:
    """An address in place of a tensor: all that a compiled kernel asks of one. Keeps no memory alive."""

    __slots__ = ("_address", "dtype")

    def __init__(self, x: Tensor) -> None:
        self._address, self.dtype = x.data_ptr(), x.dtype

    def data_ptr(self) -> int:
        return self._address


class Known:
    """Launches whose arguments have been worked out before, by all that decides them: shapes, options and addresses.

    A step of training comes back to the addresses of the one before, and to look them up takes a fifth of the time of
    working arguments out. A counter of tiles is that of the stream, and asked for each time.
    """

    def __init__(self, most: int = 1024) -> None:
        self.most = most
        self._launches: dict[tuple, tuple] = {}

    def again(self, key: tuple, device: torch.device) -> Any:
        """Launch what `key` stands for, and return what was kept with it; None: it is not known, or is to be seen."""
        found = self._launches.get(key)
        if found is None or launch._hook is not None or launch._seen is not None:
            return None
        launch.have_context()
        compiled, grid, arguments, counters, result = found
        if counters:
            arguments = list(arguments)
            for i in counters:
                arguments[i] = tile_counter(device)
        compiled[grid](*arguments)
        return result

    def keep(self, key: tuple, made: Launch | None, counter: Tensor | None, result: Any = True) -> None:
        """`made`: what QuickLaunch returned. `counter`: the counter among its arguments."""
        if made is None or made[0] is None:  # nothing was launched, or by the interpreter
            return
        if len(self._launches) >= self.most:
            self._launches.clear()
        compiled, grid, arguments = made
        counters = [i for i, x in enumerate(arguments) if x is counter and counter is not None]
        self._launches[key] = (compiled, grid, tuple(_without_memory(x) for x in arguments), counters, result)

    def clear(self) -> None:
        self._launches.clear()


def _without_memory(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _At(x)
    if not isinstance(x, _descriptor_class()):
        return x
    made = object.__new__(type(x))
    made.__dict__.update(vars(x))
    made.base = _At(x.base)
    return made



def tensor_map(x: Tensor, rows: int, cols: int):
    """Blocks of one head, `rows` x `cols`, of a (batch, seqlen, heads, dim) view; zeros outside, clipped on writing.

    The map is over (batch, heads, seqlen, dim).
    """

    def new(kind: Any) -> Any:
        batch, seqlen, heads, dim = x.shape
        by_batch, by_row, by_head, _ = x.stride()
        return _new_map(kind, x, (batch, heads, seqlen, dim), (by_batch, by_head, by_row, 1), (1, 1, rows, cols))

    return known_map((x.shape, x.stride(), x.dtype, rows, cols), x, new)


def block_map(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]):
    """Blocks of memory of x seen as `shape` with `strides`, the last of which is 1."""
    return known_map((shape, strides, block, x.dtype), x, lambda kind: _new_map(kind, x, shape, strides, block))


def fragment_map(x: Tensor) -> Any:
    """Fragments of a contiguous float32 tensor, 4096 numbers each, as 16 rows of 256."""

    def new(kind: Any) -> Any:
        from triton.experimental.gluon import language as gl

        return kind(x, [x.numel() // 256, 256], [256, 1], [16, 256], gl.NVMMASharedLayout(0, 32, 2))

    return known_map(("fragments", x.numel()), x.view(-1), new)


def number_map(x: Tensor, length: int) -> Any:
    """Blocks of `length` consecutive numbers of a contiguous float32 tensor."""

    def new(kind: Any) -> Any:
        from triton.experimental.gluon import language as gl

        return kind(x, [x.numel()], [1], [length], gl.NVMMASharedLayout(0, 32, 1))

    return known_map(("numbers", x.numel(), length), x.view(-1), new)


def known_map(key: tuple, base: Tensor, make: Callable[[Any], Any]) -> Any:
    """A descriptor over `base`, by make(its class) the first time and after that as it was made for the same key."""
    fields = _maps.get(key)
    kind = _descriptor_class()
    if fields is None:
        if len(_maps) >= _MOST_SHAPES:
            _maps.clear()
        fields = vars(make(kind)).copy()
        _maps[key] = {**fields, "base": None}  # holds no memory alive
    made = object.__new__(kind)
    made.__dict__.update(fields)
    made.base = base
    return made


@functools.cache
def _descriptor_class() -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor


def _new_map(kind: Any, x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]):
    from triton.experimental.gluon import language as gl

    element = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5,
    }[x.dtype]  # fmt: skip
    layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
    unit = 16 // x.element_size()  # strides of dimensions of size 1 do not matter, but must be 16-byte multiples
    steps = [s if n > 1 else unit for n, s in zip(shape[:-1], strides[:-1], strict=True)]
    return kind(x, list(shape), [*steps, 1], list(block), layout)


def refusal(problem: Problem) -> str | None:
    """Why no Hopper kernel for dense q, k, v of one head_dim can run this problem, or None."""
    why = machine_refusal(problem)
    if why is not None:
        return why
    if problem.varlen:
        return "packed sequences (cu_seqlens) are not in this kernel yet"
    if problem.head_dim != problem.head_dim_v:
        return "head_dim of v must equal that of q and k"
    return None


def machine_refusal(
    problem: Problem, capability: tuple[int, int] = (9, 0), cards: str = "H100, H200"
) -> str | None:  # fmt: skip
    """What is wrong with the machine, the dtype or this Triton, or None."""
    if (why := capability_refusal(problem.device_type, problem.capability, capability, cards)) is not None:
        return why
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {problem.dtype}"
    if not gluon_available():
        return "this Triton has no usable Gluon dialect"
    return None


def capability_refusal(
    device_type: str, found: tuple[int, int] | None, needed: tuple[int, int] = (9, 0), cards: str = "H100, H200"
) -> str | None:
    """Why kernels of one compute capability cannot run here, or None."""
    if device_type != "cuda" or found is None:
        return "needs an NVIDIA GPU of compute capability {}.{}, got a {} tensor".format(*needed, device_type)
    if found != needed:
        return "needs compute capability {}.{} ({}), got {}.{}".format(*needed, cards, *found)
    return None


@functools.cache
def gluon_available() -> bool:
    """Whether this Triton can import the kernels at all."""
    try:
        from gpu_accel.flash_attention3 import hopper_backward_kernel, hopper_forward  # noqa: F401
    except ImportError:
        return False
    return True


def addressable(x: Tensor) -> Tensor:
    """x, or one contiguous copy where the copy engine cannot address it (a base or strides off 16 bytes, or 0)."""
    if x.stride(-1) == 1 and launch.tma_refusal(x) in (None, "no GPU"):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # .contiguous() would return a misaligned x itself


_Counters = dict[tuple[torch.device, int], Tensor]
_counters: _Counters = {}
_counters_of_graph: _Counters | None = None


def tile_counter(device: torch.device) -> Tensor:
    """A zero that a kernel counts up and resets itself, one a stream: launches of one stream never overlap."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    counters = _counters_of_graph if capturing else _counters
    if device.type != "cuda" or counters is None:
        return torch.zeros(1, dtype=torch.int32, device=device)  # under capture it lives in the graph's pool
    key = (device, torch._C._cuda_getCurrentRawStream(device.index))
    counter = counters.get(key)
    if counter is None:
        counter = counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counter


@contextmanager
def counters_of_a_graph(kept: _Counters) -> Iterator[None]:
    """One counter for each stream of a CUDA graph that is captured meanwhile, filled once a replay; else each launch
    has one of its own, and a kernel that fills it. Whoever keeps the graph keeps `kept`."""
    global _counters_of_graph
    before, _counters_of_graph = _counters_of_graph, kept
    try:
        yield
    finally:
        _counters_of_graph = before


def score_scales(softmax_scale: float, softcap: float, *, natural: bool = False) -> tuple[float, float]:
    """(scale, exp_scale) of the forwards: q k^T * scale goes into tanh under a soft cap, or is what a bias or a
    score_mod sees (natural); what comes out, or else q k^T, * exp_scale is in base 2."""
    if softcap > 0:
        return softmax_scale / softcap, _LOG2_E
    return softmax_scale, _LOG2_E if natural else softmax_scale * _LOG2_E


def heads_per_group(heads: int, bytes_per_head: int, share: int = _L2_SHARE) -> int:
    """Largest power of two of heads whose working set fits `share` bytes of L2, dividing their number."""
    group = 1
    while group * 2 * bytes_per_head <= share and heads % (group * 2) == 0:
        group *= 2
    return group


def programs_for(tiles: int, device: torch.device, *, queue: bool) -> int:
    """How many programs walk `tiles`: one a multiprocessor; where tiles are dealt in order, fewer that end together.

    2048 tiles are 16 rounds of 132 programs or of 128: what would be idle in the last round is so all the time, and
    heads of 2^n tiles don't straddle rounds (0.5 to 0.9 % faster at head_dim 128 and 256 on an H200).
    """
    most = min(multiprocessors(device), tiles)
    return most if queue or most == 0 else -(-tiles // -(-tiles // most))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # compiling without a GPU
    return torch.cuda.get_device_properties(device).multi_processor_count
