"""The public names: a module in (batch, heads, seqlen, head_dim) order, and ring attention taken apart into functions.

Where a function takes `devices`, that is how the ranks exist:

    an int                     so many ranks are simulated in this process, on whole tensors (see simulate.py)
    a transport                this process is one of its ranks, and the tensors are its shards
    None                       the default process group of torch.distributed; the tensors are this rank's shards
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gpu_accel.errors import GpuAccelError, HardwareError, InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.backends import check_name
from gpu_accel.flash_attention3.problem import (
    FLOAT_DTYPES,
    check_flag,
    check_number,
    check_strided,
    check_tensors,
    check_written,
    share_memory,
)
from gpu_accel.ring_attention import attention
from gpu_accel.ring_attention.layouts import LAYOUTS, Layout, check_padding, make_layout, sequence_length
from gpu_accel.ring_attention.masks import pieces
from gpu_accel.ring_attention.schedules import schedule as find_schedule
from gpu_accel.ring_attention.simulate import simulate, simulate_attention
from gpu_accel.ring_attention.step import Partial, attend, partial_dtype
from gpu_accel.ring_attention.symmetric import choose_transport
from gpu_accel.ring_attention.transport import Pending, Transport

Devices = int | Transport | None
R = TypeVar("R")


class RingAttention(nn.Module):
    """Exact attention over a sequence that is cut into shards, one a GPU. No parameters.

    Args:
        num_gpus: number of ranks; must be that of the process group. None: whatever it is.
        layout: "zigzag", "striped", "contiguous" or "documents"; shards must be cut by it (:func:`shard_sequence`).
        schedule: see `gpu_accel.ring_attention.schedules`; :func:`gpu_accel.ring_attention.plan.plan` helps to choose.
        transport: how shards travel; default: what `choose_transport` finds for the default process group.
        simulate: run all `num_gpus` ranks in this process, on whole tensors. Exact, and slow.
        options: ulysses, inner, mesh, wire, overlap, backend, softmax_scale, deterministic, check_finite, as in
            `distributed_attention`.

    Raises:
        InvalidInputError, UnsupportedError: an option that is not there, that the schedule does not read, or that
        does not fit num_gpus: here, before any rank waits for another.

    Example:
        attention = RingAttention(num_gpus=8)                 # under torchrun --nproc-per-node 8
        o = attention(q, k, v, causal=True, seq_len=1_000_000)  # q: this rank's (batch, heads, 125_000, head_dim)
    """

    def __init__(
        self,
        num_gpus: int | None = None,
        layout: str = "zigzag",
        schedule: str = "kv_ring",
        *,
        transport: Transport | None = None,
        simulate: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise InvalidInputError(f"layout must be one of {', '.join(LAYOUTS)}, got {shown(layout)}")
        find_schedule(schedule)
        if num_gpus is not None and (isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or num_gpus < 1):
            raise InvalidInputError(f"num_gpus must be a whole number from 1 up, got {shown(num_gpus)}")
        if transport is not None and not isinstance(transport, Transport):
            raise InvalidInputError(f"transport must be a Transport or None, got {shown(transport)}")
        simulate = check_flag("simulate", simulate)
        if simulate and (num_gpus is None or transport is not None):
            raise InvalidInputError("simulate=True needs num_gpus, and no transport")
        _check_options(schedule, num_gpus if transport is None else transport.size, options)
        self.num_gpus, self.layout, self.schedule = num_gpus, layout, schedule
        self.simulate, self.options = simulate, options
        self._transport = transport

    def transport(self) -> Transport:
        """The transport, made when first needed.

        Raises:
            HardwareError: no process group, or one of another size than num_gpus.
        """
        found = self._found()
        self._check_size(found)
        return found

    def _found(self) -> Transport:
        if self._transport is None:
            self._transport = choose_transport()
        return self._transport

    def _check_size(self, transport: Transport) -> None:
        if self.num_gpus not in (None, transport.size):
            raise HardwareError(
                f"num_gpus is {self.num_gpus}, but there are {transport.size} ranks: start as many with "
                f"torchrun --nproc-per-node {self.num_gpus}, or use simulate=True"
            )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        *,
        seq_len: int | None = None,
        documents: Sequence[int] | None = None,
        window_size: attention.Window = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        """o like q, differentiable.

        Args:
            q, k, v: this rank's shards, (batch, heads, local_length, head_dim); whole tensors with simulate=True.
            seq_len: tokens of the whole sequence, padding not counted; default: ranks * local_length.
            documents: lengths of the documents packed into it, which do not see one another.
        """
        options = dict(self.options, causal=causal, window_size=window_size, softcap=softcap)
        if self.simulate:
            assert self.num_gpus is not None
            q, k, v = (_swap(x) for x in (q, k, v))
            _check_whole(k, seq_len)
            return _swap(_simulated(q, k, v, self.num_gpus, self.layout, self.schedule, documents, options))
        transport = self._found()
        with attention.told(transport):
            self._check_size(transport)
            q, k, v = (_swap(x) for x in (q, k, v))
            layout = _layout_of(k, transport, self.layout, seq_len, documents)
        o, _ = attention.distributed_attention(
            q, k, v, layout=layout, transport=transport, schedule=self.schedule, **options
        )
        return _swap(o)

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        *,
        seq_len: int | None = None,
        documents: Sequence[int] | None = None,
        window_size: attention.Window = (-1, -1),
        softcap: float = 0.0,
        rank: int = 0,
    ) -> str:
        """What a call would do, and why not otherwise, in words; nothing is sent. Of one rank: with simulate=True that
        of `rank`, else this one."""
        from gpu_accel.ring_attention.explanation import explain

        options = dict(self.options, causal=causal, window_size=window_size, softcap=softcap)
        options.pop("check_finite", None)
        q, k, v = (_swap(x) for x in (q, k, v))
        if self.simulate:
            assert self.num_gpus is not None
            _check_whole(k, seq_len)
            layout = make_layout(self.layout, seqlen=k.shape[1], ranks=self.num_gpus, documents=documents)
            q = q if self.schedule == "tree" else layout.shard(q, rank)
            k, v = (layout.shard(x, rank) for x in (k, v))
        else:
            transport = self.transport()
            layout, rank = _layout_of(k, transport, self.layout, seq_len, documents), transport.rank
        return explain(q, k, v, layout=layout, rank=rank, schedule=self.schedule, **options)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: a transport belongs to its process, so there the module finds that of the default group."""
        return dict(self.__dict__, _transport=None)

    def __copy__(self) -> RingAttention:
        again = type(self).__new__(type(self))
        again.__dict__.update(self.__dict__)
        return again

    def __deepcopy__(self, memo: dict[int, Any]) -> RingAttention:
        """Within the process the copy keeps the transport."""
        again = copy.copy(self)
        again.__dict__.update(copy.deepcopy(self.__getstate__(), memo), _transport=self._transport)
        return again

    def extra_repr(self) -> str:
        return f"num_gpus={self.num_gpus}, layout={self.layout!r}, schedule={self.schedule!r}"


