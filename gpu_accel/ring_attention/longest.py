"""The longest sequence whose attention fits in the memory of so many GPUs, by the bytes that `cost_model.py` counts.

    longest(gpus=2, heads=8, kv_heads=2, schedule="kv_ring", backward=True)      # tokens of the whole sequence

Attention alone, with its shards, results and buffers: what a model holds beside it has to be taken off `memory_gb`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.ring_attention.cost_model import peak_memory
from gpu_accel.ring_attention.plan import CANDIDATES, plan


def longest(
    *, gpus: int, heads: int, kv_heads: int | None = None, schedule: str = "kv_ring", memory_gb: float = 80.0,
    multiple: int = 1024, **options: Any,
) -> int:  # fmt: skip
    """Tokens, a multiple of `multiple`; 0 where not even as many fit.

    Args:
        gpus, heads, kv_heads, memory_gb: as for `plan`. schedule: one of its candidates.
        options: head_dim, batch, backward, gpus_per_node, link, of `plan`.

    Raises:
        InvalidInputError: as `plan`, or a schedule that is not there.
    """
    if schedule not in CANDIDATES:
        raise InvalidInputError(f"schedule must be one of {', '.join(CANDIDATES)}, got {shown(schedule, 40)}")
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise InvalidInputError(f"multiple must be a whole number from 1 up, got {shown(multiple, 40)}")
    question = {"gpus": gpus, "heads": heads, "kv_heads": kv_heads, "memory_gb": memory_gb, **options}
    try:
        checked = plan(seq=1, **question).setup  # says what is wrong with them
    except UnsupportedError:  # not a single token fits
        return 0

    def fits(tokens: int) -> bool:
        whole = None if checked.documents is None else (tokens,)
        return peak_memory(schedule, replace(checked, seq=tokens, documents=whole)) <= memory_gb * 1e9

    low, high = 0, 1
    while fits(high * multiple):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * multiple) else (low, middle)
    return low * multiple
