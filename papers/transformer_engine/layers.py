"""The experiments `linear` and `layer`: what quantising is worth in a layer, where activations come in 16 bits.

    linear    y = x W^T with M = N = K, forward, or forward and backward
    layer     a TransformerLayer (RMSNorm, SwiGLU of 4 / 1.5 times the width, heads of 128), 4096 tokens

Activations, weights and gradients are quantised in the timed call, unless the name says `weights-kept` (weights once,
as in inference or in all but the first microbatch). `product` is the product of `linear` alone, on operands quantised
beforehand: its share of the time is what the claims of arXiv:2402.13499 are about. What is emulated (MXFP8 and NVFP4 on
a GPU without units for them) says so in its note: its time tells nothing about the format.

What ends in `-graph` is a CUDA graph of the same step, replayed: small layers are bound by the host otherwise, whose
Python is not what is compared. bf16 has one too.

Every result is compared with float64 (`linear`: y, dx and dW) or with the layer in plain float32 torch (`layer`: what
it adds to x, and to the gradient). The bounds in 2-norms: 8 % for a product in FP8, 25 % in NVFP4 (e4m3 errs 2.6 % of
normal values, e5m2 5.3 %, e2m1 in blocks of 16 about 9 %), 1 % in bf16; for a layer, which has several in a row, twice
that (bf16: three times).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpu_accel.hardware import gemm_flops
from gpu_accel.testing import generator
from gpu_accel.transformer_engine import quantizer
from gpu_accel.transformer_engine.context import autocast
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.linear_op import _product
from gpu_accel.transformer_engine.modules import TransformerLayer
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.recipes import RECIPES, Recipe
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload

from . import inputs

PASSES = ("forward", "both")
EMULATED = ("mxfp8", "nvfp4")
TOKENS = 4096
FASTEST = "e4m3"  # of the products of a case: what its rates are held against; tensors are bf16 all the same
BOUNDS = {"bf16": 0.01, "nvfp4": 0.25}


def _graphs(settings: Settings, names: list[str], step: Callable, judge: Callable, scale: float, base: float) -> list:
    """The recipes, and bf16, as replays of a captured step: what is left when the host is out of the way."""
    if not names:
        return []
    found = [(name, "ours", RECIPES[name], scale * BOUNDS.get(name, 0.08)) for name in names if name in GRAPHS]
    return [
        Implementation(
            name=f"{name}-graph", role=role, note="replay of a CUDA graph", make=step(recipe, True),  # type: ignore[arg-type]
            unavailable="" if settings.on_gpu else "graphs need a GPU",
            check=lambda seed, recipe=recipe, bound=bound: judge(seed, recipe, bound, graph=True),
        )
        for name, role, recipe, bound in (*found, ("bf16", "reference", None, base * BOUNDS["bf16"]))
    ]  # fmt: skip


def list_linear(settings: Settings) -> list[Case]:
    """Square products of the sizes of the claims; on a CPU one small ragged layer."""
    sizes: list[tuple[int, int, int]] = [(48, 64, 80)]
    if settings.on_gpu:
        sizes = [(n, n, n) for n in ((8192,) if settings.quick else (2048, 4096, 8192, 16384))]
    kind = inputs.drawn(settings)
    return [
        {"pass": which, "m": m, "n": n, "k": k, "dtype": FASTEST, "input": kind}
        for m, n, k in sizes
        for which in PASSES
    ]


def list_layer(settings: Settings) -> list[Case]:
    """Widths of the claims, 4096 tokens."""
    widths = [64]
    if settings.on_gpu:
        widths = [4096] if settings.quick else [1024, 2048, 4096, 8192]
    tokens = TOKENS if settings.on_gpu else 12
    return [
        {"pass": which, "hidden": width, "tokens": tokens, "dtype": FASTEST, "input": "normal"}
        for width in widths
        for which in PASSES
    ]


def _data(shape: tuple[int, ...], seed: int, device: str) -> Tensor:
    return torch.randn(shape, generator=generator(seed, device), device=device, dtype=torch.bfloat16)


def _error(out: Tensor, truth: Tensor) -> float:
    return float((out.double() - truth).norm() / truth.norm())


def layer_backend(settings: Settings) -> str:
    """What a user gets once the quantisers have been checked on a GPU, plain kernels until then."""
    if not settings.on_gpu:
        return "reference"
    return "auto" if quantizer.GPU_CHECKED else "portable"


def _note(name: str, settings: Settings) -> str:
    recipe = RECIPES[name]
    emulated = "; emulated in bf16: its time says nothing about the format" if name in EMULATED else ""
    products = {"auto": "products by auto", "portable": "plain Triton products", "reference": "plain torch on a CPU"}
    return f"{type(recipe).__name__}{emulated}; {products[layer_backend(settings)]}"


def _run(layer: nn.Module, x: Tensor, dy: Tensor | None, recipe: Recipe | None, *, kept: bool = False) -> Tensor:
    """One step: forward, and backward where there is a gradient; `kept` weights are those of the step before."""
    if dy is None:
        with torch.no_grad(), autocast(enabled=recipe is not None, recipe=recipe):
            return layer(x, is_first_microbatch=False) if kept else layer(x)
    for p in layer.parameters():
        p.grad = None
    x.grad = None
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    y.backward(dy)
    return y


class Captured:
    """A call as a CUDA graph, and the call with it: a graph does not own what it reads of the time before."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self.call = call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = call()

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.result