_FIXED = (
    "ulysses", "inner", "mesh", "wire", "overlap", "backend", "softmax_scale", "deterministic", "check_finite",
)  # fmt: skip


def _check_options(schedule: str, ranks: int | None, options: dict[str, Any]) -> None:
    """What a module is told when it is made; the rest (causal, window_size, ...) is told in each call."""
    attention.check_names(options, _FIXED)
    attention.check_split(ranks, **{name: options.get(name) for name in ("ulysses", "inner", "mesh", "wire")})
    attention.check_read(schedule, options)
    for name in ("overlap", "deterministic", "check_finite"):
        check_flag(name, options.get(name, False))
    check_name(options.get("backend", "auto"))
    if options.get("softmax_scale") is not None:
        check_number("softmax_scale", options["softmax_scale"])


class _Simulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: dict) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.settings = settings
        return simulate_attention(q, k, v, **settings)[0]

    @staticmethod
    def backward(ctx: Any, do: Tensor):
        q, k, v = ctx.saved_tensors
        with torch.no_grad():
            _, _, *grads = simulate_attention(q, k, v, do=do.resolve_neg().contiguous(), **ctx.settings)
        return (*attention.first_only(grads, do, q, k, v), None)


def _simulated(q, k, v, ranks, layout, schedule, documents, options) -> Tensor:
    settings = dict(options, ranks=ranks, layout=layout, schedule=schedule, documents=documents)
    return _Simulated.apply(q, k, v, settings)


