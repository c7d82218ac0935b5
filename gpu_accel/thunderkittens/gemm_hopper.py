"""Host side of the Hopper matrix product: what it takes, its tiles, tensor maps and launch."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, multiprocessors
from gpu_accel.flash_attention3.launch import capability

ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
SHARED = 227 * 1024  # bytes that one program can have
_ALIGNMENT = 16  # bytes, for addresses and row strides that TMA can take
_MOST_SHAPES = 4096
_WORTH_A_COPY = 256  # rows and columns from which on copying an operand costs less than plain Triton
_COUNTERS = 1 << 20  # set aside once a device for captured launches, which must not share theirs
_maps: dict[tuple, dict] = {}


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """Tiles of the persistent kernel: `64 * consumers` x `bn`, slices of `bk`, columns of `group` tile rows at a time.

    `chunks`: column pieces in which a consumer writes its rows; 2 takes half the shared memory.
    `deal`: tiles that would be a last, partly idle round are dealt to all SMs in slices of K; off, since it was slower.
    """

    consumers: int = 2
    bn: int = 256
    bk: int = 64
    stages: int = 4
    group: int = 16
    chunks: int = 2
    deal: bool = False

    def registers(self) -> tuple[int, int, int]:
        """(cap at launch, per consumer thread, per producer thread) that share one SM's 65536 registers."""
        threads = 32 * (4 * self.consumers + 4)
        producer = 24 if self.consumers <= 2 else 32
        return 65536 // threads // 8 * 8, min(240, (512 - producer) // self.consumers // 8 * 8), producer


