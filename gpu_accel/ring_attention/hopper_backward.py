"""Host side of the Hopper backward of a ring: see `hopper_backward_kernel.py` for what it computes.

sums = Gradients(do, q, v, lse, delta, ...)       statistics of the rows, and a float32 sum of dQ
sums.add(piece, k, v, into)                       one kernel, for each piece of each step
sums.finish(k, first, second)                     dQ, dK, dV in order, scaled and rounded
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import (
    Known,
    QuickLaunch,
    addressable,
    fragment_map,
    multiprocessors,
    number_map,
    refusal,
    tensor_map,
    tile_counter,
)
from gpu_accel.flash_attention3.hopper_backward import BackwardConfig, backward_config, exponentials_early, walk
from gpu_accel.flash_attention3.problem import Problem, effective_window
from gpu_accel.ring_attention.fragments import NUMBERS, SIDE, gather, statistics
from gpu_accel.ring_attention.masks import Piece

_known = Known()
_APART = True  # dQ in a warpgroup of its own where steps are plain (hopper_backward_apart.py)
_LOG2_E = 1.4426950408889634
_KEYS = 128  # of a tile
# Bytes of q, do and dq that heads at work at the same time may have where their tiles take turns, by causal. On an H200
# at 8k rows, head_dim 128, turns cost: causal 1.16, 1.11, 1.25, 1.60 times the time without them with 2, 4, 8, 16 heads
# at once, unmasked 1.71, 1.16, 1.08, 1.07.
_IN_TURNS = {True: 32 << 20, False: 128 << 20}


def refuse(problem: Problem) -> str | None:
    """Why this kernel cannot run the problem, or None."""
    if (why := refusal(problem)) is not None:
        return why
    if problem.head_dim not in (64, 128):
        return f"adds up gradients at head_dim 64 and 128 only, got {problem.head_dim}"
    if problem.softcap > 0 and problem.head_dim == 64:
        return "has no soft cap at head_dim 64"
    if problem.features:
        return "takes plain attention only"
    return None


def misplaced(pieces: Iterable[Piece], rows: int, head_dim: int) -> str | None:
    """Why pieces of a shard of `rows` rows do not lie on whole blocks, or None."""
    m = _config(head_dim).block_m
    for piece in pieces:
        end = piece.q0 + piece.sq
        if piece.q0 % m or (end % m and end != rows) or piece.k0 % SIDE:
            return f"{piece} is not on blocks of {m} queries and {SIDE} keys"
    return None


def _config(head_dim: int, causal: bool = False, plain: bool = False) -> BackwardConfig:
    """`plain`: bfloat16, full or causal, no soft cap, no turns, and at head_dim 64 whole tiles of keys."""
    config = backward_config(head_dim, causal=causal, plain=plain)
    assert isinstance(config, BackwardConfig)
    return config


@functools.cache
def _kernel(apart: bool = False) -> QuickLaunch:
    if apart:
        from .hopper_backward_apart import ring_backward_apart_kernel

        return QuickLaunch(ring_backward_apart_kernel)
    from .hopper_backward_kernel import ring_backward_kernel

    return QuickLaunch(ring_backward_kernel)


def sum_size(k: Tensor) -> int:
    """Numbers of the sums of dK and dV together, of a shard (batch, rows, heads_kv, head_dim)."""
    batch, rows, heads_kv, dim = k.shape
    return 2 * batch * heads_kv * -(-rows // _KEYS) * _KEYS * dim


class Gradients:
    """Of one shard of queries, while blocks of keys come by.

    Args:
        do, q: (batch, rows, heads, head_dim) of 16 bits. lse, delta: (batch, heads, rows) float32, final.
        softmax_scale, softcap: as in the forward.
        deterministic: the same bits of dQ every time, by turns. Pieces must have no left bound.
    """

    def __init__(
        self, do: Tensor, q: Tensor, lse: Tensor, delta: Tensor, *, softmax_scale: float, softcap: float,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        self.do, self.q = addressable(do), addressable(q)
        self.softmax_scale, self.softcap = softmax_scale, softcap
        self.block_m = _config(q.shape[-1]).block_m
        self.stat = statistics(lse, delta, self.block_m)
        batch, heads, self.all_m = self.stat.shape[:3]
        self.dq_sum = torch.zeros((batch, heads, self.all_m, 2, NUMBERS), dtype=torch.float32, device=q.device)
        self.turns: Tensor | None = None
        if deterministic:  # one for each fragment, and one in front where it is always everybody's turn
            self.turns = torch.empty(1 + batch * heads * self.all_m * 2, dtype=torch.int32, device=q.device)
        self._key = (
            *(x.data_ptr() for x in (self.do, self.q, self.stat, self.dq_sum)), q.device, q.dtype, q.shape,
            self.do.stride(), self.q.stride(), softmax_scale, softcap,
        )  # fmt: skip

    def add(self, piece: Piece, k: Tensor, v: Tensor, into: Tensor, half: int | None = None) -> None:
        """Add the gradients of one piece; `into` holds the sums of dK and of dV, `sum_size` numbers.

        half: 0 or 1: of the first or the second half of the heads only (lanes.py), of a batch of one.
        """
        addresses = (k.data_ptr(), v.data_ptr(), into.data_ptr())
        key = (self._key, addresses, k.shape, k.stride(), v.stride(), piece, half, _APART)
        if self.turns is None and _known.again(key, self.q.device):
            return
        rows, keys = slice(piece.q0, piece.q0 + piece.sq), slice(piece.k0, piece.k0 + piece.sk)
        all_n = -(-k.shape[1] // _KEYS) * 2
        do, q, k, v = self.do[:, rows], self.q[:, rows], k[:, keys], v[:, keys]
        stat, dq_sum, (dk, dv) = self.stat, self.dq_sum, into.view(2, -1)
        if half is not None:
            assert q.shape[0] == 1 and self.turns is None
            do, q, k, v = (x.chunk(2, 2)[half] for x in (do, q, k, v))
            stat, dq_sum = (x.chunk(2, 1)[half] for x in (stat, dq_sum))
            dk, dv = (x.chunk(2)[half] for x in (dk, dv))
        given = do, q, k, v
        do, q, k, v = (addressable(x) for x in given)
        seqlen_k, d = k.shape[1], k.shape[3]
        left, right = effective_window(piece.left, piece.right, q.shape[1], seqlen_k)
        causal = right >= 0
        plain = left < 0 and right <= 0 and self.softcap == 0 and self.turns is None
        apart = _APART and plain
        lean = plain and q.dtype == torch.bfloat16 and (d > 64 or seqlen_k % _KEYS == 0)
        config, m = _config(d, causal, lean), self.block_m
        scale, cap_in = self.softmax_scale * _LOG2_E, 0.0
        if self.softcap > 0:
            scale, cap_in = self.softcap * _LOG2_E, self.softmax_scale / self.softcap
        counter, turns = tile_counter(q.device), None
        if self.turns is not None:
            turns = self.turns.zero_()[1:]
        steps = walk(q, k, config, share=None if turns is None else _IN_TURNS[causal])
        arguments = (
            tensor_map(q, m, d),
            tensor_map(do, m, d),
            tensor_map(k, SIDE, d),
            tensor_map(v, SIDE, d),
            number_map(stat, m),
            fragment_map(dq_sum),
            fragment_map(dk),
            fragment_map(dv),
            counter,
            *steps,
            left,
            right,
            self.all_m,
            piece.q0 // m,
            all_n,
            piece.k0 // SIDE,
            scale,
            cap_in,
            counter if turns is None else turns,
        )
        constants = dict(
            D=d,
            M=m,
            K_SLOTS=config.k_slots,
            V_SLOTS=config.v_slots,
            PING_PONG=config.ping_pong,
            PRELOAD=config.preload,
            CAUSAL=causal,
            WINDOW=left >= 0,
            SOFTCAP=self.softcap > 0,
            EVEN_K=seqlen_k % _KEYS == 0,
            DYNAMIC=config.dynamic or half is not None,
            ORDERED=turns is not None,
            NAMED=config.named,
            LEAN=config.lean,
        )
        programs = min(multiprocessors(q.device), steps[6])
        if apart:
            wanted = ("D", "M", "K_SLOTS", "V_SLOTS", "PRELOAD", "CAUSAL", "EVEN_K", "DYNAMIC")
            constants = {name: constants[name] for name in wanted} | {"EARLY": exponentials_early(causal, seqlen_k)}
        kernel, options = _kernel(apart), dict(num_warps=4, maxnreg=128 if apart else 168)
        made = kernel((q.dtype,), programs, arguments, constants, options)
        if turns is None and all(a is b for a, b in zip(given, (do, q, k, v), strict=True)):
            _known.keep(key, made, counter)

    def finish(
        self, k: Tensor, first: Tensor, second: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv); the sums of dK and dV of this rank's own keys are `first` and perhaps `second`."""
        dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (self.q, k, k))
        gather(self.dq_sum, None, dq, scale=self.softmax_scale)
        for i, (x, scale) in enumerate(((dk, self.softmax_scale), (dv, 1.0))):
            gather(first.view(2, -1)[i], None if second is None else second.view(2, -1)[i], x, scale=scale)
        return dq, dk, dv
