"""The experiments about low-precision numbers: grids, bytes, judges that can fail, inputs."""

from __future__ import annotations

import contextlib
import gc
import importlib
import weakref

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
errors, inputs, layers, perplexity, products, quantizing, training = (
    importlib.import_module(f"{TE._package()}.{name}")
    for name in ("errors", "inputs", "layers", "perplexity", "products", "quantizing", "training")
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
    for name in ("quantize", "gemm", "error", "linear", "layer"):
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


@pytest.mark.parametrize("which", ["forward", "both"])
def test_layers_are_judged_and_a_wrong_gradient_is_seen(which, monkeypatch):
    for build, one in (
        (layers.build_linear, {"pass": which, "m": 24, "n": 32, "k": 48, "dtype": "bf16", "input": "normal"}),
        (layers.build_layer, {"pass": which, "hidden": 32, "tokens": 6, "dtype": "bf16", "input": "normal"}),
    ):
        work = build(one, CPU)
        by_name = {i.name: i for i in work.implementations}
        for name in ("fp8_delayed", "nvfp4", "bf16"):
            assert by_name[name].check(0).ok, (name, by_name[name].check(0))
            by_name[name].make(0)()
        if which == "forward":
            continue
        with monkeypatch.context() as patch:
            real = layers._run

            def wrong(layer, x, dy, recipe, real=real, **options):
                y = real(layer, x, dy, recipe, **options)
                x.grad = x.grad.roll(1, 0) if x.dim() == 2 else x.grad.roll(1, 1)
                return y

            patch.setattr(layers, "_run", wrong)
            assert not by_name["fp8_delayed"].check(0).ok


def test_rates_are_held_against_the_peak_of_the_products():
    for one in (*layers.list_linear(GPU), *layers.list_layer(GPU)):
        assert one["dtype"] == "e4m3"


def test_a_graph_keeps_what_it_reads(monkeypatch):
    """Replays of a step whose layer had been freed ended in an illegal access."""

    class Nothing:
        def __init__(self, *_):
            self.replays = 0

        def wait_stream(self, _):
            pass

        def replay(self):
            self.replays += 1

    for name in ("Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", Nothing)
    x = torch.ones(3)
    seen, replay = weakref.ref(x), layers.Captured(lambda x=x: x + 1)
    del x
    gc.collect()
    assert replay().tolist() == [2.0, 2.0, 2.0] and replay.graph.replays == 1 and seen() is not None


def test_training_depends_on_its_seed_only():
    """The same seed, the same losses; another seed, others; every recipe changes something and learns."""
    sizes = dict(hidden=16, layers=1, heads=1, batch=2, seqlen=16, steps=8, rate=0.02, input="normal")
    one = training.train(sizes, "bf16", 0, "cpu", "reference")
    assert one == training.train(sizes, "bf16", 0, "cpu", "reference")
    assert one.losses[-1] < one.losses[0] and training.train(sizes, "bf16", 1, "cpu", "reference").kept != one.kept
    assert len(one.losses) == 8 and len(one.kept) == 5
    for name in ("fp8_delayed", "nvfp4"):
        other = training.train(sizes, name, 0, "cpu", "reference").losses
        assert other != one.losses and other[0] == pytest.approx(one.losses[0], rel=0.02) and other[-1] < other[0]
    for kind in ("normal", "python"):
        assert 2.5 < training.frequencies_loss(kind) < 4.0
    assert len(training.text("python")) > 2**21


def test_training_is_judged_by_the_noise_of_its_seeds():
    """Two seeds a run, worked out by hand."""
    base = [training.Curve([4.0, 3.0, 2.0, 1.0, 1.0], [5.0, 4.0, 3.0, 2.0, 2.0]),
            training.Curve([4.2, 3.2, 2.2, 1.2, 1.4], [5.2, 4.2, 3.2, 2.2, 2.2])]  # fmt: skip
    mine = [training.Curve([4.1, 3.1, 2.1, 1.4, 1.2], [5.1, 4.1, 3.1, 2.5, 2.0]),
            training.Curve([4.1, 3.1, 2.1, 1.4, 1.2], [5.1, 4.1, 3.1, 2.5, 2.4])]  # fmt: skip
    found = {key: value for key, (value, _) in training.compared(mine, base).items()}
    wanted = dict(loss=1.2, valid_loss=2.2, gap=0.1, worst_gap=0.2, noise=0.2, gap_in_noise=0.5, worst_gap_in_noise=1.0)
    wanted |= dict(loss_80=1.4, kept_80=2.5, curve_in_noise=0.3 / 0.2, kept_curve_in_noise=0.4 / 0.2)
    wanted |= dict(gap_in_deviation=0.1 / 0.02**0.5, curve_in_deviation=0.3 / 0.02**0.5)
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value), key
    alone = training.compared(mine[:1], base[:1])
    assert "curve_in_noise" not in alone and "gap_in_noise" not in alone


def test_perplexity_leaves_the_model_as_it_was(monkeypatch):
    """On a model of two linear layers: rounding moves the loss, more so in four bits, and is taken back."""

    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.up = torch.nn.Embedding(50, 64), torch.nn.Linear(64, 64)

        def forward(self, ids):
            hidden = self.up(self.embedding(ids))
            return type("Out", (), {"last_hidden_state": hidden})

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.lm_head = Inner(), torch.nn.Linear(64, 50, bias=False)

    torch.manual_seed(0)
    model = Model()
    before = model.model.up
    ids = torch.randint(0, 50, (64,), generator=generator(0))
    monkeypatch.setattr(perplexity, "_model", lambda: (ids, model, "a small one"))
    exact = perplexity.nll("fp32", 2, 32)
    moved = {name: abs(perplexity.nll(name, 2, 32) - exact) for name in ("fp8_delayed", "mxfp8", "mxfp4")}
    assert model.model.up is before and exact == perplexity.nll("fp32", 2, 32)
    assert 0 < moved["mxfp8"] < moved["mxfp4"] and 0 < moved["fp8_delayed"] < moved["mxfp4"]
    with pytest.raises(UnsupportedError, match="64 tokens"):
        perplexity.nll("fp32", 3, 32)
