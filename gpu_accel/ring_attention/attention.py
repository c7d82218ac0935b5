"""Distributed attention, checked and differentiable: what every public function of this package ends in.

Each rank calls :func:`distributed_attention` with its shard, (batch, local_length, heads, head_dim). Order of things:
check what can be checked alone, let all ranks agree (also on an error of one of them), communicate. So a mistake on one
rank is an error on all, and none hangs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import GpuAccelError, InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.backends import check_name
from gpu_accel.flash_attention3.problem import check_flag, check_scalars, check_tensors, normalise_window
from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.layouts import Layout, sequence_length
from gpu_accel.ring_attention.masks import Mask
from gpu_accel.ring_attention.schedules import schedule as find_schedule
from gpu_accel.ring_attention.step import partial_dtype
from gpu_accel.ring_attention.transport import PointToPoint, Transport
from gpu_accel.ring_attention.wire import WIRES

Window = tuple[int | None, int | None]
_ONLY = {  # options and the schedules that read them
    "ulysses": ("usp",),
    "inner": ("double_ring",),
    "mesh": ("mesh", "concentric"),
    "wire": ("kv_ring", "double_ring", "allgather", "ulysses", "usp", "mesh", "concentric", "helper"),
}
_OPTIONS = (
    "causal", "window_size", "softmax_scale", "softcap", "backend", "ulysses", "inner", "mesh", "wire", "overlap",
    "deterministic",
)  # fmt: skip


def check_names(options: Iterable[str], allowed: Sequence[str] = _OPTIONS) -> None:
    """Options that exist. None is accepted and ignored."""
    if unknown := sorted(set(options) - set(allowed)):
        raise InvalidInputError(f"no option {', '.join(unknown)} here: the options are {', '.join(allowed)}")


def check_split(
    ranks: int | None,
    *,
    ulysses: object = None,
    inner: object = None,
    mesh: object = None,
    wire: object = None,
) -> None:
    """How ranks are grouped and what they send, as far as it can be said without tensors; ranks may be unknown yet."""
    for name, degree in (("ulysses", ulysses), ("inner", inner)):
        if degree is not None and (type(degree) is not int or degree < 1 or (ranks or degree) % degree):
            raise InvalidInputError(f"{name} must divide the {_number(ranks)} ranks, got {shown(degree)}")
    if mesh is not None:
        sizes = isinstance(mesh, tuple | list) and len(mesh) == 2 and all(type(n) is int and n > 0 for n in mesh)
        if not sizes or (ranks and mesh[0] * mesh[1] != ranks):  # type: ignore[index]
            raise InvalidInputError(
                f"mesh must be two sizes whose product is the {_number(ranks)} ranks, got {shown(mesh)}"
            )
    if wire not in WIRES:
        known = ", ".join(str(x).removeprefix("torch.") for x in WIRES)
        raise UnsupportedError(f"wire must be one of {known}, got {shown(wire)}")


def _number(ranks: int | None) -> str:
    return "number of" if ranks is None else str(ranks)


def check_read(schedule: str, options: Mapping[str, object]) -> None:
    """An option of one schedule is not given to another, which would ignore it."""
    for option, names in _ONLY.items():
        if options.get(option) is not None and schedule not in names:
            raise InvalidInputError(f"{option} is an option of {', '.join(names)}, not of {schedule}: leave it out")


def check_held(*tensors: Tensor) -> None:
    """Tensors that hold something to send: none of the meta device, of a fake mode, or of a transform."""
    for x in tensors:
        if x.is_meta or type(x).__name__ == "FakeTensor":
            raise InvalidInputError("q, k, v hold nothing that could be sent: they are fake, or on the meta device")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError("ranks do not share a transform of torch.func: take gradients by torch.autograd")


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    backend: str = "auto",
    ulysses: int | None = None,
    inner: int | None = None,
    mesh: tuple[int, int] | None = None,
    wire: torch.dtype | None = None,
    overlap: bool = True,
    deterministic: bool = False,
    replicated_q: bool = False,
    **unknown: Any,
) -> Call:
    """Check one rank's shards and options.

    Raises:
        InvalidInputError: wrong shape, dtype or value, or an option that is not there. UnsupportedError: a wire format
        that is not there.
    """
    check_names(unknown)
    check_tensors(q, k, v, varlen=False)
    check_held(q, k, v)
    if not isinstance(layout, Layout):
        raise InvalidInputError(f"layout must come from make_layout, got {shown(layout)}")
    rows = layout.local_length
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[1] != rows and not (replicated_q and name == "q"):
            raise InvalidInputError(
                f"{name} has {x.shape[1]} rows, but a shard of this layout has {rows} ({layout}): use layout.shard()"
            )
    scale, cap = check_scalars(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap)
    check_name(backend)
    left, right = normalise_window(window_size, check_flag("causal", causal))
    check_split(layout.ranks, ulysses=ulysses, inner=inner, mesh=mesh, wire=wire)
    return Call(
        layout=layout, mask=Mask(left, right), softmax_scale=scale, softcap=cap, backend=backend, ulysses=ulysses,
        inner=inner, mesh=mesh, wire=wire, overlap=check_flag("overlap", overlap),
        deterministic=check_flag("deterministic", deterministic),
    )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport, *, schedule: str = "kv_ring"
) -> tuple[Tensor, Tensor]:
    """(o, lse) of this rank's queries, outside autograd. All ranks call it together."""
    with told(transport):
        module = find_schedule(schedule)
    with torch.no_grad():
        agree(call, transport, schedule, q, k, v)
        return module.forward(q, k, v, call, transport)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, transport: Transport,
    *, schedule: str = "kv_ring",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of this rank's shards from the gradient and result of the forward."""
    with told(transport):
        module = find_schedule(schedule)
    with torch.no_grad():
        error = _wrong_results(do, q, v, o, lse)
        agree(call, transport, f"{schedule} backward", q, k, v, error=error)
        return module.backward(do, q, k, v, o, lse, call, transport)