def matrix_map(x: Tensor, rows: int, cols: int):
    """TMA map over a (rows, columns) view with stride 1 along its columns, in blocks of rows x cols."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    key = (x.shape, x.stride(), x.dtype, rows, cols)
    fields = _maps.get(key)
    if fields is None:
        if len(_maps) >= _MOST_SHAPES:
            _maps.clear()
        fields = vars(_new_map(TensorDescriptor, x, rows, cols)).copy()
        _maps[key] = {**fields, "base": None}  # holds no memory alive
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(fields)
    made.base = x
    return made


def _new_map(kind, x: Tensor, rows: int, cols: int):
    from triton.experimental.gluon import language as gl

    element = {
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.float8_e5m2: gl.float8e5,
    }[x.dtype]
    block = [rows, cols]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    stride = x.stride(0) if x.shape[0] > 1 else -(-x.shape[1] * x.element_size() // 16) * 16 // x.element_size()
    return kind(x, list(x.shape), [stride, 1], block, layout)


def k_major(x: Tensor, k_axis: int) -> bool | None:
    """Whether TMA can walk x along K (True), across K (False) or not at all (None)."""
    for axis in (k_axis, 1 - k_axis):
        other = 1 - axis
        if x.stride(axis) != 1 and x.shape[axis] > 1:
            continue
        pitch = x.stride(other) * x.element_size()
        if x.shape[other] > 1 and (pitch % _ALIGNMENT or not 0 < pitch < 1 << 40):
            continue
        if x.shape[other] > 1 and x.stride(other) < x.shape[axis]:
            continue
        return axis == k_axis
    return None


def machine_refusal(x: Tensor) -> str | None:
    """What is wrong with the machine or this Triton, or None."""
    if x.device.type != "cuda" or torch.version.hip:
        return f"needs an NVIDIA GPU of compute capability 9.0, got a {x.device.type} tensor"
    if capability(x.device) != (9, 0):
        return "needs compute capability 9.0 (H100, H200), got {}.{}".format(*capability(x.device))
    if not gluon_available():
        return "this Triton has no usable Gluon dialect"
    return None


def refusal(a: Tensor, b: Tensor) -> str | None:
    """Why the Hopper kernel cannot multiply a (M, K) and b (K, N), or None."""
    why = machine_refusal(a)
    if why is not None:
        return why
    return layout_refusal(a, b)


def layout_refusal(a: Tensor, b: Tensor) -> str | None:
    if a.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {a.dtype}"
    for name, x in (("a", a), ("b", b)):
        if max(x.shape) >= 1 << 30:
            return f"{name} has a side of 2^30 or more"
    for name, x, k_axis in (("a", a, 1), ("b", b, 0)):
        why = _no_map(x, k_axis)
        if why is not None and min(a.shape[0], b.shape[1]) < _WORTH_A_COPY:
            return f"{name} has {why}, and with fewer than {_WORTH_A_COPY} rows or columns a copy would cost too much"
    return None


def _no_map(x: Tensor, k_axis: int) -> str | None:
    """Why TMA cannot read x where it is, or None."""
    if x.data_ptr() % _ALIGNMENT:
        return "an address that is no multiple of 16 bytes"
    if k_major(x, k_axis) is None:
        return f"strides {x.stride()}: one must be 1 and the other a multiple of 16 bytes"
    return None


def copied(a: Tensor, b: Tensor) -> list[str]:
    """Which operands are copied first, and why."""
    found = ((name, _no_map(x, k_axis)) for name, x, k_axis in (("a", a, 1), ("b", b, 0)))
    return [f"{name} is copied first: it has {why}" for name, why in found if why is not None]


def addressable(x: Tensor, k_axis: int) -> Tensor:
    """x, or a copy that TMA can read: K contiguous, rows at multiples of 16 bytes."""
    if _no_map(x, k_axis) is None:
        return x
    rows, cols = x.shape if k_axis == 1 else x.shape[::-1]
    unit = _ALIGNMENT // x.element_size()
    copy = torch.empty(rows, -(-cols // unit) * unit, dtype=x.dtype, device=x.device)[:, :cols]
    copy.copy_(x if k_axis == 1 else x.t())
    return copy if k_axis == 1 else copy.t()


def on_device(x: Tensor):
    """Kernels go to the current device: make it that of x."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def kernel_for(a: Tensor, b: Tensor) -> str:
    """ "skinny" for few rows or few tiles, else "hopper"; for operands that `refusal` lets through."""
    m, k, n = *a.shape, b.shape[1]
    if k_major(a, 1) is False:
        return "hopper"
    width = 128 if k_major(b, 0) else 256  # of the tiles that `gemm_config` takes where there are few
    few_tiles = -(-m // 128) * -(-n // width) * 2 <= multiprocessors(a.device) - (8 if width == 128 else 0)
    return "skinny" if m <= 64 or (few_tiles and k >= 512) else "hopper"


@functools.cache
def gluon_available() -> bool:
    """Whether this Triton can import the kernels at all."""
    try:
        from gpu_accel.thunderkittens import gemm_kernel, gemm_skinny_kernel  # noqa: F401
    except ImportError:
        return False
    return True


_by_stream: dict[tuple[torch.device, int], Tensor] = {}
_for_graphs: dict[torch.device, tuple[Tensor, int]] = {}


def zero_counters(device: torch.device, number: int) -> Tensor:
    """`number` zeros that a launch leaves as zeros, for it alone: launches of one stream never overlap."""
    if device.type != "cuda":
        return torch.zeros(number, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        pool, used = _for_graphs.get(device, (None, 0))
        if pool is None or used + number > _COUNTERS:
            return torch.zeros(number, dtype=torch.int32, device=device)  # cleared again by every replay
        _for_graphs[device] = pool, used + number
        return pool[used : used + number]
    if device not in _for_graphs:
        _for_graphs[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device), 0
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    counters = _by_stream.get(key)
    if counters is None or counters.numel() < number:
        counters = _by_stream[key] = torch.zeros(max(number, 1024), dtype=torch.int32, device=device)
    return counters


@functools.cache
def _kernel() -> QuickLaunch:
    from .gemm_kernel import gemm_kernel

    return QuickLaunch(gemm_kernel)


def dealt_tiles(tiles: int, k_steps: int, programs: int) -> int:
    """How many tiles are dealt in slices: those of the last round, where that gains more than sharing them costs.

    Idle time is (1 - rest / programs) of k_steps; leaving, counting and adding sums costs about 12 (an estimate).
    """
    rest = tiles % programs
    worth = rest and (programs - rest) * k_steps >= 12 * programs and rest * k_steps >= 4 * programs
    return rest if worth else 0


def gemm_config(m: int, n: int, k: int, *, processors: int = 132, along_k: bool = True) -> GemmConfig:
    """The tiles for a product: narrow ones where a wide one would be half empty; and, with both operands contiguous
    along K, where half the SMs would be without a wide one, and where the way out is what takes time. On an H200
    512 x 4096 x 4096 took 31 us with narrow and 48 with wide ones, 4096 x 4096 x 64 took 14.4 and 15.5, with K = 128
    16.0 and 16.6, with 256 20.5 and 20.7, and 1024 x 4096 x 4096 50.6 and 50.0."""
    few = -(-m // 128) * -(-n // 256) * 2 <= processors
    narrow = n <= 128 or (along_k and (k <= 128 or few))
    return GemmConfig(bn=128, stages=6, chunks=1, group=8) if narrow else GemmConfig()


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """activation(a (M, K) b (K, N) + bias (N,)) of bf16 or fp16 tensors that `refusal` lets through."""
    m, k = a.shape
    n = b.shape[1]
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype or a.dtype, device=a.device)
    a_k, b_k = bool(k_major(a, 1)), bool(k_major(b, 0))
    config = config or gemm_config(m, n, k, processors=multiprocessors(a.device), along_k=a_k and b_k)
    bk, bn = config.bk, config.bn
    direct = out.dtype == torch.float32 or n * out.element_size() % _ALIGNMENT != 0 or out.data_ptr() % _ALIGNMENT != 0
    a_desc = matrix_map(a, 64, bk) if a_k else matrix_map(a.t(), bk, 64)
    b_desc = matrix_map(b.t(), bn, bk) if b_k else matrix_map(b, bk, bn)
    out_desc = a_desc if direct else matrix_map(out, 64, bn // config.chunks)
    tiles_m, tiles_n = -(-m // (64 * config.consumers)), -(-n // bn)
    cap, consumer, producer = config.registers()
    given = out if bias is None else bias
    k_steps, programs = -(-k // bk), multiprocessors(a.device)
    dealt = dealt_tiles(tiles_m * tiles_n, k_steps, programs) if config.deal else 0
    partials = counters = given
    if dealt:
        counters = zero_counters(a.device, dealt * config.consumers)
        partials = torch.empty(2 * programs * config.consumers * 64 * bn, dtype=torch.float32, device=a.device)
    else:
        programs = min(programs, tiles_m * tiles_n)
    arguments = (a_desc, b_desc, out_desc, out, given, partials, counters, m, n, k_steps, tiles_m, tiles_n, dealt)
    constants = dict(
        CONSUMERS=config.consumers,
        BN=bn,
        BK=bk,
        STAGES=config.stages,
        A_K=a_k,
        B_K=b_k,
        GROUP=config.group,
        CHUNKS=config.chunks,
        BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS[activation],
        DIRECT=direct,
        DEAL=dealt > 0,
        CONSUMER_REGISTERS=consumer,
        PRODUCER_REGISTERS=producer,
    )
    key = (a.dtype, out.dtype, given.dtype, partials.dtype, partials.data_ptr() % 16, counters.dtype)
    _kernel()(key, programs, arguments, constants, dict(num_warps=4, maxnreg=cap))
    return out
