"""What ranks of sequence parallelism gather, chosen by a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gpu_accel.transformer_engine import sequence


@contextlib.contextmanager
def gathering(*, codes: bool) -> Iterator[list[bool]]:
    """Layers gather codes where they can, or 16 bits; yields, layer by layer, whether it did gather codes."""
    step, taken = sequence.step, []

    def chosen(*arguments):
        y = step(*arguments) if codes else None
        taken.append(y is not None)
        return y

    sequence.step = chosen
    try:
        yield taken
    finally:
        sequence.step = step
