"""The ways to compute attention that run side by side: our kernels and the strongest that torch and others offer.

Each contender gets its inputs in the layout it likes best, contiguous. A contender that cannot run says why, in the
words of whoever refused.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_accel.errors import GpuAccelError, HardwareError, UnsupportedError
from gpu_accel.testing import attention_mask
from gpu_accel.workbench.experiment import Case, Settings

from .inputs import TORCH_DTYPES

OURS = ("hopper", "portable")
FLEX_SEQLENS = (2048, 16384)
_SHARE_OF_MEMORY = 0.8  # of the card, for one contender; the rest is inputs, the truth and the allocator's waste
# N x N matrices that torch's math backend holds at once: scores, masked scores and probabilities; backward keeps the
# probabilities and adds their gradient, the scores' gradient and a product of the two.
_SQUARES = {"forward": 3, "backward": 5}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to compute attention.

    Args:
        attend: (q, k, v) in `layout` -> o in `layout`, differentiable.
        layout: "bshd" (batch, seqlen, heads, head_dim) or "bhsd" (batch, heads, seqlen, head_dim).
        unavailable: why it cannot run this case here; empty when it can.
    """

    name: str
    role: str
    layout: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    unavailable: str = ""
    note: str = ""

    def place(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors in (batch, seqlen, heads, head_dim) brought into this contender's layout, contiguous."""
        if self.layout == "bhsd":
            tensors = tuple(t.transpose(1, 2) for t in tensors)
        return tuple(t.contiguous() for t in tensors)

    def to_bshd(self, tensor: Tensor) -> Tensor:
        """A tensor in this contender's layout seen as (batch, seqlen, heads, head_dim)."""
        return tensor.transpose(1, 2) if self.layout == "bhsd" else tensor


def contenders(case: Case, settings: Settings) -> list[Contender]:
    """Every contender for a case, in the order of tables; those that cannot run say why."""
    return [
        *(_ours(name, case, settings) for name in OURS),
        _sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION, case, settings),
        _sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, case, settings),
        _sdpa("sdpa-math", SDPBackend.MATH, case, settings),
        _flex(case, settings),
        _flash_attn_4(case, settings),
    ]


@contextmanager
def refusals(contender: Contender) -> Iterator[None]:
    """Turn what a rival's library raises when it cannot run something into UnsupportedError, keeping its words.

    Not so for ours: a kernel of this library that fails is a wrong result, unless it refused beforehand.
    """
    name = contender.name
    if contender.role == "ours":
        yield
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except GpuAccelError:
            raise
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise UnsupportedError(f"{name} ran out of memory: {_first_line(error)}") from error
        except (RuntimeError, NotImplementedError, ImportError, AssertionError) as error:
            reasons = "; ".join(dict.fromkeys(_first_line(w.message) for w in said))
            message = f"{name} refused: {_first_line(error)}" + (f" ({reasons})" if reasons else "")
            # A failed launch leaves the device unusable; that is no refusal of one implementation.
            if "CUDA error" in str(error):
                raise HardwareError(message) from error
            raise UnsupportedError(message) from error


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


# -- ours


def problem_of(case: Case, device: str):
    """The case as the kernels' own description of a call."""
    from gpu_accel.flash_attention3.problem import Problem

    on_gpu = device.startswith("cuda")
    return Problem(
        device_type="cuda" if on_gpu else "cpu",
        capability=torch.cuda.get_device_capability(device) if on_gpu else None,
        dtype=TORCH_DTYPES[str(case["dtype"])],
        batch=int(case["batch"]),
        seqlen_q=int(case["seqlen_q"]),
        seqlen_k=int(case["seqlen_k"]),
        heads=int(case["heads"]),
        heads_kv=int(case["heads_kv"]),
        head_dim=int(case["head_dim"]),
        head_dim_v=int(case["head_dim"]),
        causal=bool(case["causal"]),
        window_left=-1,
        window_right=0 if case["causal"] else -1,
        softcap=0.0,
        varlen=False,
        requires_grad=case["pass"] == "backward",
    )


def _ours(name: str, case: Case, settings: Settings) -> Contender:
    causal = bool(case["causal"])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from gpu_accel.flash_attention3 import flash_attn_func

        return flash_attn_func(q, k, v, causal=causal, backend=name)

    return Contender(
        name=name,
        role="ours",
        layout="bshd",
        attend=attend,
        unavailable=_our_refusal(name, case, settings),
        note="layout (batch, seqlen, heads, head_dim)",
    )


def _our_refusal(name: str, case: Case, settings: Settings) -> str:
    from gpu_accel.flash_attention3.backends import refusal

    problem = problem_of(case, settings.device)
    needed = ("forward", "backward") if case["pass"] == "backward" else ("forward",)
    reasons = (refusal(name, which, problem) for which in needed)
    return next((why for why in reasons if why), "")


# -- torch


