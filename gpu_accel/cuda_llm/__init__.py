"""Kernel search that cannot be cheated, useful with or without a language model.

    from gpu_accel.cuda_llm import optimize_kernel
    best = optimize_kernel(my_kernel, target_hardware="h100")

    verdict.py         the words
    candidate.py       a kernel's source and its launch spec (launch.py), as data
    triton_source.py, cuda_source.py     what a source may contain
    tasks/             kernels to write: inputs, float64 oracles, tolerances, baselines
    admission.py       which tasks can tell a kernel from none
    harness.py         judging a candidate: image.py (memory), sandbox.py and worker.py (processes), outputs.py
    measure.py         timing one on a GPU: gpu_jobs.py (its process), compiled.py and device.py (machine code)
    repeats.py, other_clocks.py          what else is asked of a winner's times
    deploy.py          a winner as a function of tensors
    redteam.py         known hacks (fixtures.py) with honest twins
    search.py          the loop; searches.py and pool.py: many side by side
    proposers.py, grammar.py             where candidates come from
    artefact.py        a search as a folder; progress.py: as a figure, and winners as a file

The paper: Chen, Zhu, Fan, Ma, Zou: CUDA-LLM: LLMs Can Write Efficient CUDA Kernels, arXiv:2506.09092.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Candidate": "candidate",
    "Grammar": "grammar",
    "Judgement": "verdict",
    "Kind": "verdict",
    "Budget": "search",
    "Optimized": "search",
    "Pool": "pool",
    "Proposer": "proposers",
    "Sandbox": "sandbox",
    "TASKS": "tasks",
    "Task": "tasks",
    "Verdict": "verdict",
    "check": "harness",
    "find": "tasks",
    "optimize_kernel": "search",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
