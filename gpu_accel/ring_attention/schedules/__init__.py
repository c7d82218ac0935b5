"""Schedules: who computes what when, and what travels meanwhile. One module each, all with the same three functions:

    refuse(call, q, k, v) -> str | None         why it cannot run this, decided before any communication
    forward(q, k, v, call, transport) -> (o, lse)                        on every rank, with its shards
    backward(do, q, k, v, o, lse, call, transport) -> (dq, dk, dv)

Shapes: q, do (batch, local_length, heads, head_dim), k and v with their own heads; o like q with the head_dim of v;
lse (batch, heads, local_length) float32. Padding rows come out as 0 (o, gradients) and -inf (lse).

    name           travels                     bytes a rank sends (forward), elements
    kv_ring        K, V                        2 hkv c (N-1)
    q_ring         Q, then O and lse           h c (N-1) + partial results
    allgather      K, V at once                2 hkv c (N-1), memory for all of K, V
    ulysses        heads for tokens            (2 h + 2 hkv) c (N-1)/N
    usp            heads in groups, then K, V  the two above with u and N/u
    double_ring    K, V in two nested rings    as kv_ring, the slow link once in w steps
    mesh           Q in columns, K, V in rows  h c (a-1) + 2 hkv c (b-1) + partial results
    concentric     as mesh, K, V in rings      the same, the keys hidden
    helper         K, V, and Q to idle ranks   causal contiguous only
    tree           O and lse                   decoding: a few queries that all ranks hold
"""

from __future__ import annotations

import importlib
from types import ModuleType

from gpu_accel.errors import InvalidInputError, shown

SCHEDULES = ("kv_ring", "q_ring", "allgather", "ulysses", "usp", "double_ring", "mesh", "concentric", "helper", "tree")


def schedule(name: str) -> ModuleType:
    """The module of a schedule."""
    if not isinstance(name, str) or name not in SCHEDULES:
        raise InvalidInputError(f"schedule must be one of {', '.join(SCHEDULES)}, got {shown(name)}")
    return importlib.import_module(f"{__name__}.{name}")
