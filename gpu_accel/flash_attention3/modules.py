"""FlashAttention-3 as a module and as two functions in (batch, heads, seqlen, head_dim) order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.api import Window, autocasted, flash_attn_func
from gpu_accel.flash_attention3.backends import check_name
from gpu_accel.flash_attention3.function import flash_attention_backward
from gpu_accel.flash_attention3.problem import (
    check_dtypes,
    check_number,
    check_scalars,
    check_strided,
    check_tensors,
    normalise_window,
)

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": None}
_LAYOUTS = ("bhsd", "bshd")
_HARDWARE = {
    "a100": (8, 0), "rtx3090": (8, 6), "rtx4090": (8, 9), "l40s": (8, 9), "h100": (9, 0), "h200": (9, 0),
    "b200": (10, 0), "gb200": (10, 0),
}  # fmt: skip


def _check_choice(name: str, value: str, allowed) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise InvalidInputError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _attention(
    q, k, v, *, precision: str, layout: str, causal: bool, softmax_scale: float | None, backend: str, **options
) -> Tensor:
    """Cast, run in (batch, seqlen, heads, head_dim) order, and return what came in: layout and dtype of q."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInputError(f"{name} must be a floating-point torch.Tensor, got {kind}")
        check_strided(name, x)
        if x.dim() != 4:
            raise InvalidInputError(f"{name} must have four dimensions ({layout}), got shape {tuple(x.shape)}")
    if precision == "fp8":
        from gpu_accel.flash_attention3.fp8 import fp8_attention

        out = fp8_attention(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout, out_dtype=q.dtype,
                            backend=backend, **options)  # fmt: skip
        assert isinstance(out, Tensor)
        return out
    # before the cast below, which would hide float8 without its scales, or dtypes that differ by mistake
    check_dtypes(*autocasted(q, k, v))
    dtype, given = PRECISIONS[precision], q.dtype
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal, backend=backend, **options)
    assert isinstance(o, Tensor)
    return (o.transpose(1, 2) if layout == "bhsd" else o).to(given)


