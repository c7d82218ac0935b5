"""Faults that users of other libraries have reported, and the test of each; some are at the end of this file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_accel.testing import generator
from gpu_accel.transformer_engine.context import autocast
from gpu_accel.transformer_engine.gemm import scaled_mm
from gpu_accel.transformer_engine.modules import LayerNormMLP
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.recipes import RECIPES
from gpu_accel.transformer_engine.tensor import QuantizedTensor

# what was reported -> the tests (of this folder, or of tests/gpu with "gpu/")
REPORTS = {
    "ao#4713, kernels-community#681: zeros become NaN": ["test_scales::test_zeros_stay_zeros"],
    "slime PR 2256: a block of zeros beside a value": ["test_scales::test_one_value_among_zeros_is_kept"],
    "Model-Optimizer PR 1397: NVFP4 scales beyond 448": [
        "test_scales::test_a_zero_block_beside_a_tiny_tensor_is_not_nan"
    ],
    "compressed-tensors PR 595: a global scale of Inf": ["test_scales::test_zeros_stay_zeros"],
    "flashinfer#2595: scales of 1e-23": ["test_scales::test_tiny_blocks_do_not_overflow"],
    "TransformerEngine PR 2589: subnormal scales": ["test_scales::test_scales_are_never_subnormal"],
    "TransformerEngine#2407, ao PR 4117: E8M0 codes 0, 254, 255": ["test_formats::test_e8m0_codes_at_the_ends"],
    "TransformerEngine#3550: NaN lost in a maximum": [
        "test_scales::test_nan_anywhere_in_an_mx_block_gives_the_nan_scale"
    ],
    "TransformerEngine: three answers to a maximum of Inf": [
        "test_scales::test_a_maximum_that_tells_nothing_changes_nothing",
        "test_recipes::test_a_step_of_zeros_is_no_news", "test_recipes::test_overflow_is_counted_and_forgotten",
    ],
    "TransformerEngine#1190: scales under checkpointing": ["test_linear::test_checkpointing_changes_nothing"],
    "TransformerEngine PR 3284, 3394, 1723: recomputation, evaluation": [
        "test_linear::test_evaluation_and_recomputation_change_no_history",
        "test_linear::test_checkpoint_keeps_scales_of_a_layer_used_again_in_between",
    ],
    "TransformerEngine#600: scales drift apart over ranks": ["test_modules::test_ranks_agree_on_scales"],
    "TransformerEngine#705, #1241, PR 3053: graph breaks": ["test_linear::test_compiles_to_one_graph"],
    "TransformerEngine#1688, PR 2245: FSDP2, shards with other scales": [
        "test_sharded::test_equal_to_whole_layers", "test_sharded::test_ranks_with_other_batches_use_one_scale",
    ],
    "pytorch#133334: rows that no tile of 256 divides": [
        "gpu/test_transformer_engine::test_rows_that_no_tile_of_256_divides"
    ],
    "pytorch#141749: codes at an odd address": ["test_public_reports::test_codes_at_an_odd_address"],
    "pytorch#191138: compiled and eager contracts differ": ["test_gemm::test_the_op_is_one_that_torch_knows"],
    "pytorch#150859, torchtitan#1056: NaN behind RMSNorm or tensor parallelism": [
        "test_public_reports::test_a_normed_layer_trains_on", "test_parallel::test_layer_over_two_ranks",
    ],
    "ao#1912, ml_dtypes#400: saturating or not": ["test_formats::test_saturation_is_the_callers_choice"],
    "onnx#6220, PR 7784: FNUZ, and E8M0 rounded up": [
        "test_formats::test_saturation_is_the_callers_choice", "test_formats::test_rounding_up_is_not_truncated",
    ],
    "ml_dtypes#298: float32 to E8M0": ["test_formats::test_e8m0_rounds_as_logarithms_say"],
    "tilelang-metax PR 140: the top binade": ["test_formats::test_the_top_binade_of_e4m3_is_exact"],
    "composable_kernel PR 1889 and others: nibbles": ["test_formats::test_the_low_nibble_comes_first"],
    "vllm PR 38148, flashinfer#2861: padding of scales": ["test_scales::test_padding_is_zero_whatever_memory_held"],
    "DeepGEMM#268: few rows of an expert": ["test_gemm_grouped::test_grouped_against_float64"],
    "sglang#39193, vllm PR 53680: scales truncated to powers of two": [
        "test_scales::test_scales_that_are_no_powers_of_two_are_refused"
    ],
    "vllm#23813, TensorRT-LLM PR 16916: caches without scales": ["test_ops::test_cache_errors"],
    "bitsandbytes#1391, #57, PR 1776: reloading, strides, FSDP2": [
        "test_tensor::test_saving_and_loading", "test_quantize::test_strides", "test_sharded::test_states",
    ],
    "TransformerEngine PR 2355, #3281: maxima before rounding, software rounding": [
        "test_sources::test_quantised_on_the_way", "test_formats::test_stochastic_rounding_is_unbiased",
    ],
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_has_a_test(report):
    here = Path(__file__).parent
    for test in REPORTS[report]:
        name, _, function = test.partition("::")
        folder = here.parent if name.startswith("gpu/") else here
        assert f"\ndef {function}(" in (folder / f"{name}.py").read_text(encoding="utf-8"), test


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed))


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_codes_at_an_odd_address(backend, device):
    a, b = (quantize(values(n, 48, seed=n).to(device), "fp8_row", backend="reference") for n in (5, 7))
    memory = torch.full((a.codes.numel() + 1,), 0x7F, dtype=torch.uint8, device=device)
    memory[1:] = a.codes.view(torch.uint8).flatten()
    odd = QuantizedTensor({"codes": memory[1:].view(5, 48).view(a.codes.dtype), "scales": a.scales}, a.scheme, a.shape,
                          a.dtype)  # fmt: skip
    assert odd.codes.data_ptr() % 2
    assert torch.equal(scaled_mm(odd, b, backend=backend), scaled_mm(a, b, backend=backend))


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed"])
def test_a_normed_layer_trains_on(name):
    """Twenty steps on values with outliers: finite, and the loss falls."""
    torch.manual_seed(0)
    layer = LayerNormMLP(32, 48, normalization="RMSNorm", activation="swiglu", backend="reference")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x = values(64, 32)
    x[:, 3] *= 200
    goal, losses = values(64, 32, seed=1), []
    for _ in range(20):
        with autocast(recipe=RECIPES[name]):
            loss = (layer(x) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(torch.isfinite, torch.tensor(losses))) and losses[-1] < 0.95 * losses[0]
