"""The experiment `train`: a small Llama learns a real text, in bf16 and under each recipe, from the same seeds.

The text, byte by byte, is the Constitution of the United States (`papers/flash_attention3/text.txt`, 26 KB), which a
run reads some 100 times; with `--input python` it is the sources of Python's standard library (the modules at its top,
a few MB, there wherever this runs), of which a run reads half: then nothing is learnt by heart. The last tenth is kept
for judging. All runs of one seed have the same first weights and the same batches. Norms, embeddings, the head and
attention stay in bf16, master weights and AdamW in float32, as the recipes say.

    loss          mean of the last tenth of the training losses, nats a byte
    valid_loss    on the kept text
    gap           valid_loss less that of bf16, same seed; the mean over seeds. worst_gap: the largest of one seed
    noise         of bf16: largest less smallest valid_loss over the seeds, what a gap must be held against
    gap_in_noise  |gap| / noise. worst_gap_in_noise: of worst_gap
    loss_20 ...   the training loss at 20, 40, ... 100 % of the steps (means of a fifth of them): the curve
    curve_in_noise    the largest of these five of |mean gap| / (spread of bf16's seeds there)
    kept_20 ...   the loss on the kept text there; kept_curve_in_noise as before

The spread of n seeds grows with n (for a normal distribution 1.7 deviations of three, 2.8 of eight), a mean gap does
not. So each `_in_noise` has an `_in_deviation`, held against the standard deviation of bf16's seeds. What such a
number is where there is no difference is read too: `bf16-elsewhere` is bf16 from other seeds.

On a GPU the steps are replays of a CUDA graph, whose first ones are not: the model is small, and Python would take
ten times as long. NVFP4 draws a seed a step on the host, so its steps are not captured.

A run is correct when its loss fell below that of a model of bytes without context (4.0 nats at first, 3.1 for this text
by frequency) and is finite; the gap is what is found out and not what is demanded.
"""

from __future__ import annotations

import functools
import importlib
import math
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpu_accel.transformer_engine.context import autocast
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.modules import Norm, TransformerLayer, rotary_angles
from gpu_accel.transformer_engine.recipes import RECIPES
from gpu_accel.workbench import registry
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload

from .layers import layer_backend

SEEDS = 8
FIFTHS = 5  # points of a curve
RUNS = {"bf16": None, **RECIPES}
ELSEWHERE = "bf16-elsewhere"
CAPTURED = ("bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8")  # whose steps draw nothing on the host
EAGER = 3  # steps before a graph is captured


class Llama(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, hidden: int, layers: int, heads: int, device: str, backend: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, hidden, device=device)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(
            TransformerLayer(
                hidden, 2 * hidden, heads, normalization="RMSNorm", activation="swiglu", bias=False,
                attn_input_format="bshd", device=device, backend=backend,
            )
            for _ in range(layers)
        )  # fmt: skip
        self.norm = Norm(hidden, "RMSNorm", device=device)
        self.head = nn.Linear(hidden, 256, bias=False, device=device)
        self.head_dim = hidden // heads
        for name, p in self.named_parameters():
            if p.dim() == 2 and "embedding" not in name:
                scale = 0.02 / math.sqrt(2 * layers) if ".proj." in name or ".fc2." in name else 0.02
                nn.init.normal_(p, std=scale)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).bfloat16()
        angles = rotary_angles(ids.shape[1], self.head_dim, device=ids.device)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return F.linear(self.norm(x), self.head.weight.bfloat16()).float()


@functools.lru_cache(maxsize=2)
def text(kind: str = "normal") -> Tensor:
    """The bytes of a text."""
    if kind == "python":
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    capture = importlib.import_module(f"{registry.paper('flash_attention3')._package()}.capture")
    return torch.frombuffer(bytearray(capture.TEXT.read_bytes()), dtype=torch.uint8)


