"""Products of quantised matrices: `scaled_mm` for any pair that belongs together, `fp8_gemm` and `fp4_gemm` by name.

All compute a @ b.T + bias with a (..., K) and b (N, K), the layout of a linear layer. Operands that are not quantised
yet are quantised first. `scaled_mm_fp8` gives codes again, for the next product. Which kernel: see `explain_mm`.
MX and NVFP4 are emulated, exactly, on GPUs without units for them (all before Blackwell): their speed there says
nothing about the formats. backend="blackwell" is a kernel for those units; it compiles and has never run, so "auto"
emulates there too.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.launch import capability, launch
from gpu_accel.thunderkittens.gemm_api import activated
from gpu_accel.thunderkittens.gemm_hopper import ACTIVATIONS
from gpu_accel.transformer_engine import hopper_gemm
from gpu_accel.transformer_engine.checks import check_bias, check_choice, check_no_gradient, check_one_device
from gpu_accel.transformer_engine.codec import ELEMENTS
from gpu_accel.transformer_engine.gemm_kernels import _emulated_kernel, _fp8_kernel, _native_kernel
from gpu_accel.transformer_engine.quantizer import choose_backend, quantize
from gpu_accel.transformer_engine.reference import Parts
from gpu_accel.transformer_engine.reference_gemm import scaled_mm_reference
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.schemes import scheme as find_scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NATIVE = ("e4m3", "e5m2", "e2m1")  # elements of MX and NVFP4 that backend="blackwell" multiplies
_GROUP = 8


def _kind(what: Scheme) -> str:
    """ "fp8" for the kernel on fp8 tensor cores, "emulated" for blocks that are widened first, else why neither."""
    if what.hadamard:
        return "a rotated operand must be multiplied with one rotated alike, which only the modules make sure of"
    if what.scale in ("fp32", "pow2"):
        if what.element not in ("e4m3", "e5m2"):
            return f"there is no product for {what.element} with float32 scales: dequantize() first"
        return "fp8" if what.block in ((0, 0), (1, 0), (1, 128), (128, 128)) else f"blocks of {what.block} have none"
    return "emulated"


def explain_mm(a: QuantizedTensor, b: QuantizedTensor, *, backend: str = "auto") -> str:
    """Which kernel `scaled_mm` takes for these operands, in a sentence. Raises what it raises for the backend."""
    kind = pair_kind(a, b)
    if backend == "blackwell":
        _check_native(a, b, kind)
        return f"{a.scheme} x {b.scheme}: units for MX and NVFP4"
    way = _way(a, b, kind, backend)
    if way == "reference":
        return f"{a.scheme} x {b.scheme}: torch, codes widened to float64"
    if kind == "emulated":
        return f"{a.scheme} x {b.scheme}: emulated, codes widened to bf16 in registers, bf16 products (plain Triton)"
    how = "plain Triton" if backend == "portable" else hopper_gemm.explain(a, b, backend)
    return f"{a.scheme} x {b.scheme}: fp8 products, float32 sums every 128 of K ({how})"


def _way(a: QuantizedTensor, b: QuantizedTensor, kind: str, backend: str) -> str:
    """ "hopper", "portable" or "reference". Raises where the backend asked for cannot run."""
    if kind == "fp8" and hopper_gemm.chosen(a, b, backend):
        return "hopper"
    return plain_backend(backend, a, "scaled_mm", kind)


def plain_backend(backend: str, a: QuantizedTensor, what: str, kind: str) -> str:
    """ "portable" or "reference". Raises as `choose_backend`, and HardwareError where a GPU has no fp8 products."""
    chosen = choose_backend(backend, a, what)
    kernels = chosen == "portable" and kind == "fp8" and not INTERPRET
    if kernels and (torch.version.hip or capability(a.device) < (8, 9)):
        raise HardwareError("fp8 products need compute capability 8.9 (Ada, Hopper or newer): use bf16, or int8")
    return chosen


def pair_kind(a: QuantizedTensor, b: QuantizedTensor) -> str:
    """The kind of product, "fp8" or "emulated"; refuses operands that do not belong together."""
    for name, q in (("a", a), ("b", b)):
        if not isinstance(q, QuantizedTensor):
            raise InvalidInputError(f"{name} must be a QuantizedTensor, got {type(q).__name__}: quantize() it first")
    first, second = a.scheme, b.scheme
    for name, q in (("a", a), ("b", b)):
        if q.codes is None:
            raise InvalidInputError(f"{name} has no row-wise copy: quantise with rowwise=True")
        if _kind(q.scheme) not in ("fp8", "emulated"):
            raise UnsupportedError(f"{name} is {q.scheme}: {_kind(q.scheme)}")
    kinds = {_kind(first), _kind(second)}
    blocked = {first.block[1] == 128, second.block[1] == 128}
    same_blocks = (first.scale, first.block[1]) == (second.scale, second.block[1])
    if len(kinds) > 1 or (kinds == {"fp8"} and len(blocked) > 1) or (kinds == {"emulated"} and not same_blocks):
        raise UnsupportedError(f"{first} and {second} cannot be multiplied: their scales run differently along K")
    return kinds.pop()


def _check(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    if b.dim() != 2 or a.shape[-1:] != b.shape[-1:]:
        raise InvalidInputError(f"a must be (..., K) and b (N, K), got {tuple(a.shape)} and {tuple(b.shape)}")
    check_bias(bias, b.shape[0])
    check_one_device(a=a, b=b, bias=bias)
    check_no_gradient(a=a, b=b, bias=bias)
    if out_dtype not in OUT_DTYPES:
        raise InvalidInputError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")


def scaled_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate_into: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """activation(a (..., K) @ b (N, K).T + bias (N,)), in `out_dtype`; any sizes.

    activation: "none", "relu", "gelu" (erf), "gelu_tanh" or "silu", of the float32 sums. accumulate_into: a contiguous
    float32 (..., N) that the product is added to, as gradients of weights are; it is also what is returned, and
    `out_dtype` says nothing.

    Pairs: fp8 with scales per tensor or row (each as it likes); fp8 in 1x128 or 128x128 (each as it likes); MX with MX;
    NVFP4 with NVFP4. Raises InvalidInputError for shapes, devices and dtypes, UnsupportedError for other pairs and for
    tensors that want a gradient (a bias, or what is added to), HardwareError where a GPU has no fp8 products (before
    compute capability 8.9).
    """
    kind = pair_kind(a, b)
    _check(a, b, bias, out_dtype)
    _check_epilogue(a, b, activation, accumulate_into)
    shape = (*a.shape[:-1], b.shape[0])
    native = backend == "blackwell"
    if native:
        _check_native(a, b, kind)
    way = "portable" if native else _way(a, b, kind, backend)
    if way == "hopper":
        given = (*_bytes(a)[:2], *_bytes(b)[:2], bias, activation)
        if accumulate_into is not None:
            flat = accumulate_into.view(a.shape[:-1].numel(), b.shape[0])
            hopper_gemm.hopper_mm_add_op(flat, *given, a.scheme.text, b.scheme.text)
            return accumulate_into
        return hopper_gemm.hopper_mm_op(*given, out_dtype, a.scheme.text, b.scheme.text).view(shape)
    staged = activation != "none" or accumulate_into is not None  # then sums stay float32, and are rounded once
    if way == "reference":
        out = scaled_mm_reference(a, b, bias=bias, out_dtype=torch.float32 if staged else out_dtype)
    else:
        wanted = torch.float32 if staged else out_dtype
        texts = (a.scheme.text, b.scheme.text)
        out = scaled_mm_op(*_bytes(a), *_bytes(b), bias, wanted, *texts, a.shape[-1], native).view(shape)
    if not staged:
        return out
    out = activated(out, activation)
    return out.to(out_dtype) if accumulate_into is None else accumulate_into.add_(out)


def scaled_mm_fp8(
    a: QuantizedTensor,
    b: QuantizedTensor,
    scale: Tensor,
    *,
    element: str = "e4m3",
    bias: Tensor | None = None,
    activation: str = "none",
    amax: Tensor | None = None,
    backend: str = "auto",
) -> QuantizedTensor:
    """`scaled_mm` of two fp8 operands, rounded to fp8 on its way out: codes = result / scale, saturating.

    Args:
        scale: () float32, what the codes will be multiplied with, as delayed scaling knows it beforehand.
        element: "e4m3" or "e5m2". amax: () float32 that is raised to the largest magnitude of the result, or None.
    Returns:
        a tensor (..., N) of scheme "fp8" or "fp8_e5m2", dtype bfloat16, with only the row-wise copy. Its scale and
        `seen_amax` are copies, so that it keeps its meaning when those given change with the next step.
    """
    kind = pair_kind(a, b)
    _check(a, b, bias, torch.bfloat16)
    _check_epilogue(a, b, activation, None)
    if kind != "fp8":
        raise UnsupportedError(f"{a.scheme} x {b.scheme} has no fp8 result: use scaled_mm, then quantize")
    check_fp8_result(a, element, scale, amax)
    if hopper_gemm.chosen(a, b, backend):
        codes = hopper_gemm.hopper_mm_fp8_op(
            *_bytes(a)[:2], *_bytes(b)[:2], bias, activation, scale, amax, element, a.scheme.text, b.scheme.text
        )
    else:
        out = scaled_mm(a, b, bias=bias, activation=activation, out_dtype=torch.float32, backend=backend)
        out = out.reshape(a.shape[:-1].numel(), b.shape[0])
        codes = to_fp8(out, scale, element, amax)
    return of_codes(codes, scale, element, amax, torch.Size((*a.shape[:-1], b.shape[0])))


def check_fp8_result(a: QuantizedTensor, element: str, scale: Tensor, amax: Tensor | None) -> None:
    """What a product that is rounded to fp8 is given beside its operands."""
    check_choice("element", element, hopper_gemm.ELEMENTS)
    for name, x in (("scale", scale), ("amax", amax)):
        if x is None and name == "amax":
            continue
        if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.numel() != 1:
            raise InvalidInputError(f"{name} must be one float32, got {getattr(x, 'dtype', type(x).__name__)}")
    check_one_device(a=a, scale=scale, amax=amax)
    check_no_gradient(scale=scale, amax=amax)


def to_fp8(out: Tensor, scale: Tensor, element: str, amax: Tensor | None) -> Tensor:
    """Codes of `element` of out / scale, saturating; `amax` is raised to the largest magnitude of `out`."""
    if amax is not None and out.numel():
        amax.copy_(torch.maximum(amax, out.abs().amax()))
    limit = torch.finfo(hopper_gemm.ELEMENTS[element]).max
    return (out * (1.0 / scale).reshape(())).clamp(-limit, limit).to(hopper_gemm.ELEMENTS[element])


def of_codes(codes: Tensor, scale: Tensor, element: str, amax: Tensor | None, shape: torch.Size) -> QuantizedTensor:
    """The tensor that codes mean. Delayed scaling rolls scale and amax in place, and these codes keep theirs."""
    what = find_scheme("fp8" if element == "e4m3" else "fp8_e5m2")
    row = Parts(codes.view(torch.uint8), scale.detach().reshape(1, 1).clone())
    amax = None if amax is None else amax.detach().reshape(()).clone()
    return QuantizedTensor.from_parts(row=row, col=None, scheme=what, shape=shape, dtype=torch.bfloat16, amax=amax)


def _check_native(a: QuantizedTensor, b: QuantizedTensor, kind: str) -> None:
    """Refuse what the units of Blackwell do not multiply, and GPUs without them."""
    elements = {a.scheme.element, b.scheme.element}
    if kind != "emulated" or not elements <= set(NATIVE):
        raise UnsupportedError(
            f"blackwell: {a.scheme} x {b.scheme} has no kernel there; products of MX and NVFP4 in {', '.join(NATIVE)} "
            f"do: use backend='auto'"
        )
    if not a.is_cuda or torch.version.hip or capability(a.device) != (10, 0):
        raise UnsupportedError(f"blackwell: needs compute capability 10.0 (B200, GB200), got {_device(a)}")


def _device(x: Tensor) -> str:
    return "{}.{}".format(*capability(x.device)) if x.is_cuda else f"a tensor on {x.device.type}"


def _check_epilogue(a: Tensor, b: Tensor, activation: str, accumulate_into: Tensor | None) -> None:
    check_choice("activation", activation, ACTIVATIONS)
    if accumulate_into is None:
        return
    shape = (*a.shape[:-1], b.shape[0])
    if not isinstance(accumulate_into, Tensor) or accumulate_into.dtype != torch.float32:
        raise InvalidInputError("accumulate_into must be a float32 tensor")
    if tuple(accumulate_into.shape) != shape or not accumulate_into.is_contiguous():
        raise InvalidInputError(f"accumulate_into must be {shape} and contiguous, got {tuple(accumulate_into.shape)}")
    check_one_device(a=a, accumulate_into=accumulate_into)
    check_no_gradient(accumulate_into=accumulate_into)


def _bytes(q: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes (M, bytes), scales, tensor scale), all as plain numbers or bytes."""
    parts = q._parts("")
    assert parts is not None
    return parts.codes, parts.scales, parts.tensor_scale


