"""Layouts: which tokens each rank of a sharded sequence holds, and everything that has to follow that order.

    contiguous   rank r holds chunk r of N                        half of the causal work of the last rank is idle time
    zigzag       rank r holds chunks r and 2N-1-r of 2N           the same causal work for every rank
    striped      rank r holds tokens r, r+N, r+2N, ...            the same work up to one token a row
    documents    each document zigzag on its own                  the same work for every rank in every document

Any sequence length goes with any number of ranks: the last chunks are shorter, or empty, and every rank's shard is
padded to one length, `local_length`. Padding belongs to no `Run`, so attention never reads it, and `unshard` drops it.
The order of rows within a shard is ascending in global position (within each document for `documents`).

    layout = make_layout("zigzag", seqlen=1000, ranks=4)
    local = layout.shard(tokens, rank, dim=1)              # and position ids, labels:
    layout.positions(rank), layout.shift_labels(labels, rank)
    tokens = layout.unshard([shard of rank 0, shard of rank 1, ...], dim=1)

Zigzag is from the ring-flash-attention project and Llama 3 (arXiv 2407.21783, section 3.3.2), striped from arXiv
2311.09431.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.flash_attention3.problem import check_strided
from gpu_accel.ring_attention.sizes import shard_rows

LAYOUTS = ("contiguous", "zigzag", "striped", "documents")
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
IGNORE_INDEX = -100  # what torch's cross entropy leaves out
F = TypeVar("F", bound=Callable)


def _keep(count: int) -> Callable[[F], F]:
    """Keeps the results of a function for later calls: they are made on the CPU unless it says otherwise, and not as
    tensors of inference mode. In a compiler, or in a mode whose tensors are fake, each call makes its own."""

    def decorate(function: F) -> F:
        def make(*given):
            with torch.inference_mode(False), torch.device("cpu"):
                return function(*given)

        kept = functools.lru_cache(count)(make)

        @functools.wraps(function)
        def call(*given):
            its_own = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
            return (function if its_own else kept)(*given)

        return call  # type: ignore[return-value]

    return decorate


@dataclass(frozen=True)
class Run:
    """Rows `offset ... offset + length - 1` of a shard: tokens `start, start + stride, ...` of the whole sequence."""

    start: int
    length: int
    offset: int
    stride: int = 1
    document: int = 0

    @property
    def last(self) -> int:
        """The global position of its last token."""
        return self.start + (self.length - 1) * self.stride

    def moved(self, rows: int) -> Run:
        """The same tokens, `rows` further down in memory."""
        return Run(self.start, self.length, self.offset + rows, self.stride, self.document)


@dataclass(frozen=True)
class Layout:
    """One way to cut a sequence of `seqlen` tokens into `ranks` shards; make one with :func:`make_layout`.

    `documents` are the lengths of the documents packed into the sequence, in order; their sum is `seqlen`. Attention
    does not cross from one into another.
    """

    name: str
    seqlen: int
    ranks: int
    documents: tuple[int, ...]

    def __str__(self) -> str:
        packed = f", {len(self.documents)} documents" if len(self.documents) > 1 else ""
        return f"{self.name}, {self.seqlen} tokens over {self.ranks} ranks{packed}"

    @functools.cached_property
    def local_length(self) -> int:
        """Rows of every shard, padding included."""
        return shard_rows(self.name, self.documents, self.ranks)

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The tokens of a rank, cut where a document ends; in the order of the shard's rows."""
        return _runs(self, _checked_rank(rank, self.ranks))

    def valid(self, rank: int) -> int:
        """How many rows of the shard are tokens, the others being padding."""
        return sum(run.length for run in self.runs(rank))

    # -- the index between whole and shard

    def positions(self, rank: int, *, within_document: bool = False, padding: int = -1) -> Tensor:
        """Position of each row of the shard in the whole sequence, int64 (local_length,); `padding` for padding rows.

        With `within_document` it counts from the start of its document: what a rotary embedding wants.
        """
        check_padding(padding, torch.int64)
        index = torch.full((self.local_length,), padding, dtype=torch.int64)
        starts = self._document_starts()
        for run in self.runs(rank):
            base = run.start - (starts[run.document] if within_document else 0)
            index[run.offset : run.offset + run.length] = base + run.stride * torch.arange(run.length)
        return index

    def shard(self, x: Tensor, rank: int, *, dim: int = 1, padding: float = 0) -> Tensor:
        """The rows of a rank from the whole tensor, `seqlen` long in `dim`; padding rows hold `padding`.

        Differentiable. The shard is contiguous.
        """
        if sequence_length("x", x, dim) != self.seqlen:
            raise InvalidInputError(
                f"dimension {dim} has {x.shape[dim]} tokens, but the layout is for {self.seqlen} ({self})"
            )
        check_padding(padding, x.dtype)
        shape = list(x.shape)
        shape[dim] = self.local_length
        parts, done = [], 0

        def pad(rows: int) -> None:
            if rows:
                shape[dim] = rows
                parts.append(x.new_full(shape, padding))

        for run in self.runs(rank):
            pad(run.offset - done)
            part = x.narrow(dim, run.start, run.last - run.start + 1)
            if run.stride > 1:
                index = torch.arange(0, run.last - run.start + 1, run.stride, device=x.device)
                part = part.index_select(dim, index)
            parts.append(part)
            done = run.offset + run.length
        pad(self.local_length - done)
        shape[dim] = 0
        return torch.cat(parts, dim) if parts else x.new_empty(shape)

    def unshard(self, shards: Sequence[Tensor], *, dim: int = 1) -> Tensor:
        """The whole tensor from the shards of all ranks in order; padding is dropped. Differentiable."""
        got = [sequence_length(f"shard {rank}", x, dim) for rank, x in enumerate(shards)]
        if len(got) != self.ranks or any(n != self.local_length for n in got):
            raise InvalidInputError(
                f"unshard needs {self.ranks} shards of {self.local_length} rows in dimension {dim}, got {got} ({self})"
            )
        return torch.cat(list(shards), dim).index_select(dim, self.inverse.to(shards[0].device))

    @property
    def inverse(self) -> Tensor:
        """For each token of the sequence, its row in the shards laid one behind the other: int64 (seqlen,)."""
        return _inverse(self)

    # -- what a language model needs beside its tokens

    def shift_labels(self, labels: Tensor, rank: int, *, dim: int = 1, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """The rank's shard of the labels moved by one: the row of token t holds label t + 1.

        The shift is made on the whole sequence, since the next token may live on another rank. The last token of each
        document, and padding, get `ignore_index`. A loss must then not shift again.
        """
        shifted = self.shifted(labels, dim=dim, ignore_index=ignore_index)
        return self.shard(shifted, rank, dim=dim, padding=ignore_index)

    def shifted(self, labels: Tensor, *, dim: int = 1, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """The whole labels moved by one, as `shift_labels` cuts them; does not wait for the GPU."""
        if sequence_length("labels", labels, dim) != self.seqlen:
            raise InvalidInputError(
                f"labels have {labels.shape[dim]} tokens in dimension {dim}, expected {self.seqlen}"
            )
        if labels.dtype not in (torch.int64, torch.int32):
            raise InvalidInputError(f"labels must be int64 or int32, which hold ignore_index, got {labels.dtype}")
        check_padding(ignore_index, labels.dtype, "ignore_index")
        shifted = torch.full_like(labels, ignore_index)
        if self.seqlen > 1:
            shifted.narrow(dim, 0, self.seqlen - 1).copy_(labels.narrow(dim, 1, self.seqlen - 1))
        if any(self.documents):
            shifted.index_fill_(dim, _ends_on(self, labels.device), ignore_index)
        return shifted

    def loss_scale(self, local_labels: int | Tensor, all_labels: int | Tensor, *, gradients: str = "mean") -> float:
        """What to multiply a rank's mean loss with, so that the gradients are those of the mean over all tokens.

        Args:
            local_labels, all_labels: how many labels count (are not ignored) on this rank and on all together.
            gradients: "sum" when gradients of the ranks are added up, "mean" when they are averaged over the ranks,
                as DistributedDataParallel and FSDP do.

        A rank without labels gets 0: replace its NaN mean by 0 first.
        """
        if gradients not in ("mean", "sum"):
            raise InvalidInputError(f"gradients must be 'mean' or 'sum', got {gradients!r}")
        local, total = _count("local_labels", local_labels), _count("all_labels", all_labels)
        if not 0 <= local <= total:
            raise InvalidInputError(f"{local} labels on this rank of {total} in all")
        share = local / total if total else 0.0
        return share * self.ranks if gradients == "mean" else share

    def _document_starts(self) -> list[int]:
        starts = [0]
        for length in self.documents[:-1]:
            starts.append(starts[-1] + length)
        return starts


def make_layout(name: str, *, seqlen: int, ranks: int, documents: Sequence[int] | None = None) -> Layout:
    """A checked :class:`Layout`.

    Args:
        name: "contiguous", "zigzag", "striped" or "documents".
        seqlen: tokens of the whole sequence, 0 or more.
        ranks: number of shards.
        documents: lengths of the packed documents; they add up to `seqlen`. None: one document.

    Raises:
        InvalidInputError: unknown name, a length that is no whole number, lengths that do not add up.
    """
    if not isinstance(name, str) or name not in LAYOUTS:
        raise InvalidInputError(f"layout must be one of {', '.join(LAYOUTS)}, got {shown(name)}")
    seqlen, ranks = _whole("seqlen", seqlen, 0), _whole("ranks", ranks, 1)
    if documents is not None and not isinstance(documents, Sequence):
        raise InvalidInputError(f"documents must be a list of lengths, got {shown(documents)}")
    lengths = (seqlen,) if documents is None else tuple(_whole("a document's length", n, 0) for n in documents)
    if sum(lengths) != seqlen:
        raise InvalidInputError(f"documents add up to {sum(lengths)} tokens, but seqlen is {seqlen}")
    return Layout(name, seqlen, ranks, lengths)


def block_runs(
    layout: Layout, members: Sequence[int], device: torch.device | str = "cpu"
) -> tuple[tuple[Run, ...], Tensor | None]:
    """The shards of several ranks as one block of rows: its runs, and how to order the rows.

    The shards lie one behind the other; `order` (int64, rows of all members, on `device`) puts them in global order
    with padding last, so that neighbouring chunks become one run. None where the order is right as it is. Striped
    shards stay where they are: their tokens interleave.
    """
    runs, order = _block(layout, tuple(members))
    return runs, order if order is None else _order_on(layout, tuple(members), torch.device(device))


@_keep(64)
def _inverse(layout: Layout) -> Tensor:
    index = torch.empty(layout.seqlen, dtype=torch.int64)
    for rank in range(layout.ranks):
        for run in layout.runs(rank):
            rows = rank * layout.local_length + run.offset + torch.arange(run.length)
            index[run.start : run.last + 1 : run.stride] = rows
    return index


@_keep(64)
def _ends_on(layout: Layout, device: torch.device) -> Tensor:
    """The last token of each document; kept as `_order_on` is."""
    starts = zip(layout._document_starts(), layout.documents, strict=True)
    return torch.tensor([start + n - 1 for start, n in starts if n], device=device)


@_keep(64)
def positions_on(layout: Layout, rank: int, device: torch.device) -> Tensor:
    """`layout.positions` within documents, 0 for padding, kept there as `_order_on` is: not to be written to."""
    return layout.positions(rank, within_document=True, padding=0).to(device)


@_keep(64)
def _order_on(layout: Layout, members: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept there: a copy from the host would make every call wait for the GPU, and cannot be part of a CUDA graph."""
    order = _block(layout, members)[1]
    assert order is not None
    return order.to(device)


@_keep(1024)
def _block(layout: Layout, members: tuple[int, ...]) -> tuple[tuple[Run, ...], Tensor | None]:
    length = layout.local_length
    stacked = [run.moved(i * length) for i, rank in enumerate(members) for run in layout.runs(rank)]
    if len(members) == 1 or layout.name == "striped" and layout.ranks > 1 and len(members) < layout.ranks:
        return tuple(stacked), None
    rows = torch.full((len(members) * length,), -1, dtype=torch.int64)
    for run in stacked:
        rows[run.offset : run.offset + run.length] = run.start + run.stride * torch.arange(run.length)
    far = torch.where(rows < 0, torch.iinfo(torch.int64).max, rows)
    order = torch.argsort(far, stable=True)
    if layout.name == "striped":  # all members: the whole sequence in order
        starts, runs = layout._document_starts(), []
        for document, (start, n) in enumerate(zip(starts, layout.documents, strict=True)):
            if n:
                runs.append(Run(start, n, start, 1, document))
        return tuple(runs), order
    merged: list[Run] = []
    done = 0
    for run in sorted(stacked, key=lambda r: r.start):
        before = merged[-1] if merged else None
        if before and before.document == run.document and before.last + 1 == run.start:
            merged[-1] = Run(before.start, before.length + run.length, before.offset, 1, run.document)
        else:
            merged.append(Run(run.start, run.length, done, 1, run.document))
        done += run.length
    same = bool((order == torch.arange(len(order))).all())
    return tuple(merged), None if same else order


@functools.lru_cache(4096)
def _runs(layout: Layout, rank: int) -> tuple[Run, ...]:
    n, seqlen = layout.ranks, layout.seqlen
    spans: list[tuple[int, int, int, int]] = []  # (start, end, offset, stride) before documents cut them
    if layout.name == "contiguous":
        c = _ceil(seqlen, n)
        spans = [(rank * c, min(seqlen, (rank + 1) * c), 0, 1)]
    elif layout.name == "striped":
        spans = [(rank, seqlen, 0, n)]
    elif layout.name == "zigzag":
        c = _ceil(seqlen, 2 * n)
        chunks = (rank, 2 * n - 1 - rank)
        spans = [(i * c, min(seqlen, (i + 1) * c), place * c, 1) for place, i in enumerate(chunks)]
    else:
        offset = 0
        for start, length in zip(layout._document_starts(), layout.documents, strict=True):
            c = _ceil(length, 2 * n)
            for place, i in enumerate((rank, 2 * n - 1 - rank)):
                spans.append((start + i * c, start + min(length, (i + 1) * c), offset + place * c, 1))
            offset += 2 * c
    runs = []
    firsts = layout._document_starts()
    stops = [a + n for a, n in zip(firsts, layout.documents, strict=True)]
    for start, end, offset, stride in spans:
        document = bisect.bisect_right(stops, start)  # the first that goes beyond start
        while document < len(stops) and firsts[document] < end:
            skip = max(0, _ceil(firsts[document] - start, stride))
            begin, until = start + skip * stride, min(end, stops[document])
            if begin < until:
                runs.append(Run(begin, _ceil(until - begin, stride), offset + skip, stride, document))
            document += 1
    return tuple(_joined(runs))


def _joined(runs: list[Run]) -> list[Run]:
    """Neighbours in memory and in the sequence become one run (zigzag: the two chunks of the last rank)."""
    out: list[Run] = []
    for run in runs:
        before = out[-1] if out else None
        if (
            before
            and (before.document, before.stride) == (run.document, run.stride)
            and before.last + run.stride == run.start
            and before.offset + before.length == run.offset
        ):
            out[-1] = Run(before.start, before.length + run.length, before.offset, run.stride, run.document)
        else:
            out.append(run)
    return out


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def sequence_length(name: str, x: object, dim: object) -> int:
    """How long x is in dimension `dim`, if it is a tensor that has one."""
    if not isinstance(x, Tensor):
        raise InvalidInputError(f"{name} must be a tensor, got {type(x).__name__}")
    check_strided(name, x)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise InvalidInputError(
            f"dim must be a dimension of {name}, from {-x.dim()} to {x.dim() - 1} for shape {tuple(x.shape)}; "
            f"got {shown(dim)}"
        )
    return x.shape[dim]


def check_padding(padding: object, dtype: torch.dtype, name: str = "padding") -> None:
    """A number that a tensor of the dtype can hold, an integer as it is."""
    if not isinstance(padding, int | float):
        raise InvalidInputError(f"{name} must be a number, got {shown(padding)} of type {type(padding).__name__}")
    if dtype.is_floating_point or dtype.is_complex:
        fits = padding != padding or abs(padding) in (math.inf, min(abs(padding), torch.finfo(dtype).max))
    elif dtype == torch.bool:
        fits = padding in (0, 1)
    else:
        limits = torch.iinfo(dtype)
        fits = limits.min <= padding <= limits.max and padding == int(padding)
    if not fits:
        raise InvalidInputError(f"{name} {shown(padding, 40)} is no number that {dtype} holds")


def _count(name: str, x: object) -> int:
    """A number of labels, or a tensor with one."""
    if isinstance(x, Tensor) and x.dtype in _WHOLE and not (x.is_nested or x.is_meta) and x.numel() == 1:
        return int(x)
    if type(x) is not int:
        got = f"a tensor {x.dtype}" if isinstance(x, Tensor) else shown(x)
        raise InvalidInputError(f"{name} must be a whole number, or a tensor that holds one, got {got}")
    return x


def _whole(name: str, x: object, least: int) -> int:
    if isinstance(x, bool) or not isinstance(x, int) or x < least:
        raise InvalidInputError(f"{name} must be a whole number from {least} up, got {shown(x)}")
    return x


def _checked_rank(rank: int, ranks: int) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
        raise InvalidInputError(f"rank must be from 0 to {ranks - 1}, got {shown(rank)}")
    return rank
