"""The custom ops: what torch.compile, autograd and opcheck see of attention.

    gpu_accel::flash_attention_forward(q, k, v, ...) -> (o, lse)            flash_attention_backward -> (dq, dk, dv)
    gpu_accel::flash_attention_varlen_forward(q, k, v, cu_seqlens_q, ...)   flash_attention_varlen_backward

Both outputs of the forward are differentiable. Arguments are validated by `api.py`; the backend is chosen in here,
at run time, so that a compiled graph holds no decision about the machine. Calls with sinks, biases, modifiers or block
masks have ops of their own, in `featured.py`, so that plain calls stay as short as they are.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3.backends import BACKENDS, choose, features_of, module
from gpu_accel.flash_attention3.features import Features
from gpu_accel.flash_attention3.launch import capability
from gpu_accel.flash_attention3.problem import Problem


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_left: int,
    window_right: int,
    softcap: float,
    cu_seqlens_q: Tensor | None = None,
    deterministic: bool = False,
    requires_grad: bool = False,
    features: Features | None = None,
) -> Problem:
    """Describe a validated call."""
    varlen = cu_seqlens_q is not None
    return Problem(
        device_type=q.device.type,
        capability=capability(q.device) if q.device.type == "cuda" else None,
        dtype=q.dtype,
        batch=cu_seqlens_q.shape[0] - 1 if varlen else q.shape[0],
        seqlen_q=q.shape[-3],
        seqlen_k=k.shape[-3],
        heads=q.shape[-2],
        heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        causal=window_right == 0,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        varlen=varlen,
        requires_grad=requires_grad,
        deterministic=deterministic,
        features=frozenset() if features is None else features.names(),
        block_size=(0, 0) if features is None else features.block_size,
    )


def unit_last_stride(x: Tensor) -> Tensor:
    """x, or one contiguous copy where neighbours along head_dim are not neighbours in memory."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


def _contiguous_offsets(options: dict) -> dict:
    """The options with every index tensor contiguous: kernels read them by address, element after element."""
    if options.get("cu_seqlens_q") is None:
        return options
    return {n: x.contiguous() if n in _OFFSETS and x is not None else x for n, x in options.items()}


@functools.lru_cache(4096)
def _backend_name(problem: Problem, backend: str, pass_: str) -> str:
    return choose(problem, backend, pass_)[0]


def _on_device_of(x: Tensor):
    """Triton launches on the current device, whichever device the tensors are on."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def nobody_watches(*tensors: Tensor) -> bool:
    """Plain tensors, no gradient wanted, no compiler, mode or transform.

    Then the op's dispatch, 150 us of Python on the way to the same kernel, can be left out.
    """
    return (
        not torch.compiler.is_compiling()
        and all(type(x) is Tensor and not x.is_meta for x in tensors)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def refuse_transforms(name: str) -> None:
    """For what has no rule for vmap, grad and their kind."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError(f"{name} has no rule for the transforms of torch.func: put the batch into its tensors")


def _described(q, k, v, options: dict, deterministic: bool = False) -> Problem:
    return problem_of(
        q, k, v, **{n: options[n] for n in ("window_left", "window_right", "softcap")},
        cu_seqlens_q=options.get("cu_seqlens_q"), deterministic=deterministic,
        features=options.get("features"),
    )  # fmt: skip


def run_forward(q, k, v, backend, **options):
    """What the forward ops do: choose and launch."""
    q, k, v = (unit_last_stride(x) for x in (q, k, v))
    options = _contiguous_offsets(options)
    problem = _described(q, k, v, options)
    name = _backend_name(problem, backend, "forward")
    with _on_device_of(q):
        return module(BACKENDS[name], "forward").forward(q, k, v, **options)


def run_backward(do, dlse, q, k, v, o, lse, backend, deterministic, **options):
    """What the backward ops do."""
    do, q, k, v, o = (unit_last_stride(x) for x in (do, q, k, v, o))
    options = _contiguous_offsets(options)
    problem = _described(q, k, v, options, deterministic)
    if not features_of(problem.features, "backward"):
        options = {n: x for n, x in options.items() if n != "features"}
    name = _backend_name(problem, backend, "backward")
    with _on_device_of(q):
        return module(BACKENDS[name], "backward").backward(do, q, k, v, o, lse, dlse=dlse, **options)


