"""The reference as a backend: every dtype, device and head dimension, slowly."""

from __future__ import annotations

from gpu_accel.flash_attention3.features import Features
from gpu_accel.flash_attention3.problem import Problem
from gpu_accel.flash_attention3.reference import attention_backward_reference, attention_reference

NAME = "reference"
KERNEL = "plain torch, chunked over query rows"
# Not score_mod and mask_mod: here those are Triton device functions. attention_reference takes them in Python.
FEATURES = frozenset({"sinks", "alibi_slopes", "return_max_logits", "batch_invariant"})


def refuse(problem: Problem) -> str | None:
    """It runs everything."""
    return None


def _options(features: Features | None) -> dict:
    return {} if features is None else {"sinks": features.sinks, "alibi_slopes": features.alibi_slopes}


def forward(q, k, v, *, window_left=-1, window_right=-1, features=None, **options):
    if features is not None and features.return_max_logits:
        options["return_max_logits"] = True
    window = (window_left, window_right)
    return attention_reference(q, k, v, window_size=window, **_options(features), **options)


def backward(do, q, k, v, o, lse, *, window_left=-1, window_right=-1, features=None, **options):
    window = (window_left, window_right)
    return attention_backward_reference(
        do, q, k, v, o=o, lse=lse, window_size=window, **_options(features), **options
    )
