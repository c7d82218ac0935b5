"""The reference as a backend: every dtype, device and head dimension, slowly."""

from __future__ import annotations

from gpu_accel.flash_attention3.problem import Problem
from gpu_accel.flash_attention3.reference import attention_backward_reference, attention_reference

NAME = "reference"
KERNEL = "plain torch, chunked over query rows"


def refuse(problem: Problem) -> str | None:
    """It runs everything."""
    return None


def forward(q, k, v, *, window_left=-1, window_right=-1, **options):
    return attention_reference(q, k, v, window_size=(window_left, window_right), **options)


def backward(do, q, k, v, o, lse, *, window_left=-1, window_right=-1, **options):
    return attention_backward_reference(do, q, k, v, o=o, lse=lse, window_size=(window_left, window_right), **options)
