"""Which kernels linear attention takes, with it retention, `chunk_simple_gla` and Mamba-2, and why not others.

    print(explain_linear(q, k, v, g=gates))
    print(explain_linear(C, B, x, g=dt * A, w=dt))          # of Mamba-2, whose q, k, v these are
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.thunderkittens import chunked, linear, walk_back, walk_hopper

_NAMES = {"portable": "plain Triton", "reference": "plain torch"}


def explain_linear(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None = None, w: Tensor | None = None,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, chunk: int = chunked.CHUNK,
    backend: str = "auto",
) -> str:  # fmt: skip
    """What `linear_attention` would run for such tensors, forwards and backwards, a line each. Runs nothing.

    Arguments as there. Gradients of gates (`g`) are taken to be wanted where g requires one.

    Raises:
        InvalidInputError, UnsupportedError: as the call would.
    """
    linear._validate(q, k, v, g, w, initial_state, cu_seqlens, chunk)
    why = walk_hopper.refusal(q, k, v, cu_seqlens, chunk)
    if backend == "hopper":
        linear._refuse(why)
        chosen = "hopper"
    else:
        seen = v.dtype != torch.float32 or min(q.shape[3], v.shape[3]) > linear._NARROW
        chosen = linear.choose(v, backend, linear.GPU_CHECKED and seen, others=("hopper",))
        if backend == "auto" and chosen == "portable" and linear.HOPPER_CHECKED and why is None:
            chosen = "hopper"
    if chosen == "hopper":
        gradients = _gradients(q, k, v, g, w, initial_state)
        lines = ["forward    hopper: a walk over the chunks in Gluon", f"gradients  {gradients}"]
    else:
        way = ""
        if chosen == "portable":
            walked = v.dtype == torch.bfloat16 and q.shape[-1] in linear._WALKED_KEYS
            way = ", one walk over the chunks" if walked else ", all chunks at once"
        lines = [f"forward    {chosen}: {_NAMES[chosen]}{way}", f"gradients  {chosen}: {_NAMES[chosen]}"]
        lines.append(f"not taken  hopper: {why or f'backend {backend!r} was asked for'}")
    return "\n".join(lines)


def _gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, initial: Tensor | None) -> str:
    sizes, weighted = (q.shape[-1], v.shape[-1]), w is not None
    tiles = -(-min(sizes) // 64)
    segments = chunked.segments_for(v.shape[0], v.shape[2], tiles, -(-v.shape[1] // chunked.CHUNK))
    if g is not None and g.requires_grad:
        why = walk_back.unseen(*sizes, weighted, initial is not None, segments)
    elif weighted:
        why = "weights without gradients of gates"
    else:
        why = walk_back.plain_unseen(*sizes, v.shape[2] > q.shape[2])
    why = why or walk_back.refusal(q, k, v, None, chunked.CHUNK, chunked.default_scale(q.shape[-1]), False)
    return f"portable: plain Triton (walks in Gluon: not for {why})" if why else "hopper: walks in Gluon"


__all__ = ["explain_linear"]
