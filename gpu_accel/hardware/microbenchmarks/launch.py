"""Load a compiled kernel and launch it on torch's current stream with torch tensors."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError

from . import compile as compiling

if TYPE_CHECKING:
    import torch

CAPABILITY = (9, 0)
MOST_SHARED = 227 * 1024  # bytes that one block can have on Hopper
WARM_UP_MS = 25.0
_DEFAULT_SHARED = 48 * 1024
_modules: dict[tuple[int, str], Any] = {}
_functions: dict[tuple[int, str, str], Any] = {}


def unavailable(device: str) -> str:
    """Why the microbenchmarks cannot run here, with the remedy; "" when they can. `device` is "cuda" or "cpu"."""
    if device != "cuda":
        return (
            "needs a Hopper GPU (H100, H200, GH200): the kernels are sm_90a machine code, which no CPU interprets. They"
            " are compiled and their SASS is checked by tests/hardware/test_microbenchmarks.py"
        )
    import torch

    found = torch.cuda.get_device_capability()
    if torch.version.hip or found != CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"needs a Hopper GPU, compute capability 9.0; this is {name}, {found[0]}.{found[1]}"
    return compiling.missing()


def driver() -> Any:
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise UnsupportedError(
            f"launching needs the driver's Python bindings ({error}): {compiling.INSTALL}"
        ) from error
    return bindings


def call(function: str, *arguments: Any) -> Any:
    """A function of the driver: its result (None, one value or a tuple).

    Raises:
        HardwareError: the driver refused; the message names the function and the driver's reason.
    """
    bindings = driver()
    status, *found = getattr(bindings, function)(*arguments)
    if status != bindings.CUresult.CUDA_SUCCESS:
        text = bindings.cuGetErrorString(status)[1]
        reason = text.decode() if isinstance(text, bytes) else str(status)
        raise HardwareError(f"{function}: {reason} ({status.name})")
    return found[0] if len(found) == 1 else tuple(found) or None


def load(source: str, kernel: str) -> Any:
    """The function `kernel` of a source, compiled and loaded into the context of torch's current device."""
    import torch

    if not torch.cuda.is_available():
        raise HardwareError(f"{kernel} {unavailable('cpu')}")
    device = torch.cuda.current_device()
    key = (device, source, kernel)
    if key not in _functions:
        torch.cuda.synchronize()  # makes torch's context, and current
        if (device, source) not in _modules:
            _modules[device, source] = call("cuModuleLoadData", compiling.build(source).cubin)
        _functions[key] = call("cuModuleGetFunction", _modules[device, source], kernel.encode())
    return _functions[key]


def launch_cubin(cubin: bytes, kernel: str, arguments: Sequence[Any], *, block: int) -> None:
    """Launch one block of a kernel from a cubin that was changed after it was compiled, and wait for it."""
    import torch

    torch.cuda.synchronize()
    key = (torch.cuda.current_device(), hashlib.sha256(cubin).hexdigest(), kernel)
    if key not in _functions:
        _modules[key[:2]] = call("cuModuleLoadData", cubin)
        _functions[key] = call("cuModuleGetFunction", _modules[key[:2]], kernel.encode())
    bindings = driver()
    config = bindings.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.hStream = torch.cuda.current_stream().cuda_stream
    with _packed(arguments) as pointers:
        call("cuLaunchKernelEx", config, _functions[key], pointers, 0)
    torch.cuda.synchronize()


