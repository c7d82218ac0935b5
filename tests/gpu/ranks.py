"""Processes for tests with several ranks, a GPU each, or sharing one (`one_gpu.py`)."""

from __future__ import annotations

import time

import pytest
import torch
import torch.multiprocessing

from .one_gpu import start, why_not


def meeting_point():
    """Where ranks find one another. The system picks a port and it is taken from then on: no two tests are given it."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _rank(rank: int, ranks: int, port: int, function, arguments: tuple) -> None:
    import torch.distributed as dist

    start(rank, ranks, port)
    function(rank, ranks, *arguments)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def run_ranks(function, ranks: int, *arguments) -> None:
    if reason := why_not(ranks):
        pytest.skip(reason)
    store = meeting_point()
    running = torch.multiprocessing.spawn(_rank, (ranks, store.port, function, arguments), nprocs=ranks, join=False)
    end = time.monotonic() + 150
    while not running.join(timeout=1):
        if time.monotonic() > end:
            for process in running.processes:
                process.kill()
            pytest.fail(f"{function.__name__}: ranks that wait for one another, or take more than 150 s")