@torch.library.custom_op("gpu_accel::te_scaled_mm", mutates_args=())
def scaled_mm_op(
    a: Tensor, scale_a: Tensor, tensor_a: Tensor | None, b: Tensor, scale_b: Tensor, tensor_b: Tensor | None,
    bias: Tensor | None, out_dtype: torch.dtype, text_a: str, text_b: str, k: int, native: bool,
) -> Tensor:  # fmt: skip
    """Launch a kernel: (M, N) from codes (M, ...) and (N, ...); arguments are checked by `scaled_mm`. native: on units
    for MX and NVFP4."""
    m, n = a.shape[0], b.shape[0]
    schemes = (find_scheme(text_a), find_scheme(text_b))
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if not k:
        return out.copy_(bias) if bias is not None else out.zero_()
    if not out.numel():
        return out
    kind = _kind(schemes[0])
    bm = 64 if m <= 64 else 128
    bn, bk = 128, 128 if kind == "fp8" else 64
    tiles_m, tiles_n = triton.cdiv(m, bm), triton.cdiv(n, bn)
    given = bias.contiguous() if bias is not None else out  # the kernels read it with stride 1
    common = dict(BM=bm, BN=bn, BK=bk, GROUP=_GROUP, BIAS=bias is not None, num_warps=4 if bm == 64 else 8)
    if kind == "fp8":
        places = []
        for scales, what in ((scale_a, schemes[0]), (scale_b, schemes[1])):
            across = scales.shape[1]
            # stride along rows, along K, and rows that share a scale
            strides = {(0, 0): (0, 0, 1), (1, 0): (1, 0, 1), (1, 128): (across, 1, 1), (128, 128): (across, 1, 128)}
            places.append(strides[what.block])
        options = dict(
            A_E5M2=schemes[0].element == "e5m2", B_E5M2=schemes[1].element == "e5m2",
            BLOCKED=schemes[0].block[1] == 128, ROWS_A=places[0][2], ROWS_B=places[1][2], EVEN=k % bk == 0,
            GROUPED=0, num_stages=3,
        )  # fmt: skip
        arguments = (a, b, scale_a, scale_b, given, out, out, m, n, k, tiles_m, tiles_n, 0, *places[0][:2],
                     *places[1][:2])  # fmt: skip
        launch(_fp8_kernel, tiles_m * tiles_n, arguments, {**common, **options})
        return out
    tensors = [t if t is not None else out for t in (tensor_a, tensor_b)]
    elements = [what.element for what in schemes]
    if native:
        bk = 256 if set(elements) == {"e2m1"} else 128
        formats: dict[str, object] = dict(A_FORMAT=elements[0], B_FORMAT=elements[1])
    else:
        formats = dict(A_ELEMENT=ELEMENTS[elements[0]], B_ELEMENT=ELEMENTS[elements[1]])
    options = dict(
        G=schemes[0].block[1], ROWS_A=schemes[0].block[0], ROWS_B=schemes[1].block[0], E8M0=schemes[0].scale == "e8m0",
        EVEN=k % bk == 0, num_stages=2,
    )  # fmt: skip
    arguments = (a, b, scale_a, scale_b, *tensors, given, out, m, n, k, a.shape[1], b.shape[1], scale_a.shape[1],
                 tiles_m, tiles_n)  # fmt: skip
    kernel = _native_kernel if native else _emulated_kernel
    launch(kernel, tiles_m * tiles_n, arguments, {**common, **options, **formats, "BK": bk})
    return out