def empty_outputs(q: Tensor, v: Tensor, lse_shape) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse_shape, dtype=lse_dtype)


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def refuse_second(op: torch.library.CustomOpDef, what: str = "attention") -> None:
    """Gradients through the gradients that `op` makes are refused in words, once somebody takes them."""

    def refuse(ctx, *_):
        raise UnsupportedError(f"{what} has first gradients only: create_graph=True is not supported")

    op.register_autograd(refuse)


# ---- dense: q (batch, seqlen_q, heads, head_dim), lse (batch, heads, seqlen_q)


@torch.library.custom_op("gpu_accel::flash_attention_forward", mutates_args=())
def flash_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window_left: int, window_right: int, softcap: float,
    deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return run_forward(q, k, v, backend, softmax_scale=softmax_scale, window_left=window_left,
                        window_right=window_right, softcap=softcap)  # fmt: skip


@flash_attention_forward.register_fake
def _(q, k, v, softmax_scale, window_left, window_right, softcap, deterministic, backend):
    return empty_outputs(q, v, (q.shape[0], q.shape[2], q.shape[1]))


@torch.library.custom_op("gpu_accel::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    softmax_scale: float, window_left: int, window_right: int, softcap: float, deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return run_backward(do, dlse, q, k, v, o, lse, backend, deterministic, softmax_scale=softmax_scale,
                         window_left=window_left, window_right=window_right, softcap=softcap)  # fmt: skip


@flash_attention_backward.register_fake
def _(do, dlse, q, k, v, o, lse, softmax_scale, window_left, window_right, softcap, deterministic, backend):
    return empty_gradients(q, k, v)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.scalars = inputs[3:]
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dlse):
    q, k, v, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    grads = flash_attention_backward(do, dlse, q, k, v, o, lse, *ctx.scalars)
    return (*grads, *(None for _ in ctx.scalars))


flash_attention_forward.register_autograd(_gradients, setup_context=_save)
refuse_second(flash_attention_backward)


# ---- packed sequences: q (total_q, heads, head_dim), lse (heads, total_q)


@torch.library.custom_op("gpu_accel::flash_attention_varlen_forward", mutates_args=())
def flash_attention_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_q: Tensor | None,
    seqused_k: Tensor | None, softmax_scale: float, window_left: int, window_right: int, softcap: float,
    deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return run_forward(q, k, v, backend, softmax_scale=softmax_scale, window_left=window_left,
                        window_right=window_right, softcap=softcap, cu_seqlens_q=cu_seqlens_q,
                        cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k)  # fmt: skip


@flash_attention_varlen_forward.register_fake
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *scalars):
    return empty_outputs(q, v, (q.shape[1], q.shape[0]))


@torch.library.custom_op("gpu_accel::flash_attention_varlen_backward", mutates_args=())
def flash_attention_varlen_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_q: Tensor | None, seqused_k: Tensor | None,
    softmax_scale: float, window_left: int, window_right: int, softcap: float, deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return run_backward(do, dlse, q, k, v, o, lse, backend, deterministic, softmax_scale=softmax_scale,
                         window_left=window_left, window_right=window_right, softcap=softcap,
                         cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
                         seqused_k=seqused_k)  # fmt: skip


@flash_attention_varlen_backward.register_fake
def _(do, dlse, q, k, v, *rest):
    return empty_gradients(q, k, v)


def _save_varlen(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.scalars = inputs[7:]
    ctx.set_materialize_grads(False)


def _gradients_varlen(ctx, do, dlse):
    q, k, v, cu_q, cu_k, used_q, used_k, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    grads = flash_attention_varlen_backward(do, dlse, q, k, v, o, lse, cu_q, cu_k, used_q, used_k, *ctx.scalars)
    return (*grads, *(None for _ in range(4 + len(ctx.scalars))))


flash_attention_varlen_forward.register_autograd(_gradients_varlen, setup_context=_save_varlen)
refuse_second(flash_attention_varlen_backward)
