"""Long convolutions by Fourier transforms: y[t] = sum over s <= t of k[t - s] u[s], a filter a channel.

    conv = FlashFFTConv(2 * seqlen)                  # the name and arguments of FlashFFTConv (arXiv 2311.05908)
    y = conv(u, k)                                   # u (batch, channels, seqlen), k (channels, up to the fft length)
    y = conv(u, k, pregate, postgate)                # postgate * conv(u * pregate)

The filter is transformed in every call, unless the module was made with keep_spectrum=True: for a filter that stays
the same, whose transform is then kept.

    gpu_accel::tk_fft_conv(u, spectrum, pregate, postgate, a, conjugate) -> y
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.function import refuse_second, refuse_transforms
from gpu_accel.flash_attention3.launch import launch
from gpu_accel.flash_attention3.problem import FLOAT_DTYPES, _has_address, check_flag
from gpu_accel.thunderkittens import fft_kernels
from gpu_accel.thunderkittens.arguments import check_tensors
from gpu_accel.thunderkittens.chunked import _device, _unit
from gpu_accel.thunderkittens.linear import BACKENDS, _need, _shape, choose

# What its test in tests/gpu has passed on (H200, Triton 3.6.0): "auto" takes the kernels for that alone.
GPU_CHECKED = (torch.bfloat16, torch.float16, torch.float32)
_PAIRS = 8  # of sequences of a channel that one program has, in bfloat16: 300 us for 326 with one (16 x 1024 x 4096)
_PROGRAMS = 1024  # at least, before one has several pairs
SIZES = tuple(1 << n for n in range(8, 13))  # 256 to 4096: larger ones do not fit into the shared memory of one program


def _sides(size: int, tall: bool = False) -> tuple[int, int]:
    """size = A B, both powers of two from 16 to 64, as equal as can be; the longer one is B, or A if `tall`."""
    bits = size.bit_length() - 1
    short, long = 1 << (bits // 2), 1 << (bits - bits // 2)
    return (long, short) if tall else (short, long)


def _tall(dtype: torch.dtype) -> bool:
    """Hopper multiplies 64 rows at once; three products of tf32 put more aside that way."""
    return dtype == torch.bfloat16


def _captured(x: Tensor) -> bool:
    """Whether launches go into a CUDA graph: what they make has no values yet, and the graph's memory is its own."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=16)
def _halves(a: int, b: int, device: torch.device) -> Tensor:
    """F_A and F_B of `_half_fft_conv_kernel`, float16: real part, imaginary part and its negative of each."""
    tables = _tables(a, b, device)
    fa, fb = tables[: 2 * a * a].view(2, -1), tables[2 * a * a : 2 * (a * a + b * b)].view(2, -1)
    return torch.cat([torch.cat([f.flatten(), -f[1]]) for f in (fa, fb)]).half()


@functools.lru_cache(maxsize=16)
def _tables(a: int, b: int, device: torch.device) -> Tensor:
    """F_A, F_B and W of `fft_kernels`, float32, made in float64."""

    def roots(rows: int, cols: int, of: int) -> Tensor:
        product = torch.arange(rows)[:, None] * torch.arange(cols)[None, :] % of
        angle = -2 * torch.pi * product.double() / of
        return torch.stack([angle.cos(), angle.sin()]).float().flatten()

    return torch.cat([roots(a, a, a), roots(b, b, b), roots(a, b, a * b)]).to(device)


def filter_spectrum(k: Tensor, size: int, tall: bool = False) -> Tensor:
    """(2, channels, A, B) float32 of k (channels, at most size): its transform over size, in the kernel's order.

    tall: A is the longer side, see `_sides`.
    """
    a, b = _sides(size, tall)
    found = torch.fft.fft(k.float(), n=size, norm="forward")  # frequency p + A r
    return torch.view_as_real(found).view(k.shape[0], b, a, 2).permute(3, 0, 2, 1).contiguous()