GRAPHS = ("fp8_current", "fp8_delayed", "fp8_block")  # recipes that are also timed without the host's share


def build_linear(case: Case, settings: Settings) -> Workload:
    """Recipes next to bf16, the weights kept, and the product alone."""
    m, n, k = (int(case[key]) for key in ("m", "n", "k"))
    both, device, backend = case["pass"] == "both", settings.device, layer_backend(settings)

    def parts(seed: int) -> tuple[Linear, Tensor, Tensor | None]:
        x, w = inputs.make(case, seed, device)
        layer = Linear(k, n, bias=False, params_dtype=torch.bfloat16, device=device, backend=backend)
        with torch.no_grad():
            layer.weight.copy_(w / k**0.5)
        dy = _data((m, n), 2 * seed + 9, device) if both else None
        return layer, x.requires_grad_(both), dy

    def warmed(seed: int, recipe: Recipe | None, steps: int = 2) -> tuple[Linear, Tensor, Tensor | None]:
        layer, x, dy = parts(seed)
        for _ in range(steps):  # delayed scaling has scales from the second step on
            _run(layer, x, dy, recipe)
        return layer, x, dy

    def judge(seed: int, recipe: Recipe | None, bound: float, *, kept: bool = False, graph: bool = False) -> Check:
        layer, x, dy = warmed(seed, recipe)
        if graph:
            y = Captured(lambda: _run(layer, x, dy, recipe))()
        else:
            for _ in range(2 if kept else 1):  # the first of two quantises what the second keeps
                y = _run(layer, x, dy, recipe, kept=kept)
        pairs = [(y, lambda: x.detach().double() @ layer.weight.detach().double().t())]
        if dy is not None:
            pairs.append((x.grad, lambda: dy.double() @ layer.weight.detach().double()))
            pairs.append((layer.weight.grad, lambda: dy.double().t() @ x.detach().double()))
        return Check(max(_error(out.detach(), truth()) for out, truth in pairs), bound, "relative error")

    def step(recipe: Recipe | None, graph: bool = False) -> Callable[[int], Callable[[], object]]:
        def make(seed: int) -> Callable[[], object]:
            layer, x, dy = warmed(seed, recipe)

            def run() -> Tensor:
                return _run(layer, x, dy, recipe)

            return Captured(run) if graph else run

        return make

    def kept(seed: int) -> Callable[[], object]:
        layer, x, _ = warmed(seed, RECIPES["fp8_delayed"])
        layer.eval()
        _run(layer, x, None, RECIPES["fp8_delayed"], kept=True)
        return lambda: _run(layer, x, None, RECIPES["fp8_delayed"], kept=True)

    def operands(seed: int):
        layer, x, _ = parts(seed)
        kind = "portable" if settings.on_gpu else "reference"
        return quantize(x.detach(), "fp8", backend=kind), quantize(layer.weight.detach(), "fp8", backend=kind)

    def product(seed: int) -> Callable[[], object]:
        a, b = operands(seed)
        return lambda: _product(a, b, backend, torch.bfloat16)

    def judge_product(seed: int) -> Check:
        layer, x, _ = parts(seed)
        a, b = operands(seed)
        truth = x.detach().double() @ layer.weight.detach().double().t()
        return Check(_error(_product(a, b, backend, torch.bfloat16), truth), 0.08, "relative error")

    names = [name for name in RECIPES if not (settings.quick and name in EMULATED)]
    ours = [
        Implementation(
            name=name, role="ours", note=_note(name, settings), make=step(RECIPES[name]),
            check=lambda seed, name=name: judge(seed, RECIPES[name], BOUNDS.get(name, 0.08)),
        )
        for name in names
    ]  # fmt: skip
    if not both:
        ours += [
            Implementation(
                name="fp8_delayed-weights-kept", role="ours", make=kept, note="evaluation: weights quantised once",
                check=lambda seed: judge(seed, RECIPES["fp8_delayed"], 0.08, kept=True),
            ),
            Implementation(
                name="product", role="ours", make=product, check=judge_product,
                note="the FP8 product alone, both operands quantised beforehand",
            ),
        ]  # fmt: skip
    return Workload(
        implementations=[
            *ours,
            *_graphs(settings, names, step, judge, 1, 1),
            Implementation(
                name="bf16", role="reference", make=step(None), check=lambda seed: judge(seed, None, BOUNDS["bf16"]),
                note="torch.nn.functional.linear",
            ),
        ],
        baselines=("bf16", "bf16-graph") if both else ("bf16", "bf16-graph", "product"),
        flops=(3 if both else 1) * gemm_flops(m, n, k),
    )  # fmt: skip


