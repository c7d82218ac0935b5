"""What can be run about ThunderKittens' kernels; `gpu-accel run tk` and the notebook find the experiments here.

attention                    attention.py
features                     maps.py
gemm                         products.py
ladder                       ladder.py
linear-attention, mamba2     sequences.py
longconv                     longconv.py
norms                        norms.py

Judging and the timing of backwards are in judging.py.
"""

from __future__ import annotations

from gpu_accel.workbench.experiment import Experiment, SimpleExperiment

from . import attention, ladder, longconv, maps, norms, products, sequences

_ALL = (
    SimpleExperiment(
        name="gemm",
        title="Products in bf16 and fp16 next to cuBLAS: cubes, few slices of K, few rows",
        axes=products.AXES,
        words=products.WORDS,
        list_cases=products.list_cases,
        build_case=products.build,
    ),
    SimpleExperiment(
        name="ladder",
        title="One product in seven levels, from a column at a time to warps with roles, next to cuBLAS",
        list_cases=ladder.list_cases,
        build_case=ladder.build,
    ),
    SimpleExperiment(
        name="attention",
        title="Attention at the lengths of ThunderKittens' chart, by this project's Hopper kernels, next to cuDNN",
        list_cases=attention.list_cases,
        build_case=attention.build,
    ),
    SimpleExperiment(
        name="linear-attention",
        title="Linear attention without gates, with decays and gates, and the delta rule, next to fla and torch",
        axes=sequences.AXES,
        words=sequences.WORDS,
        list_cases=sequences.attention_cases,
        build_case=sequences.build_attention,
    ),
    SimpleExperiment(
        name="features",
        title="Based and Hedgehog next to fla, as the paper called it and as it is meant",
        list_cases=maps.list_cases,
        build_case=maps.build,
    ),
    SimpleExperiment(
        name="longconv",
        title="Convolutions as long as the sequence next to torch.fft, with the filter's transform kept and not",
        axes=longconv.AXES,
        words=longconv.WORDS,
        list_cases=longconv.list_cases,
        build_case=longconv.build,
    ),
    SimpleExperiment(
        name="mamba2",
        title="Mamba-2's scan next to mamba_ssm, as the paper called it and as it is meant",
        axes=sequences.MAMBA_AXES,
        words=sequences.MAMBA_WORDS,
        list_cases=sequences.mamba_cases,
        build_case=sequences.build_mamba,
    ),
    SimpleExperiment(
        name="norms",
        title="Norms, softmax, rotary, gates, short convolutions, losses next to a copy of as many bytes, and to torch",
        axes=norms.AXES,
        words=norms.WORDS,
        list_cases=norms.list_cases,
        build_case=norms.build,
    ),
)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in _ALL}