def _wrong_results(do: object, q: Tensor, v: Tensor, o: object, lse: object) -> GpuAccelError | None:
    """What the other ranks have to be told of a gradient and what it is of, or None."""
    shape, sums = (*q.shape[:-1], v.shape[-1]), (q.shape[0], q.shape[2], q.shape[1])
    for name, x, expected, dtype in (
        ("do", do, shape, q.dtype), ("o", o, shape, q.dtype), ("lse", lse, sums, partial_dtype(q)),
    ):  # fmt: skip
        if not isinstance(x, Tensor):
            return InvalidInputError(f"do, o and lse must be tensors, got {name} of type {type(x).__name__}")
        if x.shape != expected or x.dtype != dtype or x.device != q.device or x.layout != torch.strided:
            return InvalidInputError(
                f"{name} must be {dtype} {expected} on {q.device} beside these q, k, v; got "
                f"{x.dtype} {tuple(x.shape)} on {x.device}{'' if x.layout == torch.strided else f', {x.layout}'}"
            )
    return None


def agree(
    call: Call, transport: Transport, schedule: str, *tensors: Tensor, error: GpuAccelError | None = None
) -> None:
    """Refuse what the schedule cannot run, then make sure that all ranks are about to do the same."""
    name = schedule.removesuffix(" backward")
    if error is None and transport.size != call.ranks:
        error = InvalidInputError(f"the layout is for {call.ranks} ranks, but the transport has {transport.size}")
    if error is None:
        try:
            check_read(name, vars(call))
        except InvalidInputError as ignored:
            error = ignored
    if error is None and (why := find_schedule(name).refuse(call, *tensors)):
        error = UnsupportedError(f"schedule {name!r} cannot run this: {why}")
    transport.agree(call.statement(schedule, *tensors), error)


def check_transport(transport: object) -> None:
    """Something through which the other ranks can be reached; without it they cannot be told either."""
    if not isinstance(transport, PointToPoint) and not isinstance(transport, Transport):  # the latter takes long
        raise InvalidInputError(
            f"transport must be a Transport, such as choose_transport() returns, got {shown(transport)}"
        )


@contextmanager
def told(transport: Transport) -> Iterator[None]:
    """What this rank finds wrong before it has asked the others is told to them: they must not wait for it."""
    check_transport(transport)
    try:
        yield
    except Exception as error:
        transport.agree("", error)
        raise


