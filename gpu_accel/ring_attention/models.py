"""Whole models over a sequence in shards: Hugging Face transformers, with everything that follows the layout.

    with context_parallel(model, layout=layout, transport=choose_transport()) as cp:
        logits = model(**cp.inputs(input_ids), use_cache=False).logits     # this rank's rows
        loss = cp.loss(logits, labels)                                     # labels whole and unshifted
        loss.backward()                                                    # then add gradients up over the ranks

Only attention looks beyond a token, so a model runs on its shard as it is, with three changes, made here: attention
goes over the ring; positions are those of the tokens in the whole sequence (in their documents), for the rotary
embedding; labels are shifted before they are cut. Each rank's loss is the sum over its labels divided by the number of
labels on all ranks, so gradients of the ranks *add up* to those of one device. Where they are averaged (FSDP2, DDP),
give `gradients="mean"`. Checkpointed layers are recomputed in the backward, which then belongs into the context too.

The model's attention is set back on leaving, also by an exception. Sliding windows and soft caps of a layer are
honoured; what is not there (attention masks and padding, dropout, caches) is refused on every rank, never left out
silently, and so are labels given to the model, and models whose attention transformers does not replace.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import GpuAccelError, InvalidInputError, UnsupportedError, shown
from gpu_accel.ring_attention.attention import (
    check_names,
    check_read,
    check_split,
    distributed_attention,
    gather_sequence,
    told,
)
from gpu_accel.ring_attention.layouts import IGNORE_INDEX, Layout, positions_on
from gpu_accel.ring_attention.schedules import schedule as find_schedule
from gpu_accel.ring_attention.transport import Transport

NAME = "gpu_accel_ring"
_TOKENS = (torch.int64, torch.int32)
_OPTIONS = ("backend", "ulysses", "inner", "mesh", "wire", "overlap", "deterministic", "check_finite")
_LAYERS = {"attention", "full_attention", "sliding_attention"}
_ACTIVE: ContextVar[ContextParallel | None] = ContextVar("context_parallel", default=None)
_OPEN: list[ContextParallel] = []  # in all threads: autograd has threads of its own, which recompute layers


@dataclass
class ContextParallel:
    """One rank's view of a sequence in shards; made by :func:`context_parallel`."""

    layout: Layout
    transport: Transport
    schedule: str
    gradients: str
    options: dict[str, Any] = field(default_factory=dict)
    _made: deque[Any] = field(default_factory=lambda: deque(maxlen=8), repr=False, compare=False)

    def inputs(self, input_ids: Tensor) -> dict[str, Tensor]:
        """This rank's input_ids and position_ids from the whole input_ids (batch, seqlen). Padding rows are token 0."""
        rank = self.transport.rank
        if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype not in _TOKENS:
            got = f"{input_ids.dtype} {tuple(input_ids.shape)}" if isinstance(input_ids, Tensor) else shown(input_ids)
            raise InvalidInputError(f"input_ids must be int64 or int32 (batch, seqlen), got {got}")
        local = self.layout.shard(input_ids, rank, dim=1)
        positions = positions_on(self.layout, rank, input_ids.device).repeat(input_ids.shape[0], 1)
        self._made.append(weakref.ref(positions))
        return {"input_ids": local, "position_ids": positions}

    def made(self, positions: object) -> bool:
        """Whether these position_ids are from `inputs`, handed on by a model: to look into them waits for the GPU."""
        return any(one() is positions for one in self._made)

    def labels(self, labels: Tensor) -> Tensor:
        """This rank's labels, shifted already, from the whole ones (batch, seqlen)."""
        return self.layout.shift_labels(labels, self.transport.rank)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """This rank's part of the mean cross entropy over all labels of the sequence.

        Args:
            logits: (batch, local_length, vocabulary) of this rank.
            labels: (batch, seqlen), whole and unshifted, as for one device; IGNORE_INDEX is left out.
        """
        mine = self.labels(labels)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != mine.shape:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise InvalidInputError(f"logits must be {tuple(mine.shape)} and the vocabulary, got {got}")
        flat = logits.float().flatten(0, 1)
        targets = mine.flatten().long()
        total = torch.nn.functional.cross_entropy(flat, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        # counted where the labels are: to ask for the number would make the host wait for the GPU in every step
        counted = (self.layout.shifted(labels) != IGNORE_INDEX).sum().clamp(min=1)
        return total * (self.layout.ranks if self.gradients == "mean" else 1) / counted

    def gather(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """The whole tensor from the ranks' rows, for looking at; not differentiable."""
        return gather_sequence(x, self.layout, self.transport, dim=dim)


@contextmanager
def context_parallel(
    model: Any,
    *,
    layout: Layout,
    transport: Transport,
    schedule: str = "kv_ring",
    gradients: str = "sum",
    **options: Any,
) -> Iterator[ContextParallel]:
    """Run a transformers model on one shard of a sequence, with attention over all of it.

    Args:
        model: a PreTrainedModel whose attention goes through transformers' AttentionInterface.
        gradients: "sum" when the gradients of the ranks are added up, "mean" when they are averaged.
        options: of `distributed_attention`: backend, overlap, wire, ...

    Raises:
        UnsupportedError: a model that cannot be given another attention, or with layers that cannot run on a shard.
    """
    with told(transport):
        if gradients not in ("sum", "mean"):
            raise InvalidInputError(f"gradients must be 'sum' or 'mean', got {shown(gradients, 40)}")
        if not isinstance(layout, Layout):
            raise InvalidInputError(f"layout must come from make_layout, got {shown(layout)}")
        if layout.ranks != transport.size:
            raise InvalidInputError(f"the layout is for {layout.ranks} ranks, but the transport has {transport.size}")
        find_schedule(schedule)
        check_names(options, _OPTIONS)
        check_read(schedule, options)
        check_split(layout.ranks, **{name: options.get(name) for name in ("ulysses", "inner", "mesh", "wire")})
        if not hasattr(model, "set_attn_implementation"):
            raise UnsupportedError(
                f"{type(model).__name__} has no set_attn_implementation: a transformers model is needed"
            )
        check_layers(model.config)
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)  # without it transformers would drop masks of padding unseen
    before = model.config._attn_implementation
    active = ContextParallel(layout, transport, schedule, gradients, options)
    token = _ACTIVE.set(active)
    _OPEN.append(active)
    hook = model.register_forward_pre_hook(_check_labels, with_kwargs=True)
    try:
        with told(transport):
            model.set_attn_implementation(NAME)
            check_taken(model)
        yield active
    finally:
        hook.remove()
        _OPEN.remove(active)
        _ACTIVE.reset(token)
        model.set_attn_implementation(before)


def check_taken(model: Any) -> None:
    """Whether the model's attention is the ring's now: transformers only warns where a model keeps its own. And whether
    its positions are those of tokens.

    Raises:
        UnsupportedError: one of them is not, or not in a model within it.
    """
    for one in model.modules():
        kept = hasattr(one, "set_attn_implementation") and one.config._attn_implementation != NAME
        if kept or not getattr(one, "_supports_attention_backend", True):
            raise UnsupportedError(
                f"transformers does not say that the attention of {type(one).__name__} goes through its "
                "AttentionInterface, and one that does not sees its own shard only"
            )
        again = getattr(one, "_gradient_checkpointing_func", None)
        if getattr(one, "gradient_checkpointing", False) and getattr(again, "keywords", {}).get("use_reentrant"):
            raise UnsupportedError(
                "checkpoints that re-enter autograd would recompute layers on a shard alone, without a word, in a "
                "backward after this context: give them use_reentrant=False"
            )
        places = getattr(one, "position_embeddings", None)
        absolute = getattr(one, "position_embedding_type", "absolute") == "absolute"
        if absolute and getattr(places, "padding_idx", None) is not None:
            raise UnsupportedError(
                f"{type(one).__name__} counts positions from its padding index on, as RoBERTa does, and those here are "
                "counted from 0"
            )


def check_layers(config: Any) -> None:
    """Every layer of a transformers configuration must be one that sees other tokens through its attention alone.

    What a layer's mask would say is not asked for here, so layers that live by it (chunks) must not become full causal
    ones, nor layers that hand a state from token to token (convolutions, recurrences) run on a shard as if it were all.

    Raises:
        UnsupportedError: names the layers.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is None and getattr(config, "attention_chunk_size", None):
        kinds = ["chunked_attention"]
    if strange := sorted({str(kind) for kind in kinds or ()} - _LAYERS):
        raise UnsupportedError(
            f"layers of kind {', '.join(strange)} cannot run on a shard: only {', '.join(sorted(_LAYERS))} can"
        )


def _refuse(active: ContextParallel, error: GpuAccelError | None) -> None:
    """Raise an error on every rank."""
    if error is not None:
        active.transport.agree("", error)
        raise error


def _within() -> ContextParallel:
    active = _ACTIVE.get()
    if active is None and len(_OPEN) == 1:
        active = _OPEN[0]
    if active is None:
        raise InvalidInputError("this model's attention goes over a ring: use it within context_parallel")
    return active


def _check_labels(model: Any, given: tuple, named: dict[str, Any]) -> None:
    """A model shifts its labels and takes their mean: the wrong neighbours on a shard, and this rank's labels alone."""
    try:
        found = signature(model.forward).bind_partial(*given, **named).arguments
    except TypeError:  # the model says so itself
        return
    found = found | found.get("kwargs", {})
    if found.get("labels") is None or (
        found.get("shift_labels") is not None and found.get("num_items_in_batch") is not None
    ):
        return
    _refuse(_within(), InvalidInputError(
        "a model shifts its labels within a shard and takes their mean there: call it without labels, and "
        "cp.loss(logits, labels) with the whole ones"
    ))  # fmt: skip


def _mask(*_: Any, attention_mask: Tensor | None = None, use_vmap: bool = False, **__: Any) -> None:
    """What a model asks once a forward: its mask, which is causal or a window, so that none is needed."""
    error = None
    if attention_mask is not None and not bool(attention_mask.all()):
        error = UnsupportedError("padding is not taken over a ring: pass no attention_mask, or use documents")
    elif use_vmap:
        error = UnsupportedError("this model adds a function of its own to the mask, which is not taken over a ring")
    _refuse(_within(), error)


def _check_positions(active: ContextParallel, given: object) -> GpuAccelError | None:
    """Without position_ids a model counts the rows of its shard, and is wrong without a word."""
    if active.made(given):
        return None
    layout, rank = active.layout, active.transport.rank
    counted = torch.arange(layout.local_length)
    expected = layout.positions(rank, within_document=True, padding=0)
    if not isinstance(given, Tensor) or given.shape[-1:] != counted.shape or torch.equal(counted, expected):
        return None
    if given.is_cuda and torch.cuda.is_current_stream_capturing():  # the first calls were looked at
        return None
    if bool((given.reshape(-1, len(counted)) == counted.to(given.device)).all()):
        return InvalidInputError("position_ids count the rows of a shard, not the tokens of the sequence: "
                                 "call the model with **cp.inputs(input_ids)")  # fmt: skip
    return None


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """What a layer calls: query (batch, heads, rows, head_dim); returns (batch, rows, heads, head_dim)."""
    active = _within()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    error: GpuAccelError | None = None
    if attention_mask is not None:
        error = UnsupportedError("attention masks are not taken over a ring: pass no attention_mask, or use documents")
    elif dropout:
        error = UnsupportedError(f"dropout ({dropout}) is not supported: set attention_dropout to 0 or use eval()")
    elif unused.get("s_aux") is not None:
        error = UnsupportedError("attention sinks are not supported")
    elif getattr(module, "layer_idx", None) == 0:
        error = _check_positions(active, unused.get("position_ids"))
    _refuse(active, error)
    window = (-1, -1) if not sliding_window else (sliding_window - 1, 0 if causal else sliding_window - 1)
    o, _ = distributed_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), layout=active.layout, transport=active.transport,
        schedule=active.schedule, causal=bool(causal), window_size=window, softmax_scale=scaling,
        softcap=softcap or 0.0, **active.options,
    )  # fmt: skip
    return o, None
