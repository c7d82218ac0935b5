"""Gluon names that differ between Triton versions, in one place. Importing it imports Gluon.

`tma_load(descriptor, coordinates, barrier, buffer)` and `tma_store(descriptor, coordinates, buffer)` are the bulk
copies from and to global memory: `async_copy_global_to_shared` and `async_copy_shared_to_global` up to Triton 3.8,
`async_load` and `async_store` from 3.9 on. `barrier()` is that of all threads of a program or partition, called
`thread_barrier` up to 3.6. `reinterpret(buffer, dtype, shape, layout)` is the same shared memory as another type and
shape, a method with an underscore up to 3.8. `tma_add` is a `tma_store` that adds to what is there, `async_atomic_add`
from 3.9 on, in builders alone before; `tma_written()` waits until what a thread stored or added so is in memory, where
`tma.store_wait` waits until it was read.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
cp_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """Shared memory `buffer` seen as `shape` numbers of `dtype` in `layout`."""
    method = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@builtin
def _tma_add(tensor_desc, coord, src, _semantic=None):
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


tma_add = getattr(tma, "async_atomic_add", _tma_add)


@gluon.jit
def tma_written():
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )
