"""Launches compiled kernels through the driver alone, every buffer an allocation of its own: run by compute-sanitizer.

    compute-sanitizer --tool memcheck python -I sanitized.py launches.json
    compute-sanitizer --tool initcheck python -I sanitized.py launches.json unwritten

No module of this library or of torch is imported: it starts within a fraction of a second, the tool has little to
watch, and an access behind a buffer lands in no other one, as it could in memory that a framework cuts to pieces.
The file of launches has, for each: buffers as name -> [file, offset, bytes, whether the kernel may rely on what is in
it], and passes, the kernels that run on them in order: cubin, entry, parameters as [name of a buffer] or numbers, grid,
threads, shared, scratch. With `unwritten` the other buffers are left as the driver gives them, so that a tool sees who
reads them before writing.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from pathlib import Path
from typing import Any

MOST_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STATIC_SHARED = 48 * 1024


def main() -> int:
    """Launch everything once, in order; 0 when the driver took it."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if status := getattr(cuda, name)(*arguments):
            raise SystemExit(f"{name}: CUDA error {status}")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)

    def allocated(data: bytes | None, size: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        if size:  # a buffer of no elements has no address
            call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            if data is not None:
                call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(size))
        return address

    unwritten = "unwritten" in sys.argv[2:]
    for launch in json.loads(Path(sys.argv[1]).read_text()):
        places = {}
        for name, (file, offset, size, given) in launch["buffers"].items():
            with open(file, "rb") as source:
                source.seek(offset)
                places[name] = allocated(source.read(size) if given or not unwritten else None, size)
        for at, one in enumerate(launch["passes"]):
            scratch = ctypes.c_uint64()
            if one["scratch"]:
                scratch = places[f"#scratch{at}"] = allocated(None, one["scratch"] * math.prod(one["grid"]))
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            call("cuModuleLoadData", ctypes.byref(module), Path(one["cubin"]).read_bytes())
            call("cuModuleGetFunction", ctypes.byref(function), module, one["entry"].encode())
            if one["shared"] > STATIC_SHARED:
                call("cuFuncSetAttribute", function, ctypes.c_int(MOST_SHARED_ATTRIBUTE), ctypes.c_int(one["shared"]))
            values = [places[each] if isinstance(each, str) else ctypes.c_uint64(each % 2**64)
                      for each in one["parameters"]]  # fmt: skip
            values += [scratch, *(ctypes.c_uint64() for _ in range(3))]
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
            sizes = [ctypes.c_uint(size) for size in (*one["grid"], 1, 1)[:3]]
            threads = [ctypes.c_uint(size) for size in one["threads"]]
            call("cuLaunchKernel", function, *sizes, *threads, ctypes.c_uint(one["shared"]), None, pointers, None)
            call("cuCtxSynchronize")
        for address in places.values():
            if address.value:
                call("cuMemFree_v2", address)
        print("launched", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
