"""The experiment `train`: a small Llama learns a real text, in bf16 and under each recipe, from the same seeds.

The text is the Constitution of the United States (`papers/flash_attention3/text.txt`), byte by byte; its last tenth is
kept for judging. All runs of one seed have the same first weights and the same batches. Norms, embeddings, the head and
attention stay in bf16, master weights and AdamW in float32, as the recipes say.

    loss          mean of the last tenth of the training losses, nats a byte
    valid_loss    on the kept text
    gap           valid_loss less that of bf16, same seed; the mean over seeds. worst_gap: the largest of one seed
    noise         of bf16: largest less smallest valid_loss over the seeds, what a gap must be held against
    gap_in_noise  |gap| / noise. worst_gap_in_noise: of worst_gap
    loss_20 ...   the training loss at 20, 40, ... 100 % of the steps (means of a fifth of them): the curve
    curve_in_noise    the largest of these five of |mean gap| / (spread of bf16's seeds there)

A run is correct when its loss fell below that of a model of bytes without context (4.0 nats at first, 3.1 for this text
by frequency) and is finite; the gap is what is found out and not what is demanded.
"""

from __future__ import annotations

import functools
import importlib
import math

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

SEEDS = 3
FIFTHS = 5  # points of a curve
RUNS = {"bf16": None, **RECIPES}


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


@functools.lru_cache(maxsize=1)
def text() -> Tensor:
    """The bytes of the text."""
    capture = importlib.import_module(f"{registry.paper('flash_attention3')._package()}.capture")
    return torch.frombuffer(bytearray(capture.TEXT.read_bytes()), dtype=torch.uint8).long()


def list_cases(settings: Settings) -> list[Case]:
    """One small model; on a CPU one that only shows that everything runs."""
    if settings.on_gpu:
        steps, batch = (80, 16) if settings.quick else (300, 32)
        sizes = dict(hidden=256, layers=4, heads=4, batch=batch, seqlen=256, steps=steps, seeds=SEEDS)
    else:
        sizes = dict(hidden=32, layers=1, heads=2, batch=4, seqlen=32, steps=12, seeds=1)
    return [{**sizes, "rate": 2e-3 if settings.on_gpu else 1e-2, "dtype": "bf16", "input": "normal"}]


def train(case: Case, name: str, seed: int, device: str, backend: str) -> tuple[list[float], float]:
    """(training losses, loss on the kept text) of one run. Only the start and the batches depend on the seed."""
    hidden, layers, heads, batch, seqlen, steps = (
        int(case[key]) for key in ("hidden", "layers", "heads", "batch", "seqlen", "steps")
    )
    torch.manual_seed(seed)
    model = Llama(hidden, layers, heads, device, backend)
    data = text()
    cut = len(data) * 9 // 10
    drawn = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(case["rate"]), betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min(1, (i + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, i / steps))),
    )
    recipe = RUNS[name]
    losses: list[Tensor] = []
    window = torch.arange(seqlen + 1)
    for _ in range(steps):
        starts = torch.randint(0, cut - seqlen - 1, (batch,), generator=drawn)
        ids = data[starts[:, None] + window].to(device)
        with autocast(enabled=recipe is not None, recipe=recipe):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    model.eval()
    kept = data[cut:]
    rows = min(batch, (len(kept) - 1) // seqlen)
    ids = torch.stack([kept[i * seqlen : i * seqlen + seqlen + 1] for i in range(rows)]).to(device)
    with torch.no_grad(), autocast(enabled=recipe is not None, recipe=recipe):
        valid = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    return torch.stack(losses).tolist(), float(valid)


def frequencies_loss() -> float:
    """Nats a byte of a model that knows how often each byte occurs, and nothing else."""
    share = torch.bincount(text(), minlength=256).double() / len(text())
    share = share[share > 0]
    return float(-(share * share.log()).sum())


def quantised_layers(model: nn.Module) -> int:
    return sum(isinstance(m, Linear) for m in model.modules())


def build(case: Case, settings: Settings) -> Workload:
    """bf16 and every recipe, from the same seeds."""
    backend = layer_backend(settings)
    names = [n for n in RUNS if not (settings.quick and n == "mxfp8")]

    @functools.lru_cache(maxsize=len(RUNS))
    def runs(name: str, seed: int) -> tuple[tuple[list[float], float], ...]:
        return tuple(
            train(case, name, seed + i, settings.device, backend) for i in range(int(case["seeds"]))
        )  # fmt: skip

    def last(losses: list[float]) -> float:
        tail = losses[-max(1, len(losses) // 10) :]
        return sum(tail) / len(tail)

    def fifths(losses: list[float]) -> list[float]:
        """The curve of training losses in five points."""
        edges = [len(losses) * i // FIFTHS for i in range(FIFTHS + 1)]
        return [sum(losses[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]

    def check(name: str, seed: int) -> Check:
        worst = max(max(last(losses), valid) for losses, valid in runs(name, seed))
        known = frequencies_loss() if settings.on_gpu else math.log(256)
        return Check(worst if math.isfinite(worst) else math.inf, known, "nats a byte")

    def values(name: str, seed: int) -> dict[str, tuple[float, str]]:
        mine, base = runs(name, seed), runs("bf16", seed)
        valid = [v for _, v in mine]
        gaps = [v - b for v, (_, b) in zip(valid, base, strict=True)]
        curves, base_curves = ([fifths(losses) for losses, _ in some] for some in (mine, base))
        found = {
            "loss": (sum(last(losses) for losses, _ in mine) / len(mine), "1"),
            "valid_loss": (sum(valid) / len(valid), "1"),
            "gap": (sum(gaps) / len(gaps), "1"),
            "worst_gap": (max(map(abs, gaps)), "1"),
            "noise": (max(v for _, v in base) - min(v for _, v in base), "1"),
        }
        points = list(zip(zip(*curves, strict=True), zip(*base_curves, strict=True), strict=True))
        for i, (here, _) in enumerate(points):
            found[f"loss_{100 * (i + 1) // FIFTHS}"] = (sum(here) / len(here), "1")
        noise = found["noise"][0]
        spreads = [max(b) - min(b) for _, b in points]
        if noise > 0 and min(spreads) > 0:
            found["gap_in_noise"] = (abs(found["gap"][0]) / noise, "1")
            found["worst_gap_in_noise"] = (found["worst_gap"][0] / noise, "1")
            away = [abs(sum(a) - sum(b)) / len(a) / s for (a, b), s in zip(points, spreads, strict=True)]
            found["curve_in_noise"] = (max(away), "1")
        return found

    note = {"mxfp8": "emulated in bf16, exactly", "nvfp4": "emulated in bf16, exactly"}
    return Workload(
        implementations=[
            Implementation(
                name=name,
                role="reference" if name == "bf16" else "ours",
                check=functools.partial(check, name),
                values=functools.partial(values, name),
                note=note.get(name, ""),
            )
            for name in names
        ],
        input_source="text.txt (the Constitution of the United States), bytes",
    )