def ring_attention_forward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    devices: Devices = None,
    overlap: bool = True,
    *,
    causal: bool = False,
    layout: str = "zigzag",
    schedule: str = "kv_ring",
    seq_len: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(O, lse) in (batch, heads, seqlen, head_dim) order, without autograd. See the head of this file for `devices`."""
    options = dict(options, causal=causal, overlap=overlap)
    if isinstance(devices, int):
        q, k, v = (_swap(x) for x in (Q, K, V))
        _check_whole(k, seq_len)
        o, lse = simulate_attention(q, k, v, ranks=devices, layout=layout, schedule=schedule, **options)
        return _swap(o), lse
    transport = _transport(devices)
    with attention.told(transport):
        q, k, v = (_swap(x) for x in (Q, K, V))
        cut = _layout_of(k, transport, layout, seq_len)
    with torch.no_grad():
        o, lse = attention.distributed_attention(q, k, v, layout=cut, transport=transport, schedule=schedule, **options)
    return _swap(o), lse


def ring_attention_backward(
    dO: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    devices: Devices = None,
    *,
    O: Tensor | None = None,  # noqa: E741
    lse: Tensor | None = None,
    causal: bool = False,
    layout: str = "zigzag",
    schedule: str = "kv_ring",
    seq_len: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) in (batch, heads, seqlen, head_dim) order; O and lse are recomputed by a forward when missing.

    With an int for `devices` both are recomputed in any case, and giving them is an error.
    """
    if isinstance(devices, int):
        do, q, k, v = (_swap(x) for x in (dO, Q, K, V))
        _check_whole(k, seq_len)
        if O is not None or lse is not None:
            raise InvalidInputError("simulated ranks recompute O and lse: leave them out")
        found = simulate_attention(
            q, k, v, do=do, ranks=devices, layout=layout, schedule=schedule, causal=causal, **options
        )
        return _swap(found[2]), _swap(found[3]), _swap(found[4])
    transport = _transport(devices)
    with attention.told(transport):
        do, q, k, v = (_swap(x) for x in (dO, Q, K, V))
        cut = _layout_of(k, transport, layout, seq_len)
        call = attention.make_call(q, k, v, cut, causal=causal, **options)
        o = None if O is None else _swap(O)
    if o is None or lse is None:
        o, lse = attention.forward(q, k, v, call, transport, schedule=schedule)
    dq, dk, dv = attention.backward(do, q, k, v, o, lse, call, transport, schedule=schedule)
    return _swap(dq), _swap(dk), _swap(dv)


def shard_sequence(
    tokens: Tensor,
    num_devices: int,
    block_size: int | None = None,
    *,
    layout: str = "contiguous",
    dim: int = 1,
    padding: float = 0,
) -> list[Tensor]:
    """The shards of all ranks. `block_size` is the length of each, if it is to be checked or (contiguous) longer."""
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise InvalidInputError(f"num_devices must be a whole number from 1 up, got {shown(num_devices)}")
    return [
        block_shard(tokens, rank, num_devices, block_size, layout=layout, dim=dim, padding=padding)
        for rank in range(num_devices)
    ]