class _FirstOnly(torch.autograd.Function):
    """Gradients as they are, which know what they were made of and refuse to be differentiated."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor):
        return tuple(x.view_as(x) for x in tensors[:3])

    @staticmethod
    def backward(ctx: Any, *_: Tensor):
        raise UnsupportedError("ring attention has first gradients only: create_graph=True is not supported")


def first_only(grads: Sequence[Tensor], *made_of: Tensor) -> Sequence[Tensor]:
    """(dq, dk, dv) in a backward pass; where its graph is kept, part of it, so that no part is left out silently."""
    return _FirstOnly.apply(*grads, *made_of) if torch.is_grad_enabled() else grads


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport, schedule: str):
        o, lse = forward(q, k, v, call, transport, schedule=schedule)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rest = (call, transport, schedule)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _dlse: Tensor):
        call, transport, name = ctx.rest
        q, k, v, o, lse = ctx.saved_tensors
        grads = backward(do.resolve_neg().contiguous(), q, k, v, o, lse, call, transport, schedule=name)
        return (*first_only(grads, do, q, k, v), None, None, None)


def distributed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    transport: Transport,
    schedule: str = "kv_ring",
    check_finite: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Exact attention over a sequence of which each rank holds a shard; differentiable.

    Args:
        q: (batch, local_length, heads, head_dim), this rank's shard under `layout`; float16, bfloat16, float32, or
            (reference only) float64. schedule="tree": the last queries of the sequence, the same on all ranks.
        k, v: likewise, with heads_kv that divides heads; v may have another head_dim.
        layout: see layouts.py. transport: see transport.py. schedule: see schedules/__init__.py.
        check_finite: NaN or Inf in the tokens of any rank is an error on all of them, instead of NaN in everyone's
            results; costs a pass over q, k, v and waits for the GPU.
        options: causal, window_size, softmax_scale, softcap, backend, ulysses, inner, mesh, wire,
            overlap, deterministic (see `Call`).

    Returns:
        o (batch, local_length, heads, head_dim_v) of the dtype of q, and lse (batch, heads, local_length) in float32,
        without gradient. Padding rows: 0 and -inf.

    Raises:
        InvalidInputError, UnsupportedError: on every rank, before any tensor has been sent; on this rank alone where
            `transport` is none.
        CommunicationError: another rank is gone or too late.
    """
    with told(transport):
        find_schedule(schedule)
        call = make_call(q, k, v, layout, replicated_q=schedule == "tree", **options)
        if check_flag("check_finite", check_finite):
            require_finite(q, k, v, layout, transport.rank)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return _Attention.apply(q, k, v, call, transport, schedule)
    return forward(q, k, v, call, transport, schedule=schedule)


def require_finite(q: Tensor, k: Tensor, v: Tensor, layout: Layout, rank: int) -> None:
    """Raise InvalidInputError for NaN or Inf in a shard; padding rows may hold anything."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[1] != layout.local_length:  # queries that all ranks hold
            if not x.isfinite().all():
                raise InvalidInputError(f"{name} holds NaN or Inf (check_finite=True)")
            continue
        for run in layout.runs(rank):
            if not x[:, run.offset : run.offset + run.length].isfinite().all():
                raise InvalidInputError(
                    f"{name} holds NaN or Inf in tokens {run.start} to {run.last} of the sequence (check_finite=True)"
                )


def gather_sequence(x: Tensor, layout: Layout, transport: Transport, *, dim: int = 1) -> Tensor:
    """The whole tensor on every rank from the shards; not differentiable.

    Raises:
        InvalidInputError, UnsupportedError: on every rank, as of `distributed_attention`.
    """
    with told(transport):
        if not isinstance(layout, Layout) or layout.ranks != transport.size:
            raise InvalidInputError(f"layout must be make_layout's, for {transport.size} ranks, got {shown(layout)}")
        if (length := sequence_length("x", x, dim)) != layout.local_length or x.is_meta:
            raise InvalidInputError(
                f"x has {length} rows on {x.device}, but a shard of this layout has {layout.local_length} ({layout})"
            )
    transport.agree(f"gather {x.dtype} {tuple(x.shape)} on {x.device.type} of {layout}")
    rows: Sequence[Tensor] = transport.all_gather(x.detach()).wait().unbind(0)
    return layout.unshard(rows, dim=dim)
