"""Real processes with a gloo process group, forked from the tests: no second import of torch, a few hundred ms each."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class Outcome:
    """What one rank returned or raised (as its type's name and its message), and after how many seconds."""

    result: Any = None
    error: str = ""
    message: str = ""
    seconds: float = 0.0
    trace: str = ""


def _child(function: Callable[..., Any], rank: int, ranks: int, store: str, queue: Any, arguments: tuple) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    start = time.monotonic()
    outcome = Outcome()
    try:
        outcome.result = function(rank, *arguments)
    except Exception as error:
        outcome = Outcome(error=type(error).__name__, message=str(error), trace=traceback.format_exc())
    outcome.seconds = time.monotonic() - start
    queue.put((rank, outcome))


def run_ranks(
    function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any, lost: tuple[int, ...] = (), limit=60
):
    """`function(rank, *arguments)` in one process a rank: {rank: Outcome}, without the ranks that are to be lost."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    store = str(folder / f"store-{time.monotonic_ns()}")
    processes = [
        context.Process(target=_child, args=(function, rank, ranks, store, queue, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    outcomes = {}
    try:
        for _ in range(ranks - len(lost)):
            rank, outcome = queue.get(timeout=limit)
            outcomes[rank] = outcome
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    return outcomes


def results(outcomes: dict[int, Outcome]) -> list[Any]:
    """The results in rank order; the traceback of a rank that failed."""
    for rank, outcome in outcomes.items():
        assert not outcome.error, f"rank {rank}:\n{outcome.trace}"
    return [outcomes[rank].result for rank in sorted(outcomes)]