@scaled_mm_op.register_fake
def _(a, scale_a, tensor_a, b, scale_b, tensor_b, bias, out_dtype, text_a, text_b, k, native):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _quantized(name: str, x: Tensor, what: str | Scheme, backend: str) -> QuantizedTensor:
    if isinstance(x, Tensor):
        check_no_gradient(**{name: x})
    backend = "auto" if backend in ("hopper", "blackwell") else backend  # that is a product's backend
    return x if isinstance(x, QuantizedTensor) else quantize(x, what, backend=backend)


def fp8_gemm(
    a: Tensor,
    b: Tensor,
    *,
    scheme_a: str | Scheme = "fp8_row",
    scheme_b: str | Scheme = "fp8_row",
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """a (..., K) @ b (N, K).T on eight-bit floats. Operands that are QuantizedTensor are used as they are.

    Raises as `scaled_mm`, and UnsupportedError for operands that are not e4m3 or e5m2, or that want a gradient.
    """
    qa, qb = _quantized("a", a, scheme_a, backend), _quantized("b", b, scheme_b, backend)
    for name, q in (("a", qa), ("b", qb)):
        if q.scheme.element not in ("e4m3", "e5m2"):
            raise UnsupportedError(f"{name} is {q.scheme}, not e4m3 or e5m2: use scaled_mm or fp4_gemm")
    return scaled_mm(qa, qb, bias=bias, out_dtype=out_dtype, backend=backend)


def fp4_gemm(
    a: Tensor,
    b: Tensor,
    *,
    scheme_a: str | Scheme = "nvfp4",
    scheme_b: str | Scheme = "nvfp4",
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """a (..., K) @ b (N, K).T on four-bit floats: NVFP4 (default) or MXFP4.

    Emulated on every GPU so far: codes are widened to bf16 in registers, exactly. The results are those of the format,
    the speed is that of bf16 with a quarter of the bytes. `QuantizedTensor.emulated` says so too.

    Raises as `scaled_mm`, and UnsupportedError for operands that are not e2m1, or that want a gradient.
    """
    qa, qb = _quantized("a", a, scheme_a, backend), _quantized("b", b, scheme_b, backend)
    for name, q in (("a", qa), ("b", qb)):
        if q.scheme.element != "e2m1":
            raise UnsupportedError(f"{name} is {q.scheme}, not e2m1: use scaled_mm or fp8_gemm")
    return scaled_mm(qa, qb, bias=bias, out_dtype=out_dtype, backend=backend)