def block_shard(
    x: Tensor,
    rank: int,
    num_devices: int,
    block_size: int | None = None,
    *,
    layout: str = "contiguous",
    dim: int = 1,
    padding: float = 0,
) -> Tensor:
    """One rank's shard of x, padded to the common length."""
    length = sequence_length("x", x, dim)
    check_padding(padding, x.dtype)
    cut = make_layout(layout, seqlen=length, ranks=num_devices)
    if block_size in (None, cut.local_length):
        return cut.shard(x, rank, dim=dim, padding=padding)
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise InvalidInputError(f"block_size must be a whole number or None, got {shown(block_size)}")
    if layout != "contiguous" or block_size < cut.local_length:
        raise InvalidInputError(
            f"block_size is {shown(block_size)}, but {num_devices} shards of {x.shape[dim]} tokens have "
            f"{cut.local_length} ({layout}); only contiguous shards can be longer"
        )
    longer = make_layout(layout, seqlen=block_size * num_devices, ranks=num_devices)
    shape = list(x.shape)
    shape[dim] = longer.seqlen - x.shape[dim]
    return longer.shard(torch.cat([x, x.new_full(shape, padding)], dim), rank, dim=dim)


def ring_communicate_kv(
    kv_block: Tensor, src_device: int, dst_device: int, *, transport: Transport | None = None
) -> Tensor:
    """Send a block to one rank and return the one that comes from another. All ranks of the circle call it."""
    transport = _transport(transport, "transport")
    wrong = [r for r in (src_device, dst_device) if type(r) is not int or not 0 <= r < transport.size]
    error = InvalidInputError(f"ranks are from 0 to {transport.size - 1}, got {shown(wrong[0], 40)}") if wrong else None
    message, into = _message(kv_block, transport, "ring_communicate_kv", error)
    transport.exchange(message, into, to=dst_device, source=src_device).wait()
    return into.clone()


def ring_send_recv(x: Tensor, *, transport: Transport | None = None) -> Pending:
    """Start one hop of the ring: x goes to the next rank; `wait()` returns what came from the previous one."""
    transport = _transport(transport, "transport")
    message, into = _message(x, transport, "ring_send_recv")
    ahead, behind = ((transport.rank + s) % transport.size for s in (1, -1))
    pending = transport.exchange(message, into, to=ahead, source=behind)
    return Pending(lambda: (pending.wait(), into.clone())[1])


def _wrong_tensor(name: str, x: object, *, floating: bool = False) -> GpuAccelError | None:
    """What the other ranks have to be told of x, or None."""
    if not isinstance(x, Tensor):
        return InvalidInputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if floating and x.dtype not in FLOAT_DTYPES:
        return InvalidInputError(f"{name} must be of a floating dtype, float16 to float64, got {x.dtype}")
    try:
        check_strided(name, x)
    except GpuAccelError as error:
        return error
    return InvalidInputError(f"{name} is on the meta device: it holds nothing") if x.is_meta else None


def _message(x: Tensor, transport: Transport, what: str, error: Exception | None = None) -> list[Tensor]:
    """x in a buffer of the transport, and one to receive into, after all ranks have said that they send alike."""
    error = error or _wrong_tensor("what is sent", x)
    transport.agree(what if error else f"{what} {x.dtype} {tuple(x.shape)} on {x.device.type}", error)
    message, into = transport.buffers(2, x.shape, x)
    message.copy_(x)
    return [message, into]


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rank: int = 0,
    source: int = 0,
    layout: Layout | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """One step: the queries of `rank` against the keys of `source`, both (batch, rows, heads, head_dim).

    Returns:
        o (batch, rows, heads, head_dim_v) and lse (batch, heads, rows), both float32, to be merged with other steps.
        Without a layout q and k are whole sequences of one length. Without autograd.
    """
    check_tensors(q, k, v, varlen=False)
    cut = layout or make_layout("contiguous", seqlen=k.shape[1], ranks=1)
    call = attention.make_call(q, k, v, cut, **options)
    partial = Partial.empty(q, v.shape[-1])
    with torch.no_grad():
        found = pieces(cut.runs(rank), cut.runs(source), call.mask)
        attend(partial, q, k, v, found, call)
    return partial.o, partial.lse


