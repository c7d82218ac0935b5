"""The experiments about low-precision numbers: grids, bytes, judges that can fail, inputs."""

from __future__ import annotations

import importlib

import pytest
import torch

from gpu_accel.errors import UnsupportedError
from gpu_accel.testing import generator
from gpu_accel.transformer_engine import quantizer
from gpu_accel.workbench import runner
from gpu_accel.workbench.experiment import Settings
from gpu_accel.workbench.registry import paper

TE = paper("te")
GPU, CPU = Settings(device="cuda"), Settings(device="cpu")
TE.experiment("quantize")  # imports the folder as a package
errors, inputs, products, quantizing = (
    importlib.import_module(f"{TE._package()}.{name}") for name in ("errors", "inputs", "products", "quantizing")
)


def case(scheme: str, copies: str = "rows", m: int = 40, k: int = 96) -> dict:
    return {"scheme": scheme, "copies": copies, "m": m, "k": k, "n": 1, "dtype": "bf16", "input": "normal"}


@pytest.mark.parametrize(
    ("scheme", "copies", "per_value"),
    [("fp8", "rows", 3.0), ("fp8", "both", 4.0), ("mxfp8", "rows", 3 + 1 / 32), ("nvfp4", "rows", 2.5 + 1 / 16),
     ("fp8_1x128", "both", 4 + 2 * 4 / 128), ("fp8_128x128", "rows", 3 + 4 / 128**2)],
)  # fmt: skip
def test_bytes_of_a_case(scheme, copies, per_value):
    moved = quantizing.bytes_moved(case(scheme, copies, 8192, 8192))
    assert moved / 8192**2 == pytest.approx(per_value, rel=1e-6)


def test_quick_grids_are_part_of_the_whole():
    for name in ("quantize", "gemm", "error"):
        whole, quick = (
            TE.experiment(name).cases(Settings(device="cuda", precision="fp8", quick=q)) for q in (False, True)
        )
        assert all(one in whole for one in quick) and len(quick) <= len(whole)


@pytest.mark.parametrize("scheme", ["fp8-delayed", "mxfp8", "int8_row"])
def test_the_judge_of_quantisers_sees_one_wrong_byte(scheme, monkeypatch):
    work = quantizing.build(case(scheme, "both"), CPU)
    portable = next(one for one in work.implementations if one.name == "portable")
    assert portable.check(0).ok

    def spoiled(x, what, **options):
        q = quantizer.quantize(x, what, **options)
        q.col_codes.view(torch.uint8)[3, 1] ^= 1
        return q

    monkeypatch.setattr(quantizing, "quantize", spoiled)
    assert portable.check(0).error == 1.0 and not portable.check(0).ok


@pytest.mark.parametrize("name", ["fp8", "fp8_row", "fp8_1x128", "fp8_128x128", "mxfp8", "int8_row"])
def test_plain_torch_is_the_same_quantisation(name):
    """The rival does the same work: its values are those of the reference, up to ties."""
    what = quantizer.find_scheme(name)
    x = torch.randn(40, 200, generator=generator(0)).bfloat16()
    ours = quantizer.quantize(x, what, backend="reference").dequantize(torch.float32)
    apart = (quantizing.torch_values(x, what, None) - ours).abs() > 1e-6 * ours.abs().clamp_min(1e-3)
    assert apart.float().mean() < 0.01


def test_products_are_judged_against_float64():
    one = {"scales": "row", "m": 24, "n": 40, "k": 64, "dtype": "e4m3", "input": "normal"}
    work = products.build(one, CPU)
    for name in ("portable", "bf16"):
        assert next(i for i in work.implementations if i.name == name).check(1).ok


def test_errors_are_ordered_and_bounded():
    one = {"operand": "drawn", "m": 32, "n": 32, "k": 128, "dtype": "bf16", "input": "outliers"}
    work = errors.build(one, CPU)
    found = {i.name: i.values(0)["rel_error"][0] for i in work.implementations}
    assert found["mxfp8"] < found["mxfp6_e3m2"] < found["mxfp4"]
    assert found["nvfp4"] < found["mxfp4"]
    assert all(i.check(0).ok for i in work.implementations)


def test_the_error_experiment_runs_whole():
    settings = Settings(device="cpu", precision="fp8", input="outliers", only=("mxfp8", "nvfp4"))
    result = runner.run(TE, ["error"], settings)
    assert {r.metric for r in result.records} >= {"rel_error", "weight_rel_error", "product_rel_error", "sqnr"}
    assert all(r.kind == "checked" for r in result.records)


def test_a_missing_model_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("GPU_ACCEL_CACHE", str(tmp_path))
    monkeypatch.setattr(inputs._capture(), "_no_model", lambda: "transformers is not installed")
    one = {"operand": "q_proj", "m": 128, "n": 576, "k": 576, "dtype": "bf16", "input": "smollm2"}
    with pytest.raises(UnsupportedError, match="transformers"):
        errors.build(one, CPU)


def test_model_inputs_come_from_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("GPU_ACCEL_CACHE", str(tmp_path))
    content = {}
    for name, (n, k) in inputs.MODULES.items():
        content[f"{name}.input"] = torch.randn(inputs.TOKENS, k).bfloat16()
        content[f"{name}.weight"] = torch.randn(n, k).bfloat16()
    torch.save(content, inputs.cache_file())
    inputs._taken.cache_clear()
    one = {"operand": "down_proj", "m": 128, "n": 576, "k": 1536, "dtype": "bf16", "input": "smollm2"}
    x, w = inputs.make(one, 0, "cpu")
    assert torch.equal(x, content["down_proj.input"][:128]) and w.shape == (576, 1536)
    with pytest.raises(UnsupportedError, match="down_proj"):
        inputs.make({**one, "k": 576}, 0, "cpu")
    inputs._taken.cache_clear()
