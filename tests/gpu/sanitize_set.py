"""A few small calls of every Hopper kernel, for compute-sanitizer; `test_sanitizer.py` runs it.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 tests/gpu/sanitize_set.py [name ...]

Lengths leave tails on both sides, and programs get more than one tile.
"""

from __future__ import annotations

import sys

import torch

from gpu_accel.flash_attention3 import flash_attn_func, flash_attn_varlen_func

DIMS = (64, 128, 256)


def dense(d: int, *, gradients: bool, seqlen_k: int = 400, **options: object) -> None:
    shapes = ((1, 333, 2, d), (1, seqlen_k, 1, d), (1, seqlen_k, 1, d))
    q, k, v = (torch.randn(*s, device="cuda", dtype=torch.bfloat16, requires_grad=gradients) for s in shapes)
    o = flash_attn_func(q, k, v, backend="hopper", **options)
    if gradients:
        torch.autograd.grad(o, (q, k, v), torch.ones_like(o))


def packed(d: int) -> None:
    cu = torch.tensor([0, 200, 200, 333], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(333, 2, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, backend="hopper")


CALLS = {
    **{f"forward-{d}": lambda d=d: dense(d, gradients=False, causal=True) for d in DIMS},
    **{f"packed-{d}": lambda d=d: packed(d) for d in DIMS},
    **{f"backward-{d}": lambda d=d: dense(d, gradients=True, causal=True) for d in DIMS},
    # whole tiles of keys, whose backward frees rows warp by warp
    **{f"whole-{d}": lambda d=d: dense(d, gradients=True, causal=True, seqlen_k=384) for d in (64, 128)},
    "window-softcap": lambda: dense(128, gradients=True, window_size=(100, 20), softcap=5.0),
    "full": lambda: dense(128, gradients=True),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or CALLS:
        CALLS[name]()
        torch.cuda.synchronize()
        print("ran", name, flush=True)
