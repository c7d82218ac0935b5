"""Functions that are named as in other packages take their arguments, by position too."""

from __future__ import annotations

import inspect

import pytest
import torch

import gpu_accel.thunderkittens as tk
from gpu_accel.errors import InvalidInputError
from tests.thunderkittens.helpers import randn

# What calls of fla 0.6.0, mamba_ssm 2.3.2, causal_conv1d and FlashFFTConv give, in their order. Not taken, so that
# they are refused: chunk_indices and cp_context of chunk_gated_delta_rule, and what fla takes beyond its names (**).
THEIRS = {
    "chunk_linear_attn": "q k v scale initial_state output_final_state normalize cu_seqlens",
    "chunk_retention": "q k v scale initial_state output_final_state cu_seqlens",
    "chunk_simple_gla": "q k v g g_gamma scale initial_state output_final_state state_v_first cu_seqlens "
    "cu_seqlens_cpu",
    "chunk_gla": "q k v g scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu",
    "chunk_delta_rule": "q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens "
    "cu_seqlens_cpu",
    "chunk_gated_delta_rule": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel "
    "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu",
    "fused_chunk_based": "q k v scale use_norm",
    "parallel_based": "q k v scale use_norm",
    "mamba_chunk_scan_combined": "x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus "
    "dt_limit return_final_states return_varlen_states",
    "causal_conv1d_fn": "x weight bias seq_idx initial_states return_final_states final_states_out activation",
    "causal_conv1d_update": "x conv_state weight bias activation cache_seqlens conv_state_indices",
    "FlashFFTConv": "seqlen dtype use_32_butterfly",
}


@pytest.mark.parametrize("name", THEIRS)
def test_arguments_have_the_order_of_the_package_they_are_named_after(name):
    parameters = inspect.signature(getattr(tk, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == THEIRS[name].split()


Q, K, V = (randn(1, 20, 2, n, seed=n) for n in (16, 16, 24))
CALLS = {
    "retention": lambda **o: tk.chunk_retention(Q, K, V, **o),
    "simple-gla": lambda **o: tk.chunk_simple_gla(Q, K, V, -K[..., 0].abs(), **o),
    "gla": lambda **o: tk.chunk_gla(Q, K, V, -K.abs(), **o),
    "delta": lambda **o: tk.chunk_delta_rule(Q, K, V, K[..., 0].sigmoid(), use_qk_l2norm_in_kernel=True, **o),
    "gated-delta": lambda **o: tk.chunk_gated_delta_rule(
        Q, K, V, -K[..., 1].abs(), K[..., 0].sigmoid(), use_qk_l2norm_in_kernel=True, **o
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_states_with_values_first(call):
    state = randn(1, 2, 16, 24, seed=5)
    o, last = call(initial_state=state, output_final_state=True)
    same, turned = call(initial_state=state.mT.contiguous(), output_final_state=True, state_v_first=True)
    assert torch.equal(o, same) and torch.equal(last, turned.mT)
    with pytest.raises(InvalidInputError, match="initial_state must be"):
        call(initial_state=state, state_v_first=True)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_copy_of_the_offsets_is_looked_at(call):
    cu = torch.tensor([0, 7, 20])
    assert torch.equal(call(cu_seqlens=cu)[0], call(cu_seqlens=cu, cu_seqlens_cpu=cu)[0])
    for copy, message in [
        (cu[1:], "must be a copy"), ([0, 7, 20], "must be a copy"), (cu.to("meta"), "must be a copy"),
        (torch.tensor([0, 21, 20]), "not decrease"), (torch.tensor([0, 7, 21]), "only 20 rows"),
    ]:  # fmt: skip
        with pytest.raises(InvalidInputError, match=message):
            call(cu_seqlens=cu, cu_seqlens_cpu=copy)
    with pytest.raises(InvalidInputError, match="which is missing"):
        call(cu_seqlens_cpu=cu)


def test_beta_from_logits():
    logits, g = K[..., 0], -K[..., 1].abs()

    def call(beta, **options):
        return tk.chunk_gated_delta_rule(Q, K, V, g, beta, None, None, False, True, **options)[0]

    assert torch.equal(call(logits, use_beta_sigmoid_in_kernel=True), call(logits.sigmoid()))
    doubled = call(logits, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    assert torch.equal(doubled, call(2 * logits.sigmoid()))
    with pytest.raises(InvalidInputError, match="doubles the sigmoid"):
        call(logits.sigmoid(), allow_neg_eigval=True)
