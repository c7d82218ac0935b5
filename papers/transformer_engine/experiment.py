"""What can be run about low-precision numbers; `gpu-accel run te` and the notebook find the experiments here.

    quantize    quantizing.py
    gemm        products.py
    grouped     grouped.py
    error       errors.py
    linear      layers.py
    layer       layers.py
    train       training.py
    perplexity  perplexity.py

The inputs are in inputs.py.
"""

from __future__ import annotations

from gpu_accel.workbench.experiment import Experiment, SimpleExperiment

from . import errors, grouped, layers, perplexity, products, quantizing, training

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
        axes=products.AXES,
        words=products.WORDS,
        list_cases=products.list_cases,
        build_case=products.build,
    ),
    SimpleExperiment(
        name="grouped",
        title="FP8 products of experts in one launch, with scales per row and block",
        list_cases=grouped.list_cases,
        build_case=grouped.build,
    ),
    SimpleExperiment(
        name="error",
        title="Error of every scheme on normal values, outliers, and a language model's own",
        list_cases=errors.list_cases,
        build_case=errors.build,
    ),
    SimpleExperiment(
        name="linear",
        title="A linear layer under each recipe next to bf16, forward and backward, quantising included",
        list_cases=layers.list_linear,
        build_case=layers.build_linear,
    ),
    SimpleExperiment(
        name="layer",
        title="A Llama layer under each recipe next to bf16",
        list_cases=layers.list_layer,
        build_case=layers.build_layer,
    ),
    SimpleExperiment(
        name="train",
        title="A small Llama on a real text: bf16 and every recipe from the same seeds",
        list_cases=training.list_cases,
        build_case=training.build,
    ),
    SimpleExperiment(
        name="perplexity",
        title="Perplexity of SmolLM2-135M under each recipe, on any machine",
        list_cases=perplexity.list_cases,
        build_case=perplexity.build,
    ),
)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in _ALL}
