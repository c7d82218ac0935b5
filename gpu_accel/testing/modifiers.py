"""Modifiers of attention scores that read captured tensors, and their twins for float64 truth."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def relative(score, b, h, q_idx, kv_idx, bias, document):
    return score + tl.load(bias + h) * (q_idx - kv_idx)


@triton.jit
def relative_grad(grad, score, b, h, q_idx, kv_idx, bias, document):
    return grad


def relative_twin(score, b, h, q_idx, kv_idx, bias, document):
    return score + bias[h].to(score.dtype) * (q_idx - kv_idx)


@triton.jit
def same_document(b, h, q_idx, kv_idx, bias, document):
    return tl.load(document + q_idx) == tl.load(document + kv_idx)


def same_document_twin(b, h, q_idx, kv_idx, bias, document):
    return document[q_idx] == document[kv_idx]
