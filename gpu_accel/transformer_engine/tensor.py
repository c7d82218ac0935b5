"""`QuantizedTensor`: codes, scales and how to read them, kept together.

It is a torch.Tensor with the shape and dtype of what was quantised, so it can be a parameter, be saved in a state_dict,
moved between devices and traced by torch.compile. It is no number format that torch computes with: arithmetic on it is
refused (call `dequantize()`), because a silent conversion would hide what it costs. What works: detach, clone, `.to` of
devices and dtypes (the dtype it dequantises to), views that keep the last dimension, and transposing a matrix that has
both copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.transformer_engine.formats import FORMATS
from gpu_accel.transformer_engine.reference import Parts, block_grid, dequantize_reference
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.schemes import scheme as find_scheme

_INNER = ("codes", "scales", "tensor_scale", "col_codes", "col_scales", "col_tensor_scale", "seen_amax")
_SCALE_DTYPES = {"e8m0": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}


def _data_dtype(scheme: Scheme) -> torch.dtype:
    if scheme.element == "int8":
        return torch.int8
    return (FORMATS[scheme.element].dtype if scheme.element in FORMATS else None) or torch.uint8


class QuantizedTensor(torch.Tensor):
    """Made by `quantize`.

    codes: (..., K) float8, int8 or (six and four bits) uint8 codes, two a byte and K halved for four bits, or None.
    scales: (row blocks, column blocks), float32, float8_e8m0fnu or float8_e4m3fn; what codes are multiplied with.
    tensor_scale: () float32, only of nvfp4.
    col_codes, col_scales, col_tensor_scale: the same for the transposed matrix (K, M), or None.
    seen_amax: () float32, the largest magnitude, only where a scale was given.
    scheme: how it was quantised. emulated: whether this GPU has no matrix product for it.
    """

    codes: Tensor | None
    scales: Tensor | None
    tensor_scale: Tensor | None
    col_codes: Tensor | None
    col_scales: Tensor | None
    col_tensor_scale: Tensor | None
    seen_amax: Tensor | None

    @staticmethod
    def __new__(cls, inner: dict[str, Tensor | None], scheme: Scheme, shape: torch.Size, dtype: torch.dtype):
        some = next(t for t in inner.values() if t is not None)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=some.device)

    def __init__(self, inner: dict[str, Tensor | None], scheme: Scheme, shape: torch.Size, dtype: torch.dtype):
        for name in _INNER:  # attributes and not a dict of them, so that torch.compile sees them
            setattr(self, name, inner.get(name))
        self._text = scheme.text

    @classmethod
    def from_parts(
        cls,
        *,
        row: Parts | None,
        col: Parts | None,
        scheme: Scheme,
        shape: torch.Size,
        dtype: torch.dtype,
        amax: Tensor | None = None,
    ) -> QuantizedTensor:
        """Join what the quantisers made of a tensor of this shape and dtype."""
        inner: dict[str, Tensor | None] = {"seen_amax": amax}
        for prefix, parts in (("", row), ("col_", col)):
            if parts is None:
                continue
            leading = shape[:-1] if not prefix else parts.codes.shape[:1]
            codes = parts.codes.reshape(*leading, parts.codes.shape[-1])
            inner[f"{prefix}codes"] = codes.view(_data_dtype(scheme))
            kept = _SCALE_DTYPES.get(scheme.scale)
            inner[f"{prefix}scales"] = parts.scales if kept is None else parts.scales.view(kept)
            inner[f"{prefix}tensor_scale"] = parts.tensor_scale
        return cls(inner, scheme, shape, dtype)

    # -- what it holds

    @property
    def _inner(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in _INNER}

    @property
    def scheme(self) -> Scheme:
        return find_scheme(self._text)

    @property
    def emulated(self) -> bool:
        """Whether this device multiplies such tensors only after widening them, as MX and NVFP4 before Blackwell."""
        if self.device.type != "cuda":
            return True
        from gpu_accel.flash_attention3.launch import capability

        needed = (10, 0) if self.scheme.scale in ("e8m0", "nvfp4") else (9, 0) if self.scheme.bits == 8 else (99, 0)
        return capability(self.device) < needed

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all that is kept."""
        return sum(t.numel() * t.element_size() for t in self._inner.values() if t is not None)

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        """The matrix that the tensor is seen as."""
        return self.shape[:-1].numel(), self.shape[-1]

    def dequantize(self, dtype: torch.dtype | None = None, *, rotated: bool = False) -> Tensor:
        """The numbers that the codes mean, in `dtype` (default: that of the original), computed in float32.

        From the row-wise copy, or from the column-wise one where it is alone. `rotated` leaves a Hadamard matrix in.
        """
        rows, cols = self.rows_and_columns
        parts = self._parts("")
        if parts is not None:
            wide = dequantize_reference(parts, rows, cols, self.scheme, rotated=rotated)
        else:
            wide = self.dequantize_columns(torch.float32, rotated=rotated).t()
        return wide.reshape(self.shape).to(dtype or self.dtype)

    def dequantize_columns(self, dtype: torch.dtype | None = None, *, rotated: bool = False) -> Tensor:
        """The transposed matrix (K, M) that the column-wise copy means; it rounds differently from the row-wise one."""
        parts = self._parts("col_")
        if parts is None:
            raise InvalidInputError("there is no column-wise copy: quantise with columnwise=True")
        rows, cols = self.rows_and_columns
        return dequantize_reference(parts, cols, rows, self.scheme, rotated=rotated).to(dtype or self.dtype)

    def _parts(self, prefix: str) -> Parts | None:
        codes, scales = self._inner[f"{prefix}codes"], self._inner[f"{prefix}scales"]
        if codes is None or scales is None:
            return None
        flat = codes.view(torch.uint8).reshape(-1, codes.shape[-1]) if codes.numel() else codes.view(torch.uint8)
        if not codes.numel():
            rows, cols = self.rows_and_columns
            flat = flat.reshape((rows, codes.shape[-1]) if not prefix else (cols, codes.shape[-1]))
        scales = scales.view(torch.uint8) if scales.element_size() == 1 else scales
        return Parts(flat, scales, self._inner[f"{prefix}tensor_scale"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        copies = "+".join(
            name for name, key in (("rows", "codes"), ("columns", "col_codes")) if self._inner[key] is not None
        )
        return (
            f"QuantizedTensor({self.scheme}, {copies}, shape={tuple(self.shape)}, "
            f"{str(self.dtype).removeprefix('torch.')}, {self.device})"
        )

    # -- what torch may do with it

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle and torch.save: a wrapper has no storage that they could write. Types of one byte go as bytes,
        for pickle (unlike torch.save) cannot read a float8 tensor back that it wrote (torch 2.13)."""
        parts = {name: t for name, t in self._inner.items() if t is not None}
        dtypes = {name: t.dtype for name, t in parts.items()}
        plain = {name: t.view(torch.uint8) if t.element_size() == 1 else t for name, t in parts.items()}
        return _from_inner, (plain, dtypes, self._text, self.shape, self.dtype, self.requires_grad)

    def __dlpack__(self, *given: Any, **more: Any) -> Any:  # numpy would read memory that is not the tensor's
        raise UnsupportedError("codes of several tensors are no array of others: hand over dequantize(), or codes")

    def share_memory_(self) -> QuantizedTensor:  # torch's own looks for a storage, which a wrapper has not
        for t in self._inner.values():
            if t is not None:
                t.share_memory_()
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [name for name in _INNER if self._inner[name] is not None], (self._text, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: Any, outer_size: Any, outer_stride: Any):
        text, dtype = meta
        return cls(dict(inner), find_scheme(text), outer_size, dtype)

    def _map(self, change: Any, *, dtype: torch.dtype | None = None) -> QuantizedTensor:
        inner = {name: None if t is None else change(t) for name, t in self._inner.items()}
        return QuantizedTensor(inner, self.scheme, self.shape, dtype or self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        aten = torch.ops.aten
        self = args[0] if args else None
        if isinstance(self, QuantizedTensor):
            if func in (aten.detach.default, aten.clone.default, aten.alias.default):
                return self._map(lambda t: func(t, **kwargs) if func is not aten.clone.default else t.clone())
            if func is aten._to_copy.default:
                device = kwargs.get("device")
                dtype = kwargs.get("dtype") or self.dtype
                if not dtype.is_floating_point or dtype.itemsize < 2:
                    raise UnsupportedError(f"a QuantizedTensor stands for floats, not {dtype}: call dequantize() first")
                return self._map(
                    lambda t: t.to(device, non_blocking=kwargs.get("non_blocking", False), copy=True), dtype=dtype
                )
            if func in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
                return self._reshaped(args[1])
            if func in (aten.t.default, aten.transpose.int, aten.permute.default):
                return self._transposed(func, args[1:])
            if func is aten.copy_.default and isinstance(args[1], QuantizedTensor):
                return self._copied(args[1])
            if func is aten.as_strided.default and self._is_whole(*args[1:]):
                return self._map(lambda t: t)
            if func is aten.zeros_like.default:  # what a gradient of it would be
                return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if str(func) == "gpu_accel.te_linear.default" and isinstance(args[1], QuantizedTensor):
            return func(self, args[1].codes, *args[2:], **kwargs)  # reads the weight's shape and nothing else
        raise UnsupportedError(
            f"{func} does not work on codes: call dequantize() for numbers, or use the matrix products of this package"
        )

    def _is_whole(self, size: Any, stride: Any, offset: int | None = None) -> bool:
        return tuple(size) == self.shape and tuple(stride) == self.stride() and not offset

    def _reshaped(self, size: Any) -> QuantizedTensor:
        shape = torch.empty(self.shape, device="meta").view(*size).shape
        last = self.shape[-1:]
        if shape[-1:] != last or self.scheme.block[0] > 1 and shape[:-1].numel() != self.shape[:-1].numel():
            raise UnsupportedError(
                f"a view of {tuple(self.shape)} as {tuple(shape)} would cut blocks: the last dimension must stay"
            )
        inner = dict(self._inner)
        codes = inner["codes"]
        if codes is not None:
            inner["codes"] = codes.view(*shape[:-1], codes.shape[-1])
        return QuantizedTensor(inner, self.scheme, shape, self.dtype)

    def _transposed(self, func: Any, args: tuple) -> QuantizedTensor:
        shape = func(torch.empty(self.shape, device="meta"), *args).shape
        swapped = self.dim() == 2 and shape == self.shape[::-1]
        if not swapped or self._inner["codes"] is None or self._inner["col_codes"] is None:
            raise UnsupportedError("only a matrix with both copies can be transposed: quantise with columnwise=True")
        order = {"": "col_", "col_": ""}
        inner = {f"{to}{part}": self._inner[f"{of}{part}"] for to, of in order.items() for part in _INNER[:3]}
        return QuantizedTensor({**inner, "seen_amax": self._inner["seen_amax"]}, self.scheme, shape, self.dtype)

    def _copied(self, other: QuantizedTensor) -> QuantizedTensor:
        """Copy into an existing tensor, as load_state_dict does."""
        same = self._text == other._text and self.shape == other.shape
        if not same or any((self._inner[n] is None) != (other._inner[n] is None) for n in _INNER):
            raise InvalidInputError(f"cannot copy {other!r} into {self!r}")
        for name in _INNER:
            mine, theirs = self._inner[name], other._inner[name]
            if mine is not None and theirs is not None:
                mine.copy_(theirs)
        return self


def _from_inner(
    plain: dict[str, Tensor], dtypes: dict[str, torch.dtype], text: str, shape: Any, dtype: torch.dtype,
    requires_grad: bool,
) -> QuantizedTensor:  # fmt: skip
    """What a file holds, which may be damaged or made up: kernels trust sizes, and would read beyond them.

    Raises:
        InvalidInputError: parts that do not belong together.
    """
    inner: dict[str, Tensor | None] = {name: t.view(dtypes[name]).contiguous() for name, t in plain.items()}
    scheme, size = find_scheme(text), torch.Size(shape)
    if fault := _fault(inner, scheme, size, dtype):
        raise InvalidInputError(f"a QuantizedTensor was saved that is none: {fault}")
    made = QuantizedTensor(inner, scheme, size, dtype)
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


def _fault(inner: dict[str, Tensor | None], scheme: Scheme, shape: torch.Size, dtype: torch.dtype) -> str:
    """Why these are not the parts of one tensor; "" if they are."""
    if not len(shape) or not dtype.is_floating_point or dtype.itemsize < 2:
        return f"it has the shape {tuple(shape)} and the dtype {dtype}"
    if unknown := set(inner) - set(_INNER):
        return f"it has {min(unknown)}"
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"seen_amax": ((), torch.float32)}
    rows, cols = shape[:-1].numel(), shape[-1]
    for prefix, leading, m, n in (("", tuple(shape[:-1]), rows, cols), ("col_", (cols,), cols, rows)):
        own = {f"{prefix}{name}" for name in _INNER[:3]}
        width = (n + 1) // 2 if scheme.packed else n
        wanted[f"{prefix}codes"] = (*leading, width), _data_dtype(scheme)
        wanted[f"{prefix}scales"] = block_grid(m, n, scheme), _SCALE_DTYPES.get(scheme.scale, torch.float32)
        wanted[f"{prefix}tensor_scale"] = (), torch.float32
        needed = own if scheme.scale == "nvfp4" else own - {f"{prefix}tensor_scale"}
        if (there := {name for name in own if inner.get(name) is not None}) not in (set(), needed):
            return f"a copy in {scheme} has {', '.join(sorted(needed))}, and this one {', '.join(sorted(there))}"
    given = {name: t for name, t in inner.items() if t is not None}
    if not {"codes", "col_codes"} & set(given):
        return "it holds no codes"
    for name, t in given.items():
        if (tuple(t.shape), t.dtype) != wanted[name]:
            size, kind = wanted[name]
            return f"{name} of {scheme} {tuple(shape)} is {kind} {size}, not {t.dtype} {tuple(t.shape)}"
    return "" if len({t.device for t in given.values()}) == 1 else "its parts are on several devices"


# QuantizedTensor alone is what files of earlier versions name
torch.serialization.add_safe_globals([QuantizedTensor, _from_inner, torch.Size])