def accumulate_attention_outputs(
    local_outputs: Sequence[tuple[Tensor, Tensor]], final_output: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Merge results (o, lse) of the same queries over different keys; into `final_output`, in place, when given.

    Where lse is -inf, that is where no key was seen, o must be 0, as it is here. Without gradients.

    Raises:
        InvalidInputError: results that do not fit, or a `final_output` that shares memory with one of them.
        UnsupportedError: a result that wants gradients.
    """
    if not isinstance(local_outputs, tuple | list):
        raise InvalidInputError(f"local_outputs must be a list of pairs (o, lse), got {type(local_outputs).__name__}")
    for found in local_outputs:
        _check_result("each of local_outputs", found)
        if torch.is_grad_enabled() and any(x.requires_grad for x in found):
            raise UnsupportedError("results that are merged get no gradients: detach them, or use RingAttention")
    if final_output is None:
        if not local_outputs:
            raise InvalidInputError("nothing to accumulate: give local_outputs or final_output")
        o, lse = local_outputs[0]
        dtype = partial_dtype(o)
        final_output = (torch.zeros_like(o, dtype=dtype), torch.full_like(lse, -math.inf, dtype=dtype))
    else:
        _check_result("final_output", final_output)
        for name, x in zip(("o of final_output", "lse of final_output"), final_output, strict=True):
            check_written(name, x)
            if x.is_leaf and x.requires_grad and torch.is_grad_enabled():
                raise InvalidInputError(f"{name} is written in place, but gradients are wanted of it: pass a clone")
            if any(share_memory(x, y) for found in local_outputs for y in found):
                raise InvalidInputError(f"{name} is written, and shares memory with local_outputs: pass a clone")
    total = Partial(*final_output)
    for o, lse in local_outputs:
        if o.shape != total.o.shape or lse.shape != total.lse.shape or lse.shape != o.transpose(1, 2).shape[:-1]:
            raise InvalidInputError(
                f"o (batch, rows, heads, head_dim) and lse (batch, heads, rows) of all results must agree, got "
                f"{tuple(o.shape)}, {tuple(lse.shape)} and {tuple(total.o.shape)}, {tuple(total.lse.shape)}"
            )
        if {o.device, lse.device, total.lse.device} != {total.o.device}:
            raise InvalidInputError(
                f"all results must be on one device, got {o.device}, {lse.device} and {total.o.device}"
            )
        total.add(o, lse)
    return total.o, total.lse


def distributed_attention_exact(
    Q_local: Tensor,
    KV_blocks: Sequence[tuple[Tensor, Tensor]],
    num_devices: int,
    *,
    rank: int = 0,
    layout: str = "zigzag",
    seq_len: int | None = None,
    **options: Any,
) -> Tensor:
    """What one rank of the ring computes, without the ring: its queries against every rank's (k, v), in ring order.

    Tensors are (batch, heads, local_length, head_dim); `KV_blocks[r]` are the shards of rank r. Without autograd.
    """
    if not isinstance(KV_blocks, tuple | list) or not all(
        isinstance(x, tuple | list) and len(x) == 2 for x in KV_blocks
    ):
        raise InvalidInputError(f"KV_blocks must be a list of pairs (k, v), got {type(KV_blocks).__name__}")
    if len(KV_blocks) != num_devices:
        raise InvalidInputError(f"{num_devices} devices have as many blocks of keys, got {len(KV_blocks)}")
    q = _swap(Q_local)
    length = num_devices * q.shape[1] if seq_len is None else seq_len
    cut = make_layout(layout, seqlen=length, ranks=num_devices)
    cut.runs(rank)  # refuses a rank that is not there
    found = []
    for step in range(num_devices):
        source = (rank - step) % num_devices
        k, v = (_swap(x) for x in KV_blocks[source])
        found.append(local_attention(q, k, v, rank=rank, source=source, layout=cut, **options))
    return _swap(accumulate_attention_outputs(found)[0].to(q.dtype))


def global_accumulate(o: Tensor, lse: Tensor, *, transport: Transport | None = None) -> tuple[Tensor, Tensor]:
    """Merge the partial results of all ranks for queries that all of them hold; the same bits on every rank. Without
    autograd."""
    transport = _transport(transport, "transport")
    error = _wrong_tensor("o", o, floating=True) or _wrong_tensor("lse", lse, floating=True)
    what = "" if error else f" {o.dtype} {tuple(o.shape)}, {lse.dtype} {tuple(lse.shape)} on {o.device.type}"
    transport.agree(f"global_accumulate{what}", error)
    parts = [transport.all_gather(x).wait() for x in (o, lse)]
    return accumulate_attention_outputs(list(zip(*parts, strict=True)))


def overlap_comm_compute(communicate: Callable[[], Pending], compute: Callable[[], R]) -> tuple[R, Any]:
    """Start a communication, compute while it is under way, then wait: (what compute returned, what arrived)."""
    for name, x in (("communicate", communicate), ("compute", compute)):
        if not callable(x):
            raise InvalidInputError(f"{name} must be a function, got {shown(x)}")
    pending = communicate()
    if not callable(getattr(pending, "wait", None)):
        raise InvalidInputError(f"communicate must return what can be waited for, got {shown(pending)}")
    result = compute()
    return result, pending.wait()


def _transport(given: Any, name: str = "devices") -> Transport:
    if given is not None and not isinstance(given, Transport):
        what = "a number of ranks, a transport" if name == "devices" else "a Transport"
        raise InvalidInputError(f"{name} must be {what} or None, got {shown(given)}")
    return choose_transport() if given is None else given


def _check_result(name: str, found: object) -> None:
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise InvalidInputError(f"{name} must be a pair (o, lse), got {shown(found)}")
    for part, x in zip(("o", "lse"), found, strict=True):
        if error := _wrong_tensor(f"{part} of {name}", x, floating=True):
            raise error
    if (found[0].dim(), found[1].dim()) != (4, 3):
        raise InvalidInputError(
            f"o of {name} must be (batch, rows, heads, head_dim) and lse (batch, heads, rows), got "
            f"{tuple(found[0].shape)} and {tuple(found[1].shape)}"
        )


def _check_whole(k: Tensor, seq_len: int | None) -> None:
    if seq_len not in (None, k.shape[1]):
        raise InvalidInputError(f"seq_len is {seq_len}, but simulated ranks take the whole {k.shape[1]} tokens")


def _layout_of(
    k: Tensor, transport: Transport, layout: str, seq_len: int | None, documents: Sequence[int] | None = None
) -> Layout:
    length = transport.size * k.shape[1] if seq_len is None else seq_len
    return make_layout(layout, seqlen=length, ranks=transport.size, documents=documents)


def _swap(x: Tensor) -> Tensor:
    if isinstance(x, Tensor):
        check_strided("the tensor", x)
    if not isinstance(x, Tensor) or x.dim() != 4:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInputError(f"expected a tensor (batch, heads, seqlen, head_dim), got {got}")
    return x.transpose(1, 2)


__all__ = [
    "RingAttention",
    "accumulate_attention_outputs",
    "block_shard",
    "distributed_attention_exact",
    "global_accumulate",
    "local_attention",
    "overlap_comm_compute",
    "ring_attention_backward",
    "ring_attention_forward",
    "ring_communicate_kv",
    "ring_send_recv",
    "shard_sequence",
    "simulate",
]