class FlashAttention3(nn.Module):
    """Attention without parameters, for use inside a model.

    Args:
        precision: "bf16" or "fp16": inputs are cast to it. "fp8": quantised per block after a Hadamard rotation,
            forward only. The output has the dtype of q.
        hardware: None takes whatever is there. A name such as "h100" makes a call on another machine an error instead
            of a slower kernel.
        layout: "bhsd" (batch, heads, seqlen, head_dim) or "bshd".
        backend: see :func:`gpu_accel.flash_attention3.flash_attn_func`.

    Raises:
        InvalidInputError: another precision, layout, hardware or backend. A call raises what `flash_attn_func` and
        `fp8_attention` raise, and HardwareError on other hardware than the one named.

    Example:
        attention = FlashAttention3(precision="bf16")
        o = attention(q, k, v, causal=True)
    """

    def __init__(
        self,
        precision: str = "bf16",
        hardware: str | None = None,
        layout: str = "bhsd",
        backend: str = "auto",
        *,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        _check_choice("precision", precision, PRECISIONS)
        _check_choice("layout", layout, _LAYOUTS)
        if hardware is not None:
            _check_choice("hardware", hardware, _HARDWARE)
        check_name(backend)
        if softmax_scale is not None:
            softmax_scale = check_number("softmax_scale", softmax_scale)
        self.precision, self.hardware, self.layout, self.backend = precision, hardware, layout, backend
        self.softmax_scale = softmax_scale

    def _check_hardware(self, device: torch.device) -> None:
        if self.hardware is None:
            return
        wanted = _HARDWARE[self.hardware]
        if device.type != "cuda":
            raise HardwareError(
                f"hardware={self.hardware!r}, but the tensors are on {device}: move them to that GPU, "
                "or use hardware=None"
            )
        found = torch.cuda.get_device_capability(device)
        if found != wanted:
            raise HardwareError(
                f"hardware={self.hardware!r} has compute capability {wanted[0]}.{wanted[1]}, but "
                f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}: use hardware=None"
            )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        *,
        window_size: Window = (-1, -1),
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """q (batch, heads, seqlen_q, head_dim), k and v with their own heads (or bshd): o like q.

        `sinks` (heads,) and `alibi_slopes` (heads,) or (batch, heads) as in `flash_attn_func`; not with "fp8".
        """
        if isinstance(q, Tensor):
            self._check_hardware(q.device)
        biases = {n: x for n, x in (("sinks", sinks), ("alibi_slopes", alibi_slopes)) if x is not None}
        if biases and self.precision == "fp8":
            raise UnsupportedError(f"fp8 attention has no {' and no '.join(biases)}: use precision='bf16' or 'fp16'")
        return _attention(q, k, v, precision=self.precision, layout=self.layout, causal=causal,
                          softmax_scale=self.softmax_scale, backend=self.backend, window_size=window_size,
                          softcap=softcap, **biases)  # fmt: skip

    def extra_repr(self) -> str:
        names = ("precision", "hardware", "layout", "backend")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def flash_attention_3_forward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    causal: bool = True,
    precision: str = "fp8",
    *,
    softmax_scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of (batch, heads, seqlen, head_dim) tensors in "fp8", "bf16" or "fp16"; O has the dtype of Q.

    Raises what `fp8_attention` ("fp8") and `flash_attn_func` raise; InvalidInputError for another precision.
    """
    _check_choice("precision", precision, PRECISIONS)
    return _attention(Q, K, V, precision=precision, layout="bhsd", causal=causal, softmax_scale=softmax_scale,
                      backend=backend)  # fmt: skip


def flash_attention_3_backward(
    dO: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,  # noqa: E741
    lse: Tensor | None = None,
    causal: bool = True,
    *,
    softmax_scale: float | None = None,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) of attention in (batch, heads, seqlen, head_dim) order.

    Args:
        dO: gradient of O.
        O: result of the forward, as dO of its shape and dtype; K and V may have fewer heads.
        lse: (batch, heads, seqlen_q) float32 of the forward; recomputed by one more forward when None.

    Raises what `flash_attn_func` raises, and InvalidInputError for a dO, O or lse that does not fit.
    """
    do, q, k, v, o = (x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 4 else x for x in (dO, Q, K, V, O))
    check_tensors(q, k, v, varlen=False)
    expected = (*q.shape[:-1], v.shape[-1])
    for name, x in (("dO", do), ("O", o)):
        if not isinstance(x, Tensor) or tuple(x.shape) != expected or x.device != q.device or x.dtype != q.dtype:
            got = f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            batch, seqlen, heads, dim = expected
            raise InvalidInputError(
                f"{name} must be {q.dtype} of shape {(batch, heads, seqlen, dim)} on {q.device}, got {got} "
                "(shape in batch, seqlen, heads, head_dim order)"
            )
    scale, softcap = check_scalars(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap)
    check_name(backend)
    left, right = normalise_window(window_size, causal)
    if lse is None:
        with torch.no_grad():
            _, lse = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, window_size=window_size,
                                     softcap=softcap, return_lse=True, backend=backend)  # fmt: skip
    elif not isinstance(lse, Tensor):
        raise InvalidInputError(f"lse must be a torch.Tensor or None, got {type(lse).__name__}")
    elif lse.dtype != (torch.float64 if q.dtype == torch.float64 else torch.float32):
        raise InvalidInputError(
            f"lse must be {'float64' if q.dtype == torch.float64 else 'float32'} for {q.dtype} tensors, as the forward "
            f"returns it, got {lse.dtype}: the gradients depend exponentially on it"
        )
    elif tuple(lse.shape) != (q.shape[0], q.shape[2], q.shape[1]) or lse.device != q.device:
        raise InvalidInputError(
            f"lse must have shape (batch, heads, seqlen_q) = {(q.shape[0], q.shape[2], q.shape[1])} on {q.device}, "
            f"got {tuple(lse.shape)} on {lse.device}"
        )
    grads = flash_attention_backward(
        do, None, q, k, v, o, lse, scale, left, right, softcap, False, backend
    )
    return tuple(g.transpose(1, 2) for g in grads)
