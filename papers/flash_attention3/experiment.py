"""What can be run about FlashAttention-3; `gpu-accel run fa3` and the notebook find the experiments here.

    forward     cases.py, attention.py, fp8_forward.py
    backward    cases.py, attention.py
    decode      decode.py
    ablation    ablation.py
    fp8-error   fp8_error.py
    quantize    quantize.py
    memory      memory.py

The contenders are in peers.py, the judgement in judging.py, the inputs in inputs.py and capture.py.
"""

from __future__ import annotations

from functools import partial

from gpu_accel.workbench.experiment import Experiment, SimpleExperiment

from . import ablation, attention, decode, fp8_error, memory, quantize
from .cases import attention_cases

_ALL = (
    SimpleExperiment(
        name="forward",
        title="Forward pass over the paper's grid, next to torch's attention",
        list_cases=partial(attention_cases, direction="forward"),
        build_case=attention.build_forward,
    ),
    SimpleExperiment(
        name="backward",
        title="Backward pass over the paper's grid, next to torch's attention",
        list_cases=partial(attention_cases, direction="backward"),
        build_case=attention.build_backward,
    ),
    SimpleExperiment(
        name="ablation",
        title="The Hopper forward kernel with its ideas switched off one by one",
        list_cases=ablation.list_cases,
        build_case=ablation.build,
    ),
    SimpleExperiment(
        name="decode",
        title="One query a head over a KV cache, contiguous and paged, next to a copy of as many bytes",
        list_cases=decode.list_cases,
        build_case=decode.build,
    ),
    SimpleExperiment(
        name="fp8-error",
        title="Error against float64 of FP8 recipes: block scales, Hadamard, neither",
        list_cases=fp8_error.list_cases,
        build_case=fp8_error.build,
    ),
    SimpleExperiment(
        name="quantize",
        title="Rounding to FP8 with the Hadamard matrix or transposed, next to a copy of as many bytes",
        list_cases=quantize.list_cases,
        build_case=quantize.build,
    ),
    SimpleExperiment(
        name="memory",
        title="Peak memory beyond the inputs, and how it grows with the sequence",
        list_cases=memory.list_cases,
        build_case=memory.build,
    ),
)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in _ALL}