@torch.library.custom_op("gpu_accel::tk_fft_conv", mutates_args=())
def fft_conv_op(
    u: Tensor, spectrum: Tensor, pregate: Tensor | None, postgate: Tensor | None, conjugate: bool
) -> Tensor:
    """u, gates (batch, channels, seqlen); spectrum as `filter_spectrum` makes it."""
    u = _unit(u)
    pregate, postgate = (None if x is None else _unit(x) for x in (pregate, postgate))
    batch, channels, seqlen = u.shape
    a, b = spectrum.shape[2:]
    y = u.new_empty(u.shape)
    if y.numel():
        strides = [s for x in (u, pregate, postgate) for s in ((0, 0) if x is None else x.stride()[:2])]
        tables = _tables(a, b, u.device)
        halves = _halves.__wrapped__ if _captured(u) else _halves
        given = dict(A=a, B=b, CONJUGATE=conjugate, PRE=pregate is not None, POST=postgate is not None, num_stages=1)
        pairs = -(-batch // 2)
        with _device(u):
            if u.dtype == torch.bfloat16:
                each = min(pairs, _PAIRS, max(1, channels * pairs // _PROGRAMS))
                launch(fft_kernels._half_fft_conv_kernel, channels * -(-pairs // each),
                       (u, spectrum.contiguous(), pregate, postgate, y, tables, halves(a, b, u.device), *strides,
                        seqlen, batch, channels, each),
                       given | dict(num_warps=4 if a * b > 1024 else 1))  # fmt: skip
            else:  # three products of tf32 each: one has the 11 bits of float16, too few beside it after four products
                launch(fft_kernels._fft_conv_kernel, channels * pairs,
                       (u, spectrum.contiguous(), pregate, postgate, y, tables, *strides, seqlen, batch, channels),
                       given | dict(PRECISION="tf32x3", num_warps=8))  # fmt: skip
    return y


@fft_conv_op.register_fake
def _(u, spectrum, pregate, postgate, conjugate):
    return u.new_empty(u.shape)


refuse_second(fft_conv_op, "the long convolution by kernels")


class _LongConv(torch.autograd.Function):
    """The convolution with gradients of u, k and the gates; k's is a transform of torch, over the whole batch."""

    @staticmethod
    def forward(ctx, u, k, pregate, postgate, spectrum, size):
        y = fft_conv_op(u, spectrum, pregate, postgate, False)
        ctx.save_for_backward(u, k, pregate, postgate, spectrum)
        ctx.size = size
        return y

    @staticmethod
    def backward(ctx, dy):
        u, k, pregate, postgate, spectrum = ctx.saved_tensors
        need = ctx.needs_input_grad
        if torch.is_grad_enabled() and k.requires_grad:  # the spectrum as what it is made of, and not as a constant
            spectrum = filter_spectrum(k, ctx.size, _tall(u.dtype))
        du = dk = dpre = dpost = None
        # what multiplies a result goes into the kernel as its gate, so that everything is rounded once
        if need[0]:
            du = fft_conv_op(dy, spectrum, postgate, pregate, True)
        if need[2]:
            dpre = fft_conv_op(dy, spectrum, postgate, u, True)
        if need[3]:
            dpost = fft_conv_op(u, spectrum, pregate, dy, False)
        if need[1]:
            left = u.float() if pregate is None else u.float() * pregate.float()
            right = dy.float() if postgate is None else dy.float() * postgate.float()
            found = (torch.fft.rfft(right, n=ctx.size) * torch.fft.rfft(left, n=ctx.size).conj()).sum(0)
            dk = torch.fft.irfft(found, n=ctx.size)[:, : k.shape[1]].to(k.dtype)
        return du, dk, dpre, dpost, None, None


def long_conv_reference(u: Tensor, k: Tensor, pregate: Tensor | None, postgate: Tensor | None, size: int) -> Tensor:
    """By torch.fft, in float32 (float64 where u is)."""
    wide = torch.float64 if u.dtype == torch.float64 else torch.float32
    x = u.to(wide) if pregate is None else u.to(wide) * pregate.to(wide)
    y = torch.fft.irfft(torch.fft.rfft(x, n=size) * torch.fft.rfft(k.to(wide), n=size), n=size)[..., : u.shape[2]]
    return (y if postgate is None else y * postgate.to(wide)).to(u.dtype)


def _nothing(u: Tensor, *others: Tensor | None) -> Tensor:
    """An empty u, whose gradients and those of the others are zeros: torch's transform of no sequence is an error."""
    return u + sum(x[:0].sum().to(u.dtype) for x in others if x is not None)


class FlashFFTConv(torch.nn.Module):
    """y = postgate * (u * pregate convolved with k), circular over `seqlen`, causal where u takes at most half of it.

    Args:
        seqlen: length of the transform: a power of two, 256 to 4096. u may be shorter: zeros follow it.
        dtype: of u; None: any of float32, bfloat16, float16.
        use_32_butterfly: a choice between kernels of FlashFFTConv's, taken so that calls drop in. There is one here.
        keep_spectrum: keep the transform of k for the next call with the same tensor (a CUDA graph transforms it in
            every replay). It is made anew for another tensor or other memory, after changes in place that autograd
            sees, and in training, that is where k wants gradients: torch's fused optimizers change it unseen. So do
            changes through k.data.
        backend: "portable" (plain Triton), "reference" (torch.fft), or "auto": portable on a GPU where it was checked.

    Raises:
        UnsupportedError: another length. InvalidInputError: another dtype; u, k or gates that do not fit.
    """

    def __init__(
        self, seqlen: int, dtype: torch.dtype | None = None, use_32_butterfly: bool = True, *,
        keep_spectrum: bool = False, backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        check_flag("use_32_butterfly", use_32_butterfly)
        _need(backend in BACKENDS, f"backend is {backend!r}; choose one of {', '.join(BACKENDS)}")
        _need(dtype is None or dtype in FLOAT_DTYPES, f"dtype must be a floating torch.dtype or None, got {dtype!r}")
        self.keep_spectrum = check_flag("keep_spectrum", keep_spectrum)
        if not isinstance(seqlen, int) or seqlen not in SIZES:
            raise UnsupportedError(f"transforms of {', '.join(map(str, SIZES))} are made, not of {shown(seqlen)}")
        self.seqlen, self.dtype, self.backend = seqlen, dtype, backend
        self._kept: tuple[weakref.ref, tuple, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what is kept: it refers to a tensor of this process."""
        return super().__getstate__() | {"_kept": None}  # type: ignore[misc, operator]

    def _spectrum(self, k: Tensor, tall: bool) -> Tensor:
        """That of k; a kept one is made anew when k is another tensor or was changed in place."""
        if not self.keep_spectrum:
            return filter_spectrum(k.detach(), self.seqlen, tall)
        if k.requires_grad and torch.is_grad_enabled():
            self._kept = None
            return filter_spectrum(k.detach(), self.seqlen, tall)
        compiling = torch.compiler.is_compiling()
        # inference tensors do not count their changes; what a graph reads is neither freed nor as old as its capture
        if not compiling and (k.is_inference() or _captured(k)):
            return filter_spectrum(k.detach(), self.seqlen, tall)
        kept = self._kept  # read once: other threads keep others
        state = (k._version, tall, *((k.device, k.dtype, k.data_ptr()) if _has_address(k) else ()))
        if kept is None or kept[0]() is not k or kept[1] != state:
            # outside of a caller's inference mode, since a later call may want gradients
            with contextlib.nullcontext() if compiling else torch.inference_mode(False):
                kept = (weakref.ref(k), state, filter_spectrum(k.detach(), self.seqlen, tall))
            self._kept = kept
        return kept[2]

    def forward(self, u: Tensor, k: Tensor, pregate: Tensor | None = None, postgate: Tensor | None = None) -> Tensor:
        """u (batch, channels, up to seqlen), k (channels, up to seqlen) of any float dtype; gates the shape of u."""
        check_tensors({"u": u, "k": k}, {"pregate": pregate, "postgate": postgate})
        _need(u.dim() == 3 and u.shape[2] <= self.seqlen, f"u must be (batch, channels, at most {self.seqlen}), got "
              f"{_shape(u)}")  # fmt: skip
        if self.dtype is not None and u.dtype != self.dtype:
            raise InvalidInputError(f"this module was made for {self.dtype}, u is {u.dtype}")
        _need(k.dim() == 2 and k.shape[0] == u.shape[1] and k.shape[1] <= self.seqlen,
              f"k must be (channels, at most {self.seqlen}) with {u.shape[1]} channels, got {_shape(k)}")  # fmt: skip
        for name, x in (("pregate", pregate), ("postgate", postgate)):
            _need(x is None or (x.shape == u.shape and x.dtype == u.dtype), f"{name} must be as u, {_shape(u)}")
        chosen = choose(u, self.backend, u.dtype in GPU_CHECKED)
        if not u.numel():
            return _nothing(u, k, pregate, postgate)
        if chosen == "reference":
            return long_conv_reference(u, k, pregate, postgate, self.seqlen)
        refuse_transforms("a long convolution by kernels")
        return _LongConv.apply(u, k, pregate, postgate, self._spectrum(k, _tall(u.dtype)), self.seqlen)
