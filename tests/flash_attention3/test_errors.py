"""Wrong calls raise before anything is launched, and the message says what was given and what to do."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from gpu_accel.errors import GpuAccelError, InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import (
    FlashAttention3,
    blockwise_softmax,
    explain,
    flash_attention_3_backward,
    flash_attention_3_forward,
    flash_attn_func,
    flash_attn_varlen_func,
    fp8_attention,
    fp8_attention_quantized,
    fp8_block_quantize,
    fp8_error_report,
    hadamard_transform,
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
    "no-such-backend": ((x(*GOOD),) * 3, {"backend": "cuda"}, "hopper, blackwell, portable, reference, got 'cuda'"),
}


NAN, INF = float("nan"), float("inf")
WRONG_SCALARS = {
    "softcap": [None, "1", True, NAN, INF, 1e-40, 1e39, 1e6, [1.0], torch.ones(2), torch.ones((), requires_grad=True)],
    "softmax_scale": ["x", 1j, True, 10**400, 1e-320, 1e39, -1, INF, torch.ones(2), torch.ones((), requires_grad=True)],
    "window_size": ["ab", (NAN, 0), (INF, 0), (1.5, 2), 3, None, (1, 2, 3), (True, 0), torch.tensor([1.0, 2.0]),
                    (-5, 2), (2, -2)],
    "causal": ["no", None, 1, torch.tensor([True, False])],
    "deterministic": ["no", None],
    "backend": [None, ["portable"], "", "cuda"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, values in WRONG_SCALARS.items() for v in values], ids=lambda x: repr(x)[:24]
)
@pytest.mark.parametrize("wants_gradient", [False, True])  # by the op and beside it
def test_wrong_scalars(name, value, wants_gradient):
    q = x(*GOOD).requires_grad_(wants_gradient)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    pattern = f"{name}.*"
    with pytest.raises(InvalidInputError, match=pattern):
        flash_attn_func(q, q, q, **{name: value})
    with pytest.raises(InvalidInputError, match=pattern):
        explain(q, q, q, **{name: value})
    with pytest.raises(InvalidInputError, match=pattern):
        flash_attn_varlen_func(q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, **{name: value})
    if name != "deterministic":
        with pytest.raises(InvalidInputError, match=pattern):
            y = q.detach().transpose(1, 2)
            flash_attention_3_backward(y, y, y, y, y, **{name: value})
    if name not in ("deterministic", "backend"):
        with pytest.raises(InvalidInputError, match=pattern):
            fp8_attention(q.detach(), q.detach(), q.detach(), layout="bshd", **{name: value})


@pytest.mark.parametrize("name", ["return_lse", "return_attn_probs", "validate"])
def test_flags_are_true_or_false(name):
    q, cu = x(*GOOD), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(InvalidInputError, match=f"{name} must be True or False"):
        flash_attn_varlen_func(q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, **{name: "x"})
    if name != "validate":
        with pytest.raises(InvalidInputError, match=f"{name} must be True or False"):
            flash_attn_func(q, q, q, **{name: "x"})
    if name == "return_lse":
        with pytest.raises(InvalidInputError, match=f"{name} must be True or False"):
            fp8_attention(q, q, q, backend="reference", **{name: "x"})


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("name", "value"), [("sinks", NAN), ("sinks", INF), ("alibi_slopes", NAN),
                                             ("alibi_slopes", INF)])  # fmt: skip
def test_biases_that_would_make_rows_nan(name, value, requires_grad):
    q, cu = x(*GOOD).requires_grad_(requires_grad), torch.tensor([0, 5], dtype=torch.int32)
    bias = torch.tensor([0.5, value, 0.0, 1.0], requires_grad=requires_grad and name == "sinks")
    with pytest.raises(InvalidInputError, match=f"{name} must be finite"):
        flash_attn_func(q, q, q, **{name: bias})
    with pytest.raises(InvalidInputError, match=f"{name} must be finite"):
        flash_attn_varlen_func(q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, **{name: bias})


def test_a_sink_of_minus_infinity_is_none():
    q = torch.randn(GOOD)
    torch.testing.assert_close(flash_attn_func(q, q, q, sinks=torch.full((4,), -INF)), flash_attn_func(q, q, q))


def test_numbers_of_other_kinds_are_taken():
    np = pytest.importorskip("numpy")
    torch.manual_seed(0)
    q = torch.randn(GOOD)
    expected = flash_attn_func(q, q, q, softmax_scale=0.5, softcap=2.0, window_size=(2, 1), causal=True)
    for number, integer, flag in ((np.float32, np.int64, np.bool_), (torch.tensor, torch.tensor, bool)):
        got = flash_attn_func(q, q, q, softmax_scale=number(0.5), softcap=number(2.0), causal=flag(True),
                              window_size=(integer(2), integer(1)))  # fmt: skip
        assert torch.equal(got, expected)


@pytest.mark.parametrize("seed", [1.5, "a", None, True, 2**80, -(2**70)])
@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_wrong_seeds(seed, backend):
    q = x(1, 2, 4, 16)
    for call in (hadamard_transform, fp8_block_quantize):
        with pytest.raises(InvalidInputError, match="seed must be an integer"):
            call(q, seed=seed, backend=backend)
    for call in (fp8_attention, fp8_error_report):
        with pytest.raises(InvalidInputError, match="seed must be an integer"):
            call(q, q, q, seed=seed)


def test_wrong_blocks():
    q = x(1, 2, 4, 16)
    q8, scale = fp8_block_quantize(q)
    for wrong in (0, True, 1.5, "a"):
        with pytest.raises(InvalidInputError, match="block_size must be"):
            fp8_block_quantize(q, wrong)
        with pytest.raises(InvalidInputError, match="block_size must be"):
            fp8_error_report(q, q, q, block_size=wrong)
        for name in ("q_block", "k_block"):
            with pytest.raises(InvalidInputError, match=f"{name} must be"):
                fp8_attention_quantized(q8, q8, q8, scale, scale, scale, **{name: wrong})
    for name in ("q_scale", "k_scale", "v_scale"):
        scales = dict(q_scale=scale, k_scale=scale, v_scale=scale) | {name: 1.0}
        with pytest.raises(InvalidInputError, match=f"{name} must be"):
            fp8_attention_quantized(q8, q8, q8, **scales)
    with pytest.raises(InvalidInputError, match="v_transposed must be"):
        fp8_attention_quantized(q8, q8, q8, scale, scale, scale, v_transposed=torch.zeros(2))
    with pytest.raises(InvalidInputError, match="no key"):
        fp8_error_report(q, q[:, :, :0], q[:, :, :0])


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_sparse_and_nested_tensors():
    q = x(*GOOD)
    ragged = torch.nested.nested_tensor([torch.randn(3, 2, 16), torch.randn(4, 2, 16)], layout=torch.jagged)
    old = torch.nested.nested_tensor([torch.randn(3, 2, 16), torch.randn(4, 2, 16)])
    turned = torch._neg_view(q)  # as a conjugate's .imag is: kernels would see the other sign
    for odd, words in (
        (q.to_sparse(), "layout torch.sparse_coo"), (ragged, "nested"), (old, "nested"), (turned, "resolve_neg"),
    ):  # fmt: skip
        for call in (flash_attn_func, explain, fp8_attention, FlashAttention3("bf16"), FlashAttention3("fp8")):
            with pytest.raises(UnsupportedError, match=words):
                call(odd, odd, odd)
        for call in (hadamard_transform, fp8_block_quantize, blockwise_softmax):
            with pytest.raises(UnsupportedError, match=words):
                call(odd)


def test_module_arguments():
    for arguments, message in (
        ({"precision": ["fp8"]}, "precision must be"),
        ({"precision": None}, "precision must be"),
        ({"layout": ["bhsd"]}, "layout must be"),
        ({"hardware": 3}, "hardware must be"),
        ({"backend": "nope"}, "backend must be .* got 'nope'"),
        ({"softmax_scale": -1}, "softmax_scale must be positive"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            FlashAttention3(**arguments)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_modules_do_not_cast_away_a_mistake(precision):
    attention, q = FlashAttention3(precision, layout="bshd"), x(*GOOD)
    fp8 = q.to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="float8 tensors carry no scales"):
        attention(fp8, fp8, fp8)
    with pytest.raises(InvalidInputError, match="one dtype, got q torch.float32 and k torch.float16"):
        attention(q, q.half(), q)
    with pytest.raises(InvalidInputError, match="one dtype"):
        attention(q, q, fp8)
    assert attention(q.double(), q.double(), q.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):  # where layers before this one disagree, as rotary embeddings do
        assert attention(q, q.bfloat16(), q).shape == q.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_lse_of_a_backward_has_the_dtype_of_a_forward(dtype):
    q = torch.randn(1, 2, 5, 16).to(dtype)
    o, lse = (
        t.transpose(1, 2) if t.dim() == 4 else t
        for t in flash_attn_func(*[q.transpose(1, 2)] * 3, causal=True, return_lse=True)
    )
    flash_attention_3_backward(o, q, q, q, o, lse)
    right = torch.float64 if dtype == torch.float64 else torch.float32
    for wrong in {torch.bfloat16, torch.int32, torch.float32, torch.float64} - {right}:
        with pytest.raises(InvalidInputError, match=f"lse must be {str(right)[6:]} .* got {wrong}"):
            flash_attention_3_backward(o, q, q, q, o, lse.to(wrong))
    with pytest.raises(InvalidInputError, match="lse must be a torch.Tensor or None, got list"):
        flash_attention_3_backward(o, q, q, q, o, [1])


def test_explain_agrees_with_the_call():
    q, cu = x(*GOOD), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="cu_seqlens_k was given without cu_seqlens_q"):
        explain(q, q, q, cu_seqlens_k=cu)
    with pytest.raises(InvalidInputError, match="cu_seqlens_q was given without cu_seqlens_k"):
        explain(q[0], q[0], q[0], cu_seqlens_q=cu)
    meta = q.to("meta")
    o, lse = flash_attn_func(meta, meta, meta, return_lse=True)
    assert o.is_meta and o.shape == meta.shape and lse.shape == (2, 4, 5)
    assert explain(meta, meta, meta).backend == "none" and "meta" in str(explain(meta, meta, meta))
    packed = flash_attn_varlen_func(meta[0], meta[0], meta[0], cu_seqlens_q=cu.to("meta"), cu_seqlens_k=cu.to("meta"))
    assert packed.is_meta
    assert explain(meta[0], meta[0], meta[0], cu_seqlens_q=cu.to("meta"), cu_seqlens_k=cu.to("meta")).backend == "none"


def test_explain_takes_all_that_the_calls_take():
    def keywords(function):
        return {name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}

    assert keywords(explain) == keywords(flash_attn_func) | keywords(flash_attn_varlen_func)
    q, cu, used = x(*GOOD), torch.tensor([0, 5], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    packed = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, max_seqlen_k=5, seqused_k=used, return_lse=True)
    assert explain(q[0], q[0], q[0], **packed, validate=True).problem.varlen
    for wrong in (dict(max_seqlen_q=4), dict(seqused_k=used + 3), dict(return_lse=2)):
        with pytest.raises(InvalidInputError) as of_call:
            flash_attn_varlen_func(q[0], q[0], q[0], **(packed | wrong))
        with pytest.raises(InvalidInputError) as of_explain:
            explain(q[0], q[0], q[0], **(packed | wrong))
        assert str(of_call.value) == str(of_explain.value)
    with pytest.raises(InvalidInputError, match="seqused_k is for packed sequences"):
        explain(q, q, q, seqused_k=used)


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
    "used-list": ({"seqused_k": [1]}, r"seqused_k must be an int32 tensor of shape \(1,\), got list"),
    "longest-word": ({"max_seqlen_q": "a"}, "max_seqlen_q must be an integer, .* got 'a'"),
    "longest-fraction": ({"max_seqlen_k": 5.5}, "max_seqlen_k must be an integer, .* got 5.5"),
    "longest-negative": ({"max_seqlen_k": -5}, "max_seqlen_k must be an integer, not negative"),
    "longest-of-two": ({"max_seqlen_k": torch.tensor([5, 5])}, "max_seqlen_k must be an integer"),
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
