"""What kernels would read as somebody else's memory, or as another number, is refused before they run."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gpu_accel.thunderkittens as tk
from gpu_accel.errors import InvalidInputError, UnsupportedError
from tests.thunderkittens.helpers import randn

Q = torch.ones(1, 12, 2, 16)
ONES = torch.ones(1, 12, 2)
INF, NAN = float("inf"), float("nan")
HUGE = 10**5000  # beyond float64, and longer than Python writes out


def packed(*ends: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ends, dtype=dtype)


PACKED = {
    "linear": lambda cu: tk.chunk_linear_attn(Q, Q, Q, cu_seqlens=cu),
    "gla": lambda cu: tk.chunk_simple_gla(Q, Q, Q, cu_seqlens=cu, backend="portable"),
    "gla-of-keys": lambda cu: tk.chunk_gla(Q, Q, Q, -Q, cu_seqlens=cu, backend="portable"),
    "retention": lambda cu: tk.chunk_retention(Q, Q, Q, cu_seqlens=cu),
    "delta": lambda cu: tk.chunk_delta_rule(Q, Q, Q, ONES, cu_seqlens=cu, backend="portable"),
    "based": lambda cu: tk.fused_chunk_based(Q, Q, Q, cu_seqlens=cu),
}


@pytest.mark.parametrize("call", PACKED.values(), ids=PACKED)
def test_offsets_that_leave_the_rows(call):
    for ends, message in [
        ((0, 8, 40), "only 12 rows"), ((0, -4, 12), "not decrease"), ((0, 8, 4, 12), "not decrease"),
        ((2, 12), "start with 0"),
    ]:  # fmt: skip
        with pytest.raises(InvalidInputError, match=message):
            call(packed(*ends))
    for wrong in (packed(0, 12).bool(), packed(0, 12).float(), [0, 12], packed(0, 12).to("meta"), packed(0, 12)[None]):
        with pytest.raises(InvalidInputError, match="cu_seqlens"):
            call(wrong)


def test_offsets_of_another_stride(device):
    q, k, v = (randn(1, 12, 2, 16, seed=n, device=device) for n in range(3))
    beta = randn(1, 12, 2, seed=4, device=device).sigmoid()
    cu = torch.tensor([[0, 99], [5, 99], [12, 99]], dtype=torch.int32, device=device)[:, 0]
    for call in (
        lambda cu: tk.chunk_simple_gla(q, k, v, -beta, cu_seqlens=cu, output_final_state=True, backend="portable"),
        lambda cu: tk.chunk_gla(q, k, v, -k.square(), cu_seqlens=cu, output_final_state=True, backend="portable"),
        lambda cu: tk.chunk_gated_delta_rule(
            q, k, v, -beta, beta, cu_seqlens=cu, output_final_state=True, backend="portable"
        ),
    ):
        for one, other in zip(call(cu), call(cu.contiguous()), strict=True):
            assert torch.equal(one, other)


WRONG = {
    "list": lambda: tk.chunk_simple_gla(Q.tolist(), Q, Q),
    "none": lambda: tk.chunk_linear_attn(Q, None, Q),
    "scalar-q": lambda: tk.chunk_linear_attn(torch.ones(()), Q, Q),
    "vector-v": lambda: tk.chunk_retention(Q, Q, torch.ones(3)),
    "integer-g": lambda: tk.chunk_simple_gla(Q, Q, Q, ONES.int()),
    "integer-g-of-keys": lambda: tk.chunk_gla(Q, Q, Q, -Q.int()),
    "g-of-keys-elsewhere": lambda: tk.chunk_gla(Q, Q, Q, Q.to("meta")),
    "g-elsewhere": lambda: tk.chunk_simple_gla(Q, Q, Q, ONES.to("meta")),
    "boolean-beta": lambda: tk.chunk_delta_rule(Q, Q, Q, ONES.bool()),
    "no-beta": lambda: tk.delta_rule(Q, Q, Q, None),
    "integer-state": lambda: tk.chunk_simple_gla(Q, Q, Q, initial_state=torch.ones(1, 2, 16, 16, dtype=torch.int32)),
    "scale-nan": lambda: tk.chunk_simple_gla(Q, Q, Q, scale=float("nan")),
    "scale-text": lambda: tk.chunk_delta_rule(Q, Q, Q, ONES, scale="1"),
    "based-list": lambda: tk.fused_chunk_based([1.0], Q, Q),
    "mamba-list": lambda: tk.mamba_chunk_scan_combined([1.0], ONES, torch.ones(2), Q, Q, 64),
    "mamba-elsewhere": lambda: tk.mamba_chunk_scan_combined(Q, ONES, torch.ones(2).to("meta"), Q, Q, 64),
}  # fmt: skip


NUMBERS = {
    "chunk": (lambda x: tk.linear_attention(Q, Q, Q, chunk=x), (16.0, "16", None, torch.ones(2), HUGE)),
    "segments": (lambda x: tk.linear_attention(Q, Q, Q, segments=x, backend="portable"),
                 (-1, "x", None, 1.5, True, 1 << 40, HUGE)),
    "heads-of-decay": (tk.retention_decay, (-1, "x", None, 1.5, True, HUGE)),
    "device-of-decay": (lambda x: tk.retention_decay(2, x), ("foo", "", None, 1.5, ["cpu"])),
    "steps": (tk.pingpong_schedule, (-1, "x", None, 1.5, HUGE)),
    "window-of-based": (lambda x: tk.fused_chunk_based(Q, Q, Q, window=x), ("x", 0, 1.5, HUGE)),
    "seed": (lambda x: tk.rms_norm(Q, dropout_p=0.5, seed=x), ("x", 1.5, HUGE)),
    "ignore_index": (lambda x: tk.cross_entropy(Q[0, 0], torch.zeros(2).long(), ignore_index=x), ("x", 1.5, HUGE)),
    "softcap": (lambda x: tk.cross_entropy(Q[0, 0], torch.zeros(2).long(), softcap=x), ("x", -1.0, Fraction(HUGE))),
    "scale": (lambda x: tk.linear_attention(Q, Q, Q, scale=x), ("x", NAN, HUGE, -HUGE, Fraction(HUGE))),
    "scale-of-gla": (lambda x: tk.gated_linear_attention(Q, Q, Q, -Q, scale=x), ("x", INF, HUGE)),
    "scale-of-based": (lambda x: tk.fused_chunk_based(Q, Q, Q, x), ("x", INF, HUGE)),
    "activation": (lambda x: tk.gemm(Q[0, :, 0], Q[0, :, 0].T, activation=x), (["relu"], {}, None, 1, "tanh")),
    "chunk_size": (lambda x: mamba(chunk_size=x), ("64", None, 16.0, 48, -HUGE, torch.ones(2))),
    "dt_limit": (lambda x: mamba(dt_limit=x),
                 (None, 0.5, "ab", (0, 1, 2), (0,), (1, 0), (NAN, 1), (0, NAN), (0, "x"), (INF, INF), (0, HUGE))),
}  # fmt: skip


def mamba(chunk_size=64, **options):
    return tk.mamba_chunk_scan_combined(Q, ONES, -torch.ones(2), Q, Q, chunk_size, **options)


@pytest.mark.parametrize(("call", "values"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_make_no_sense(call, values):
    for x in values:
        with pytest.raises(InvalidInputError):
            call(x)


def test_one_walk_is_not_promised_where_there_are_no_kernels():
    with pytest.raises(UnsupportedError, match="fused=True: backend 'reference' is not by kernels here"):
        tk.linear_attention(Q, Q, Q, fused=True, backend="reference")


def test_limits_of_dt_may_be_infinite():
    assert torch.equal(mamba(dt_limit=[-INF, INF]), mamba())
    assert not torch.equal(mamba(dt_limit=(-INF, 0.5)), mamba())


FLAGS = {
    "fused": lambda x: tk.linear_attention(Q, Q, Q, fused=x, backend="portable"),
    "normalize": lambda x: tk.chunk_linear_attn(Q, Q, Q, normalize=x),
    "state-of-linear": lambda x: tk.chunk_linear_attn(Q, Q, Q, output_final_state=x),
    "state-of-gla": lambda x: tk.chunk_simple_gla(Q, Q, Q, output_final_state=x),
    "state-of-gla-of-keys": lambda x: tk.chunk_gla(Q, Q, Q, -Q, output_final_state=x),
    "state-of-delta": lambda x: tk.chunk_delta_rule(Q, Q, Q, ONES, output_final_state=x),
    "unit-length": lambda x: tk.chunk_delta_rule(Q, Q, Q, ONES, use_qk_l2norm_in_kernel=x),
    "use_norm": lambda x: tk.fused_chunk_based(*(Q.bfloat16(),) * 3, use_norm=x, backend="portable"),
    "softplus": lambda x: mamba(dt_softplus=x),
    "state-of-mamba": lambda x: mamba(return_final_states=x),
    "v-first-of-gla": lambda x: tk.chunk_simple_gla(Q, Q, Q, state_v_first=x),
    "v-first-of-gla-of-keys": lambda x: tk.chunk_gla(Q, Q, Q, -Q, state_v_first=x),
    "v-first-of-retention": lambda x: tk.chunk_retention(Q, Q, Q, state_v_first=x),
    "sigmoid-of-delta": lambda x: tk.chunk_gated_delta_rule(Q, Q, Q, -ONES, ONES, use_beta_sigmoid_in_kernel=x),
    "state-of-conv": lambda x: tk.causal_conv1d_fn(Q[0], torch.ones(12, 4), return_final_states=x),
    "prenorm": lambda x: tk.rms_norm(Q, prenorm=x),
    "interleaved": lambda x: tk.rotary(Q, torch.ones(12, 8), torch.ones(12, 8), interleaved=x, backend="portable"),
}


@pytest.mark.parametrize("call", FLAGS.values(), ids=FLAGS)
def test_flags_are_true_or_false(call):
    for x in ("x", 2, torch.ones(2)):
        with pytest.raises(InvalidInputError, match="must be True or False"):
            call(x)


NO_HEADS = {
    "gla": lambda q, g, backend: tk.chunk_simple_gla(q, q, q, g, output_final_state=True, backend=backend),
    "gla-of-keys": lambda q, g, backend: tk.chunk_gla(q, q, q, q, output_final_state=True, backend=backend),
    "packed": lambda q, g, backend: tk.chunk_simple_gla(
        q, q, q, g, output_final_state=True, cu_seqlens=torch.tensor([0, 12]), backend=backend
    ),
    "linear": lambda q, g, backend: tk.chunk_linear_attn(q, q, q, output_final_state=True, backend=backend),
    "retention": lambda q, g, backend: tk.chunk_retention(q, q, q, output_final_state=True, backend=backend),
    "delta": lambda q, g, backend: tk.chunk_delta_rule(q, q, q, g, output_final_state=True, backend=backend),
    "based": lambda q, g, backend: tk.fused_chunk_based(q, q, q, backend=backend),
    "hedgehog": lambda q, g, backend: tk.hedgehog_attention(q, q, q, *(torch.ones(0, 16, 8),) * 2, backend=backend),
    "mamba": lambda q, g, backend: tk.mamba_chunk_scan_combined(
        q, g, torch.ones(0), q, q, 64, return_final_states=True, backend=backend
    ),
}


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize("call", NO_HEADS.values(), ids=NO_HEADS)
def test_no_heads_give_empty_results(call, backend):
    """As a rank of tensor parallelism that has none of the heads; gradients are empty too."""
    q, g = (x[:, :, :0].clone().requires_grad_() for x in (Q, ONES))
    found = call(q, g, backend)
    o, state = found if isinstance(found, tuple) else (found, None)
    assert o.shape == (1, 12, 0, 16)
    assert state is None or state.shape == (1, 0, 16, 16)
    o.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_wrong_kinds_dtypes_and_devices(call):
    with pytest.raises(InvalidInputError):
        call()


def convolved(*tensors):
    return tk.FlashFFTConv(256, dtype=torch.float32)(*tensors)


W = torch.ones(16, 16)
# a call, and which tensors it takes
TENSORS = {
    "gemm": (lambda a, b, bias: tk.gemm(a, b, bias=bias), (W, W, W[0])),
    "scales": (lambda x, y: tk.gemm(*(W.to(torch.float8_e4m3fn),) * 2, scale_a=x, scale_b=y), (W[0], W[0])),
    "explain": (tk.explain_gemm, (W, W)),
    "ladder": (tk.warp_specialized_gemm, (W.half(), W.half())),
    "linear": (lambda q, k, v, g: tk.linear_attention(q, k, v, g=g), (Q, Q, Q, ONES)),
    "gla-of-keys": (tk.chunk_gla, (Q, Q, Q, Q)),
    "retention": (tk.chunk_retention, (Q, Q, Q)),
    "decays": (lambda q, k, v, d: tk.chunk_simple_gla(q, k, v, None, d), (Q, Q, Q, ONES[0, 0])),
    "delta": (tk.chunk_delta_rule, (Q, Q, Q, ONES)),
    "gated-delta": (tk.chunk_gated_delta_rule, (Q, Q, Q, ONES, ONES)),
    "based": (tk.fused_chunk_based, (Q, Q, Q)),
    "hedgehog": (tk.hedgehog_attention, (Q, Q, Q, torch.ones(2, 16, 8), torch.ones(2, 16, 8))),
    "mamba": (lambda *x: tk.mamba_chunk_scan_combined(*x, 64), (Q, ONES, ONES[0, 0], Q, Q)),
    "conv": (tk.causal_conv1d_fn, (Q[0], torch.ones(12, 4))),
    "conv-update": (tk.causal_conv1d_update, (W, W[:, :3], W[:, :4])),
    "long-conv": (convolved, (torch.ones(1, 2, 8), torch.ones(2, 8))),
    "rms_norm": (tk.rms_norm, (W, W[0])),
    "layer_norm": (tk.layer_norm, (W, W[0], W[0])),
    "softmax": (tk.softmax, (W,)),
    "rotary": (tk.rotary, (Q, torch.ones(12, 8), torch.ones(12, 8))),
    "silu_mul": (tk.silu_mul, (W, W)),
    "gelu_mul": (tk.gelu_mul, (W, W)),
    "cross_entropy": (tk.cross_entropy, (W, torch.zeros(16).long())),
    "linear_cross_entropy": (tk.fused_linear_cross_entropy, (W, W, torch.zeros(16).long())),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("call", "tensors"), TENSORS.values(), ids=TENSORS)
def test_sparse_and_nested_tensors_are_refused(call, tensors):
    for at, x in enumerate(tensors):
        nested = torch.nested.nested_tensor(list(x) if x.dim() > 1 else [x], dtype=x.dtype)
        for odd in (x.to_sparse(), nested):
            with pytest.raises(UnsupportedError, match="layout|nested"):
                call(*tensors[:at], odd, *tensors[at + 1 :])


def test_values_of_fake_tensors_are_not_read():
    with FakeTensorMode():
        q, y = torch.ones(1, 12, 2, 16), torch.zeros(12, dtype=torch.int64)
        assert tk.chunk_simple_gla(q, q, q, cu_seqlens=y[:3], backend="portable")[0].shape == q.shape
        assert tk.cross_entropy(q[0, :, 0], y, backend="portable").shape == ()


SEQUENCES = {
    "linear": lambda q, b, **kw: tk.linear_attention(q, q, q, g=-b, **kw)[0],
    "normalised": lambda q, b, **kw: tk.chunk_linear_attn(q, q, q, **kw)[0],
    "gla": lambda q, b, **kw: tk.chunk_gla(q, q, q, -q.square(), **kw)[0],
    "delta": lambda q, b, **kw: tk.chunk_gated_delta_rule(q, q, q, -b, b, None, None, False, True, **kw)[0],
    "based": lambda q, b, **kw: tk.fused_chunk_based(q, q, q, **kw),
    "based-window": lambda q, b, **kw: tk.fused_chunk_based(q, q, q, window=4, **kw),
    "hedgehog": lambda q, b, **kw: tk.hedgehog_attention(q, q, q, *(randn(2, 16, 8, seed=3),) * 2, **kw),
    "hedgehog-window": lambda q, b, **kw: tk.hedgehog_attention(
        q, q, q, *(randn(2, 16, 8, seed=3),) * 2, window=4, **kw
    ),
    "mamba": lambda q, b, **kw: tk.mamba_chunk_scan_combined(q, b, -torch.ones(2), q, q, 16, **kw),
}


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize("call", SEQUENCES.values(), ids=SEQUENCES)
def test_autocast_changes_nothing(call, backend):
    """Kernels compute as the docstrings say whatever autocast is on; so does plain torch, and dtypes are those of v."""
    q, b = randn(1, 12, 2, 16, seed=1), randn(1, 12, 2, seed=2).sigmoid()
    plain = call(q, b, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = call(q, b, backend=backend)
    assert found.dtype == torch.float32 and torch.equal(found, plain)


@pytest.mark.parametrize("packed_ends", [None, (0,), (0, 0)], ids=["no-steps", "no-sequences", "empty-sequence"])
@pytest.mark.parametrize(
    "call", [SEQUENCES["linear"], SEQUENCES["gla"], SEQUENCES["delta"]], ids=["linear", "gla", "delta"]
)
def test_gradients_of_no_steps_are_zeros(call, packed_ends):
    """By plain torch too, so that a step of training on nothing is a step."""
    steps = 0 if packed_ends is None else 3
    q, b = randn(1, steps, 2, 16, seed=1).requires_grad_(), torch.ones(1, steps, 2, requires_grad=True)
    cu = None if packed_ends is None else packed(*packed_ends)
    call(q, b, cu_seqlens=cu, backend="reference").sum().backward()
    assert q.grad.shape == q.shape and not q.grad.any()


def test_products_under_autocast_are_of_their_own_dtype():
    a, b = randn(5, 70, seed=1), randn(70, 4, seed=2)
    plain = tk.gemm(a, b, backend="reference")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tk.gemm(a, b, backend="reference"), plain)


SECOND = {
    "linear": lambda x: tk.linear_attention(x, x, x, backend="portable")[0],
    "gla": lambda x: tk.chunk_gla(x, x, x, -x.square(), backend="portable")[0],
    "delta": lambda x: tk.chunk_delta_rule(x, x, x, ONES, backend="portable")[0],
    "norm": lambda x: tk.rms_norm(x, x[0, 0, 0], backend="portable"),
    "softmax": lambda x: tk.softmax(x, backend="portable"),
    "silu": lambda x: tk.silu_mul(x, x, backend="portable"),
    "conv": lambda x: tk.causal_conv1d_fn(x[0], torch.ones(2, 2), backend="portable"),
    "window": lambda x: tk.fused_chunk_based(x, x, x, window=4, backend="portable"),
}


@pytest.mark.parametrize("call", SECOND.values(), ids=[*SECOND])
def test_gradients_of_gradients_are_refused_in_words(call):
    x = randn(1, 12, 2, 16, seed=1).requires_grad_()
    (first,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="first gradients only"):
        first.sum().backward()


@pytest.mark.parametrize("name", ["linear", "gla", "delta", "based", "mamba"])
def test_compiled_for_any_size(name):
    """In bfloat16 the kernels are chosen by K, which is no number to a compiler of any size."""
    torch._dynamo.reset()
    call = torch.compile(SEQUENCES[name], backend="aot_eager", fullgraph=True, dynamic=True)
    for steps in (12, 20):
        given = [randn(1, steps, 2, 16, seed=1).bfloat16(), randn(1, steps, 2, seed=2).sigmoid()]
        assert torch.equal(call(*given, backend="portable"), SEQUENCES[name](*given, backend="portable"))