def list_cases(settings: Settings) -> list[Case]:
    """One small model; on a CPU one that only shows that everything runs."""
    if settings.on_gpu:
        steps, batch = (80, 16) if settings.quick else (300, 32)
        sizes = dict(hidden=256, layers=4, heads=4, batch=batch, seqlen=256, steps=steps, seeds=SEEDS)
    else:
        sizes = dict(hidden=32, layers=1, heads=2, batch=4, seqlen=32, steps=12, seeds=1)
    kind = settings.input if settings.input == "python" else "normal"
    return [{**sizes, "rate": 2e-3 if settings.on_gpu else 1e-2, "dtype": "bf16", "input": kind}]


@dataclass(frozen=True)
class Curve:
    """Of one run: the training losses, and the loss on the kept text after each fifth of the steps."""

    losses: list[float]
    kept: list[float]


def rates(case: Case) -> Tensor:
    """The learning rate of each step: a tenth of the steps to warm up, then half a cosine down to a tenth."""
    steps = int(case["steps"])
    warm = max(1, steps // 10)
    return torch.tensor([
        float(case["rate"]) * min(1, (i + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, i / steps)))
        for i in range(steps)
    ])  # fmt: skip


def train(case: Case, name: str, seed: int, device: str, backend: str, *, captured: bool | None = None) -> Curve:
    """One run. Only the start and the batches depend on the seed. captured: whether steps are replays of a graph."""
    hidden, layers, heads, batch, seqlen, steps = (
        int(case[key]) for key in ("hidden", "layers", "heads", "batch", "seqlen", "steps")
    )
    on_gpu = device == "cuda"
    if captured is None:
        captured = on_gpu and name in CAPTURED
    torch.manual_seed(seed)
    model = Llama(hidden, layers, heads, device, backend)
    data = text(str(case["input"]))
    cut = len(data) * 9 // 10
    drawn = torch.Generator().manual_seed(seed)
    rate = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, foreach=on_gpu, capturable=on_gpu
    )
    recipe = RUNS[name]
    window = torch.arange(seqlen + 1)
    starts = torch.randint(0, cut - seqlen - 1, (steps * batch,), generator=drawn)
    batches = data[starts[:, None] + window].view(steps, batch, seqlen + 1).to(device)
    planned, losses = rates(case).to(device), torch.zeros(steps, device=device)
    at = torch.zeros(1, dtype=torch.long, device=device)  # the step, so that a graph finds what belongs to it

    def loss_of(ids: Tensor) -> Tensor:
        ids = ids.long()
        with autocast(enabled=recipe is not None, recipe=recipe):
            logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def step() -> None:
        rate.copy_(planned.index_select(0, at)[0])
        loss = loss_of(batches.index_select(0, at)[0])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.index_copy_(0, at, loss.detach().reshape(1))
        at.add_(1)

    rest = data[cut:]
    rows = min(batch, (len(rest) - 1) // seqlen)
    held = torch.stack([rest[i * seqlen : i * seqlen + seqlen + 1] for i in range(rows)]).to(device)
    kept = []
    side = torch.cuda.Stream() if captured else None
    graph = torch.cuda.CUDAGraph() if captured else None
    for i in range(steps):
        if graph is None or side is None:
            step()
        elif i < EAGER:  # on the stream of the capture: what accumulates gradients remembers where it ran first
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if i == EAGER:
                with torch.cuda.graph(graph, stream=side):
                    step()
            graph.replay()
        if (i + 1) * FIFTHS // steps > i * FIFTHS // steps:
            model.eval()
            with torch.no_grad():
                kept.append(loss_of(held))
            model.train()
    return Curve(losses.tolist(), torch.stack(kept).tolist())


def frequencies_loss(kind: str = "normal") -> float:
    """Nats a byte of a model that knows how often each byte occurs, and nothing else."""
    share = torch.bincount(text(kind), minlength=256).double() / len(text(kind))
    share = share[share > 0]
    return float(-(share * share.log()).sum())


def quantised_layers(model: nn.Module) -> int:
    return sum(isinstance(m, Linear) for m in model.modules())


def fifths(losses: list[float]) -> list[float]:
    """The curve of training losses in five points."""
    edges = [len(losses) * i // FIFTHS for i in range(FIFTHS + 1)]
    return [sum(losses[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]


def last(losses: list[float]) -> float:
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def compared(mine: Sequence[Curve], base: Sequence[Curve]) -> dict[str, tuple[float, str]]:
    """The metrics of runs next to bf16's."""
    valid, theirs = [one.kept[-1] for one in mine], [one.kept[-1] for one in base]
    gaps = [v - b for v, b in zip(valid, theirs, strict=True)]
    found = {
        "loss": mean(last(one.losses) for one in mine),
        "valid_loss": mean(valid),
        "gap": mean(gaps),
        "worst_gap": max(map(abs, gaps)),
        "noise": max(theirs) - min(theirs),
    }
    if found["noise"] > 0:
        found["gap_in_noise"] = abs(found["gap"]) / found["noise"]
        found["worst_gap_in_noise"] = found["worst_gap"] / found["noise"]
        found["gap_in_deviation"] = abs(found["gap"]) / stdev(theirs)
    for name, prefix, points in (
        ("loss", "", [[fifths(one.losses) for one in some] for some in (mine, base)]),
        ("kept", "kept_", [[one.kept for one in some] for some in (mine, base)]),
    ):
        here, there = (list(zip(*curves, strict=True)) for curves in points)  # by point, then by seed
        for i, values in enumerate(here):
            found[f"{name}_{100 * (i + 1) // len(here)}"] = mean(values)
        away = [abs(mean(a) - mean(b)) for a, b in zip(here, there, strict=True)]
        if all(max(b) > min(b) for b in there):
            found[f"{prefix}curve_in_noise"] = max(
                gap / (max(b) - min(b)) for gap, b in zip(away, there, strict=True)
            )  # fmt: skip
            found[f"{prefix}curve_in_deviation"] = max(gap / stdev(b) for gap, b in zip(away, there, strict=True))
    return {key: (value, "1") for key, value in found.items()}


def build(case: Case, settings: Settings) -> Workload:
    """bf16 and every recipe, from the same seeds."""
    backend, seeds, kind = layer_backend(settings), int(case["seeds"]), str(case["input"])
    names = [n for n in RUNS if not (settings.quick and n == "mxfp8")] + [ELSEWHERE]

    @functools.lru_cache(maxsize=len(RUNS) + 1)
    def runs(name: str, seed: int) -> tuple[Curve, ...]:
        first = seed + seeds if name == ELSEWHERE else seed
        which = "bf16" if name == ELSEWHERE else name
        return tuple(train(case, which, first + i, settings.device, backend) for i in range(seeds))

    def check(name: str, seed: int) -> Check:
        worst = max(max(last(one.losses), one.kept[-1]) for one in runs(name, seed))
        known = frequencies_loss(kind) if settings.on_gpu else math.log(256)
        return Check(worst if math.isfinite(worst) else math.inf, known, "nats a byte")

    notes = {"mxfp8": "emulated in bf16, exactly", "nvfp4": "emulated in bf16, exactly",
             ELSEWHERE: "bf16 from other seeds: what the measures are where nothing differs"}  # fmt: skip
    constitution = "text.txt (the Constitution of the United States), bytes"
    library = f"sources of the standard library of Python {platform.python_version()}, bytes"
    return Workload(
        implementations=[
            Implementation(
                name=name,
                role="ours" if name in RECIPES else "reference",
                check=functools.partial(check, name),
                values=lambda seed, name=name: compared(runs(name, seed), runs("bf16", seed)),
                note=notes.get(name, ""),
            )
            for name in names
        ],
        input_source=library if kind == "python" else constitution,
    )
