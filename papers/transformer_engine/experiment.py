"""What can be run about low-precision numbers; `gpu-accel run te` and the notebook find the experiments here.

    quantize    quantizing.py
    gemm        products.py
    error       errors.py

The inputs are in inputs.py.
"""

from __future__ import annotations

from gpu_accel.workbench.experiment import Experiment, SimpleExperiment

from . import errors, products, quantizing

_ALL = (
    SimpleExperiment(
        name="quantize",
        title="Quantisers next to a copy of as many bytes, and to plain torch",
        list_cases=quantizing.list_cases,
        build_case=quantizing.build,
    ),
    SimpleExperiment(
        name="gemm",
        title="FP8 products with scales per tensor, row and block, with and without quantising",
        list_cases=products.list_cases,
        build_case=products.build,
    ),
    SimpleExperiment(
        name="error",
        title="Error of every scheme on normal values, outliers, and a language model's own",
        list_cases=errors.list_cases,
        build_case=errors.build,
    ),
)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in _ALL}
