"""Launching Gluon kernels without paying for Triton's argument analysis on every call.

`kernel[grid](...)` looks at every argument of every call to choose a compiled variant: 70 us of Python for a kernel
with four tensor maps. Kernels that specialise on nothing (integers in `do_not_specialize`) have one variant per set of
constants, so the caller can name it by a key, and tensor maps of a shape already seen are copied, not validated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_accel.flash_attention3 import launch

_MOST_SHAPES = 4096
_maps: dict[tuple, dict] = {}


class QuickLaunch:
    """One Gluon kernel and its compiled variants."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self._compiled: dict[tuple, Any] = {}

    def __call__(self, key: tuple, programs: int, arguments: tuple, constants: dict, options: dict) -> None:
        """Run on a one-dimensional grid.

        Args:
            key: everything that tells one variant from another, beside `constants` and the device.
            arguments: run-time arguments, in the kernel's order. constants: constexpr arguments, in the kernel's order.
            options: num_warps and the like.
        """
        if launch._hook is not None:
            launch.launch(self.kernel, programs, arguments, {**constants, **options})
            return
        values = tuple(constants.values())
        variant = (torch.cuda.current_device(), key, values)
        compiled = self._compiled.get(variant)
        if compiled is None:
            self._compiled[variant] = self.kernel[(programs,)](*arguments, **constants, **options)
        else:
            compiled[(programs, 1, 1)](*arguments, *values)


def tensor_map(x: Tensor, rows: int, cols: int):
    """Blocks of one head, `rows` x `cols`, of a (batch, seqlen, heads, dim) view; zeros outside, clipped on writing.

    The map is over (batch, heads, seqlen, dim).
    """
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


def _new_map(kind: Any, x: Tensor, rows: int, cols: int):
    from triton.experimental.gluon import language as gl

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[x.dtype]
    block = [1, 1, rows, cols]
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    batch, seqlen, heads, dim = x.shape
    unit = 16 // x.element_size()  # strides of dimensions of size 1 do not matter, but must be 16-byte multiples
    by_batch, by_row, by_head = (s if n > 1 else unit for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True))
    return kind(x, [batch, heads, seqlen, dim], [by_batch, by_head, by_row, 1], block, layout)