def _sdpa(name: str, backend: SDPBackend, case: Case, settings: Settings) -> Contender:
    causal, rows, keys = bool(case["causal"]), int(case["seqlen_q"]), int(case["seqlen_k"])
    shifted = causal and rows != keys
    grouped = case["heads"] != case["heads_kv"]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = attention_mask(rows, keys, causal=True, device=q.device) if shifted else None
        with sdpa_kernel(backend), _half_precision_math(backend == SDPBackend.MATH):
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal and not shifted, enable_gqa=grouped
            )

    unavailable = ""
    note = "scaled_dot_product_attention, layout (batch, heads, seqlen, head_dim)"
    if backend == SDPBackend.CUDNN_ATTENTION and not settings.on_gpu:
        unavailable = "cuDNN needs an NVIDIA GPU"
    elif backend == SDPBackend.MATH:
        unavailable = _too_large(case, settings)
    elif shifted:
        unavailable = (
            "is_causal of scaled_dot_product_attention is top-left aligned, this case (seqlen_q != seqlen_k) is "
            "bottom-right aligned, and this backend takes no mask in its place"
        )
    if backend == SDPBackend.MATH:
        note += "; matrix products and softmax in 16 bits, N x N matrices in memory"
    elif backend == SDPBackend.FLASH_ATTENTION:
        note += "; FlashAttention-2 inside torch" if settings.on_gpu else "; torch's CPU kernel of that name"
    return Contender(name=name, role="peer", layout="bhsd", attend=attend, unavailable=unavailable, note=note)


@contextmanager
def _half_precision_math(wanted: bool) -> Iterator[None]:
    """Let torch's math backend stay in 16 bits, as the standard attention of the papers does (its default: float32)."""
    if not wanted:
        yield
        return
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _too_large(case: Case, settings: Settings) -> str:
    """Why the N x N matrices of the math backend do not fit; empty when they do."""
    if not settings.on_gpu:
        return ""
    scores = int(case["batch"]) * int(case["heads"]) * int(case["seqlen_q"]) * int(case["seqlen_k"])
    needed = _SQUARES[str(case["pass"])] * scores * TORCH_DTYPES[str(case["dtype"])].itemsize
    total = torch.cuda.get_device_properties(settings.device).total_memory
    if needed <= _SHARE_OF_MEMORY * total:
        return ""
    return (
        f"its {_SQUARES[str(case['pass'])]} matrices of batch x heads x N x N need {needed / 2**30:.0f} GiB, "
        f"{_SHARE_OF_MEMORY:.0%} of this device is {_SHARE_OF_MEMORY * total / 2**30:.0f} GiB"
    )


def _flex(case: Case, settings: Settings) -> Contender:
    causal, rows, keys = bool(case["causal"]), int(case["seqlen_q"]), int(case["seqlen_k"])
    grouped = case["heads"] != case["heads_kv"]

    @functools.cache
    def compiled(device: torch.device):
        import torch._dynamo
        import torch._functorch.config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # One compilation a shape: the limit on recompilations would turn later shapes into uncompiled N x N attention.
        torch._dynamo.reset()
        # Buffers given away in the first backward cannot be kept for the next (retain_graph).
        torch._functorch.config.donated_buffer = False
        mask = None
        if causal:
            mask = create_block_mask(
                lambda b, h, row, key: row + (keys - rows) >= key, None, None, rows, keys, device=device
            )
        return torch.compile(flex_attention, dynamic=False, fullgraph=True), mask

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call, mask = compiled(q.device)
        return call(q, k, v, block_mask=mask, enable_gqa=grouped)

    return Contender(
        name="flex",
        role="peer",
        layout="bhsd",
        attend=attend,
        unavailable=_flex_refusal(rows, settings),
        note="torch.compile(flex_attention), compiled before timing, layout (batch, heads, seqlen, head_dim)",
    )


def _flex_refusal(rows: int, settings: Settings) -> str:
    if not settings.on_gpu:
        return "compiled FlexAttention is timed on GPUs only"
    if rows in FLEX_SEQLENS or settings.shapes or "flex" in settings.only:
        return ""
    lengths = " and ".join(map(str, FLEX_SEQLENS))
    return f"compiling it for every shape takes longer than all timing: runs at seqlen {lengths}, or with --only flex"


def _flash_attn_4(case: Case, settings: Settings) -> Contender:
    causal = bool(case["causal"])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func

        result = flash_attn_func(q, k, v, causal=causal)
        return result[0] if isinstance(result, tuple) else result

    unavailable = ""
    if not settings.on_gpu:
        unavailable = "needs an NVIDIA GPU"
    elif not _importable("flash_attn.cute"):
        unavailable = "flash-attn-4 is not installed (pip install flash-attn-4)"
    return Contender(
        name="flash-attn-4",
        role="peer",
        layout="bshd",
        attend=attend,
        unavailable=unavailable,
        note="flash_attn.cute, layout (batch, seqlen, heads, head_dim)",
    )


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the parent package is missing or broken
        return False
