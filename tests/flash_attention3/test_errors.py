"""Wrong calls raise before anything is launched, and the message says what was given and what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gpu_accel.errors import GpuAccelError, InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import (
    explain,
    flash_attention_3_backward,
    flash_attention_3_forward,
    flash_attn_func,
    flash_attn_varlen_func,
)


def x(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


GOOD = (2, 5, 4, 16)
WRONG = {
    "not-a-tensor": ((x(*GOOD), [1, 2], x(*GOOD)), {}, "k must be a torch.Tensor, got list"),
    "rank": ((x(5, 4, 16),) * 3, {}, r"\(batch, seqlen, heads, head_dim\), got shape \(5, 4, 16\)"),
    "integers": ((x(*GOOD, dtype=torch.int32),) * 3, {}, "float16, bfloat16, float32 or float64, got torch.int32"),
    "mixed-dtypes": ((x(*GOOD), x(*GOOD, dtype=torch.float16), x(*GOOD)), {}, "one dtype"),
    "mixed-devices": ((x(*GOOD), x(*GOOD, device="meta"), x(*GOOD)), {}, "one device"),
    "head-dim-7": ((x(2, 5, 4, 7),) * 3, {}, "multiple of 8, got 7: pad"),
    "head-dims-differ": ((x(*GOOD), x(2, 5, 4, 8), x(*GOOD)), {}, "one head_dim, got 16 and 8"),
    "k-and-v-differ": ((x(*GOOD), x(*GOOD), x(2, 6, 4, 16)), {}, "k and v must agree"),
    "batches-differ": ((x(*GOOD), x(3, 5, 4, 16), x(3, 5, 4, 16)), {}, "one batch size, got 2 and 3"),
    "heads-5-over-2": ((x(2, 5, 5, 16), x(2, 5, 2, 16), x(2, 5, 2, 16)), {}, r"\(5\) must be a multiple .* \(2\)"),
    "no-key-heads": ((x(*GOOD), x(2, 5, 0, 16), x(2, 5, 0, 16)), {}, "multiple"),
    "negative-softcap": ((x(*GOOD),) * 3, {"softcap": -1.0}, "softcap must be 0 .* got -1"),
    "scale-zero": ((x(*GOOD),) * 3, {"softmax_scale": 0.0}, "softmax_scale must be positive"),
    "scale-nan": ((x(*GOOD),) * 3, {"softmax_scale": float("nan")}, "softmax_scale"),
    "window-of-one-number": ((x(*GOOD),) * 3, {"window_size": 3}, "pair"),
    "no-such-backend": ((x(*GOOD),) * 3, {"backend": "cuda"}, "auto, hopper, portable, reference, got 'cuda'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(name):
    tensors, options, message = WRONG[name]
    with pytest.raises(InvalidInputError, match=message) as caught:
        flash_attn_func(*tensors, **options)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, GpuAccelError)
    with pytest.raises(InvalidInputError, match=message):
        explain(*tensors, **options)


def test_unknown_arguments_are_not_swallowed():
    with pytest.raises(TypeError):
        flash_attn_func(x(*GOOD), x(*GOOD), x(*GOOD), dropout_p=0.1)
    with pytest.raises(TypeError):  # flash-attn versions disagree on what the fourth positional argument is
        flash_attn_func(x(*GOOD), x(*GOOD), x(*GOOD), 0.5)


def test_fp8_tensors():
    fp8 = x(*GOOD).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="fp8_attention"):
        flash_attn_func(fp8, fp8, fp8)
    wants = fp8.clone().requires_grad_()
    with pytest.raises(InvalidInputError, match="cannot require gradients"):
        flash_attn_func(wants, fp8, fp8)


def test_head_dim_too_large_for_kernels():
    big = x(1, 4, 1, 264)
    with pytest.raises(UnsupportedError, match="264"):
        flash_attn_func(big, big, big, backend="portable")


def cu(*values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


PACKED = {
    "int64": ({"cu_seqlens_q": cu(0, 5, dtype=torch.int64)}, "must be int32, got torch.int64: use"),
    "a-list": ({"cu_seqlens_q": [0, 5]}, "int32 tensor"),
    "two-dimensional": ({"cu_seqlens_q": cu(0, 5)[None]}, r"shape \(batch \+ 1,\)"),
    "other-device": ({"cu_seqlens_k": cu(0, 5, device="meta")}, "on the device of q"),
    "other-batch": ({"cu_seqlens_q": cu(0, 2, 5)}, "one length, got 3 and 2"),
    "not-from-zero": ({"cu_seqlens_q": cu(1, 5)}, "start with 0, got 1"),
    "decreasing": ({"cu_seqlens_q": cu(0, 4, 2), "cu_seqlens_k": cu(0, 4, 5)}, "got 4 then 2 at position 2"),
    "beyond-the-end": ({"cu_seqlens_k": cu(0, 9)}, "ends at 9, but k has only 5 rows"),
    "longer-than-said": ({"max_seqlen_q": 3}, "max_seqlen_q is 3, but the longest sequence has 5"),
    "used-beyond": ({"seqused_k": cu(6)}, r"seqused_k\[0\] is 6"),
    "used-shape": ({"seqused_k": cu(1, 2)}, r"shape \(1,\)"),
}


@pytest.mark.parametrize("name", PACKED)
def test_wrong_packed_input(name):
    changes, message = PACKED[name]
    given = {"cu_seqlens_q": cu(0, 5), "cu_seqlens_k": cu(0, 5), **changes}
    q = x(5, 4, 16)
    with pytest.raises(InvalidInputError, match=message):
        flash_attn_varlen_func(q, q, q, **given)


def test_values_are_not_read_when_told_not_to():
    q = x(5, 4, 16)
    flash_attn_varlen_func(q, q, q, cu_seqlens_q=cu(0, 5), cu_seqlens_k=cu(0, 5), max_seqlen_q=3, validate=False)


def test_seed_functions_validate():
    q = x(2, 4, 5, 16, dtype=torch.bfloat16)
    with pytest.raises(InvalidInputError, match="precision"):
        flash_attention_3_forward(q, q, q, precision="fp4")
    with pytest.raises(InvalidInputError, match="four dimensions"):
        flash_attention_3_forward(q[0], q[0], q[0], precision="bf16")
    with pytest.raises(InvalidInputError, match="floating-point"):
        flash_attention_3_forward(q.int(), q, q, precision="bf16")
    with pytest.raises(InvalidInputError, match="dO must be"):
        flash_attention_3_backward(q[:1], q, q, q, q)
    with pytest.raises(InvalidInputError, match="lse must have shape"):
        flash_attention_3_backward(q, q, q, q, q, torch.zeros(2, 5, 4))


def test_without_interpreter_a_cpu_tensor_says_what_to_do():
    code = """
import torch
from gpu_accel.errors import HardwareError
from gpu_accel.flash_attention3 import explain, flash_attn_func
q = torch.randn(1, 8, 2, 16)
assert explain(q, q, q).backend == "reference"
flash_attn_func(q, q, q)
try:
    flash_attn_func(q, q, q, backend="portable")
except HardwareError as error:
    assert "TRITON_INTERPRET=1" in str(error)
else:
    raise SystemExit("no error")
"""
    import os

    env = {n: value for n, value in os.environ.items() if n != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=env)