def launch(
    source: str,
    kernel: str,
    arguments: Sequence[Any],
    *,
    grid: int | tuple[int, int, int] = 1,
    block: int = 32,
    shared: int = 0,
    cluster: int = 1,
) -> None:
    """Launch on torch's current stream; returns at once.

    Args:
        arguments: tensors (their address is passed), ints (as 32 bits), floats (32 bits), ctypes values, or `bytes`
            for a struct passed by value, 64-byte aligned (a tensor map).
        shared: dynamic shared memory of a block in bytes.
        cluster: blocks of a cluster along x; above 8 needs a kernel that may have it, which is asked for here.
    Raises:
        HardwareError: the driver refuses the launch. InvalidInputError: an argument of another type.
    """
    import torch

    bindings = driver()
    function = load(source, kernel)
    attribute = bindings.CUfunction_attribute
    if shared > _DEFAULT_SHARED:
        what = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", function, what, shared)
    config = bindings.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (grid, 1, 1) if isinstance(grid, int) else grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared
    config.hStream = torch.cuda.current_stream().cuda_stream
    if cluster > 1:
        if cluster > 8:
            call("cuFuncSetAttribute", function, attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        size = bindings.CUlaunchAttribute()
        size.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size.value.clusterDim.x, size.value.clusterDim.y, size.value.clusterDim.z = cluster, 1, 1
        config.attrs = [size]
        config.numAttrs = 1
    with _packed(arguments) as pointers:
        call("cuLaunchKernelEx", config, function, pointers, 0)


@contextmanager
def _packed(arguments: Sequence[Any]) -> Iterator[int]:
    """Address of an array of pointers to the arguments, which live until the block ends."""
    values = [_value(one) for one in arguments]
    pointers = (ctypes.c_void_p * max(1, len(values)))(*(address for _, address in values))
    yield ctypes.addressof(pointers)
    del values, pointers


def _value(argument: Any) -> tuple[Any, int]:
    """(what holds the value, its address)."""
    if hasattr(argument, "data_ptr"):
        held: Any = ctypes.c_uint64(argument.data_ptr())
    elif isinstance(argument, bool) or argument is None:
        raise InvalidInputError(f"{argument!r} is no kernel argument; give an int")
    elif isinstance(argument, int):
        if not -(2**31) <= argument < 2**32:
            raise InvalidInputError(f"{argument} does not fit into 32 bits; give a ctypes value of 64")
        held = ctypes.c_int32(argument)
    elif isinstance(argument, float):
        held = ctypes.c_float(argument)
    elif isinstance(argument, bytes):
        held = (ctypes.c_char * (len(argument) + 64))()
        address = ctypes.addressof(held) + (-ctypes.addressof(held)) % 64
        ctypes.memmove(address, argument, len(argument))
        return held, address
    elif isinstance(argument, ctypes._SimpleCData):
        held = argument
    else:
        raise InvalidInputError(f"a kernel argument of type {type(argument).__name__} is not known here")
    return held, ctypes.addressof(held)


def tensor_map(tensor: torch.Tensor, box: Sequence[int]) -> bytes:
    """The 128 bytes that tell the TMA unit about a contiguous float32 tensor and the box of one load.

    Args:
        tensor: contiguous float32, 1 to 5 dimensions.
        box: elements of the box, innermost first; at most 256 each, and innermost a multiple of 16 bytes.
    """
    import torch

    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.dim() != len(box):
        raise InvalidInputError("a tensor map here is for contiguous float32 with as many dimensions as the box")
    bindings = driver()
    sizes = [bindings.cuuint64_t(size) for size in reversed(tensor.shape)]
    strides = [bindings.cuuint64_t(4 * stride) for stride in reversed(tensor.stride()[:-1])]
    strides = strides or [bindings.cuuint64_t(16)]  # of one dimension, which has none, it is not read
    made = call(
        "cuTensorMapEncodeTiled",
        bindings.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        len(box),
        tensor.data_ptr(),
        sizes,
        strides,
        [bindings.cuuint32_t(size) for size in box],
        [bindings.cuuint32_t(1)] * len(box),
        bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        bindings.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(made.getPtr(), 128)


_SPIN = """
extern "C" __global__ void spin(long long cycles, float* out) {
    long long start = clock64();
    float x = threadIdx.x;
    while (clock64() - start < cycles) x = x * 0.5f + 1.0f;
    if (x == -1.0f) out[0] = x;
}
"""


def warm_up(milliseconds: float = WARM_UP_MS) -> None:
    """Keep every SM busy for a while, so that what follows does not run at the clock of an idle card."""
    import torch

    _spin(milliseconds, grid=2 * sm_count(), block=256)
    torch.cuda.synchronize()


def hold(milliseconds: float = 0.2) -> None:
    """Keep the stream busy with one warp, so that what is queued next follows without a gap; returns at once.

    The host takes some 50 microseconds for a launch. Between two events on an idle stream they would count as time of
    the kernel.
    """
    _spin(milliseconds, grid=1, block=32)


def _spin(milliseconds: float, *, grid: int, block: int) -> None:
    import torch

    out = torch.empty(1, device="cuda")
    launch(_SPIN, "spin", [ctypes.c_int64(int(milliseconds * 1.7e6)), out], grid=grid, block=block)


def sm_count() -> int:
    """SMs of torch's current device."""
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
