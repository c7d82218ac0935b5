"""What goes wrong between ranks, and the agreement that finds most of it before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_accel.errors import GpuAccelError, InvalidInputError


class CommunicationError(GpuAccelError, RuntimeError):
    """Another rank is gone, failed, or did not answer in time. The transport is of no further use."""


def compare_statements(mine: int, statements: Sequence[str]) -> None:
    """All ranks said what they are about to do: the same, or every one of them raises and names the odd ones out.

    A statement that starts with "error: " is a rank that has refused its inputs; it raises its own error itself.

    Raises:
        InvalidInputError: on every rank alike, before any tensor has been sent.
    """
    failed = [(rank, text[7:]) for rank, text in enumerate(statements) if text.startswith("error: ")]
    if failed:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in failed if rank != mine)
        if told:
            raise InvalidInputError(f"nothing was sent, because another rank refused its inputs ({told})")
        return
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(statements):
        groups.setdefault(text, []).append(rank)
    if len(groups) > 1:
        told = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in groups.items())
        raise InvalidInputError(f"the ranks do not agree, so nothing was sent ({told})")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