def layer_flops(hidden: int, ffn: int, tokens: int) -> float:
    """Products of one layer, forward: qkv, projection, gate, up, down, and half of the scores (causal)."""
    products = gemm_flops(tokens, 4 * hidden, hidden) + gemm_flops(tokens, 3 * ffn, hidden)
    return products + gemm_flops(tokens, tokens, hidden)  # two products of tokens x tokens x hidden, half of each


def plain_layer(layer: TransformerLayer, x: Tensor) -> Tensor:
    """The layer in plain torch, in the dtype of x (1, tokens, hidden)."""
    weights = [m.weight.detach().to(x.dtype) for m in (layer.qkv.linear, layer.proj, layer.mlp.fc1, layer.mlp.fc2)]
    normed = F.rms_norm(x, x.shape[-1:], eps=1e-5)
    q, k, v = (t.unflatten(-1, (layer.heads, -1)).transpose(1, 2) for t in (normed @ weights[0].t()).chunk(3, -1))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + attended @ weights[1].t()
    gate, value = (F.rms_norm(x, x.shape[-1:], eps=1e-5) @ weights[2].t()).chunk(2, -1)
    return x + (F.silu(gate) * value) @ weights[3].t()


def build_layer(case: Case, settings: Settings) -> Workload:
    """A Llama layer under each recipe next to bf16, with the same attention kernel in all."""
    hidden, tokens = int(case["hidden"]), int(case["tokens"])
    heads = max(1, hidden // 128)
    ffn = -(-hidden * 8 // 3 // 128) * 128
    both, device, backend = case["pass"] == "both", settings.device, layer_backend(settings)
    dtype = torch.bfloat16

    def parts(seed: int) -> tuple[TransformerLayer, Tensor, Tensor | None]:
        torch.manual_seed(seed)
        layer = TransformerLayer(
            hidden, ffn, heads, normalization="RMSNorm", activation="swiglu", bias=False, attn_input_format="bshd",
            params_dtype=dtype, device=device, backend=backend,
        )  # fmt: skip
        x = _data((1, tokens, hidden), 2 * seed, device)
        return layer, x.requires_grad_(both), _data(tuple(x.shape), 2 * seed + 1, device) if both else None

    def warmed(seed: int, recipe: Recipe | None) -> tuple[TransformerLayer, Tensor, Tensor | None]:
        layer, x, dy = parts(seed)
        for _ in range(2):
            _run(layer, x, dy, recipe)
        return layer, x, dy

    def judge(seed: int, recipe: Recipe | None, bound: float, *, graph: bool = False) -> Check:
        layer, x, dy = warmed(seed, recipe)
        y = (Captured(lambda: _run(layer, x, dy, recipe))() if graph else _run(layer, x, dy, recipe)).detach()
        z = x.detach().float().requires_grad_(both)
        truth = plain_layer(layer, z)
        errors = [_error(y.double() - x.detach().double(), (truth - z).detach().double())]
        if dy is not None:
            truth.backward(dy.float())
            errors.append(_error(x.grad.double() - dy.double(), z.grad.double() - dy.double()))
        return Check(max(errors), bound, "relative error")

    def step(recipe: Recipe | None, graph: bool = False) -> Callable[[int], Callable[[], object]]:
        def make(seed: int) -> Callable[[], object]:
            layer, x, dy = warmed(seed, recipe)

            def run() -> Tensor:
                return _run(layer, x, dy, recipe)

            return Captured(run) if graph else run

        return make

    names = [name for name in RECIPES if name not in EMULATED] if settings.quick else list(RECIPES)
    return Workload(
        implementations=[
            *(
                Implementation(
                    name=name, role="ours", note=_note(name, settings), make=step(RECIPES[name]),
                    check=lambda seed, name=name: judge(seed, RECIPES[name], 2 * BOUNDS.get(name, 0.08)),
                )
                for name in names
            ),
            *_graphs(settings, names, step, judge, 2, 3),
            Implementation(
                name="bf16", role="reference", make=step(None), note="the same modules without a recipe",
                check=lambda seed: judge(seed, None, 3 * BOUNDS["bf16"]),
            ),
        ],
        baselines=("bf16", "bf16-graph"),
        flops=(3 if both else 1) * layer_flops(hidden, ffn, tokens),
    )  # fmt: skip
