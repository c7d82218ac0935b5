"""What an FP8 backward would cost in accuracy, emulated on a CPU: `python3 -m papers.flash_attention3.fp8_backward`.

The five products of the backward, S = Q K^T, dP = dO V^T, dV = P^T dO, dK = dS^T Q and dQ = dS K, with their operands
rounded as tensor cores of 16 or 8 bits would take them, and sums in float64, so that only rounding of operands counts:
what adding up in 14 bits loses comes on top. Every operand has one scale per 128 rows (P and dS: per 128 x 128), q and
k may be multiplied by the random Hadamard matrix, which dQ and dK undo. delta = sum dO * O is of a forward in the same
recipe. Printed: root mean square error against float64, relative to the gradient's own root mean square.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.flash_attention3.fp8_quantize import fp8_format
from gpu_accel.flash_attention3.hadamard import hadamard_reference
from gpu_accel.testing.inputs import Kind, random_values

BLOCK = 128


@dataclass(frozen=True)
class Recipe:
    """Formats of the operands: `inputs` of q, k, v and P, `grads` of dO, `scores` of dS; None is bfloat16."""

    name: str
    inputs: str | None
    grads: str | None
    scores: str | None
    hadamard: bool = False


RECIPES = (
    Recipe("bf16", None, None, None),
    Recipe("e4m3, dO and dS in bf16", "e4m3", None, None, True),
    Recipe("e4m3, dO and dS in e5m2", "e4m3", "e5m2", "e5m2", True),
    Recipe("e4m3 everywhere", "e4m3", "e4m3", "e4m3", True),
    Recipe("e4m3 everywhere, no Hadamard", "e4m3", "e4m3", "e4m3"),
    Recipe("bf16, dO and dS in e5m2", None, "e5m2", "e5m2"),
    Recipe("bf16, dS in e4m3", None, None, "e4m3"),
)


def rounded(x: Tensor, name: str | None, cols: int | None = None) -> Tensor:
    """float64 `x` as its 8-bit (scaled by blocks of 128 rows and `cols` columns) or 16-bit operand holds it."""
    if name is None:
        return x.to(torch.bfloat16).double()
    fmt = fp8_format(name)
    rows, width = x.shape[-2:]
    cols = cols or width
    padded = torch.nn.functional.pad(x, (0, -width % cols, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, cols)).unflatten(-3, (-1, BLOCK))  # (..., row block, row, column block, column)
    scale = blocks.abs().amax((-1, -3), keepdim=True) / fmt.largest
    scale = torch.where(scale > 0, scale, 1.0)
    values = (blocks / scale).float().to(fmt.dtype).double() * scale
    return values.flatten(-4, -3).flatten(-2)[..., :rows, :width]


def gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, recipe: Recipe | None, *, causal: bool
) -> tuple[Tensor, ...]:
    """dq, dk, dv in float64; with `recipe` None exactly."""

    def operand(x: Tensor, name: str | None, cols: int | None = None) -> Tensor:
        return x if recipe is None else rounded(x, name, cols)

    inputs = recipe.inputs if recipe else None
    turned = recipe is not None and recipe.hadamard
    if turned:
        q, k = hadamard_reference(q, dtype=torch.float64), hadamard_reference(k, dtype=torch.float64)
    q, k, v = operand(q, inputs), operand(k, inputs), operand(v, inputs)
    scale = q.shape[-1] ** -0.5
    s = q @ k.transpose(-1, -2) * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    p = s.softmax(-1)
    p8 = operand(p, inputs, BLOCK)
    delta = (do * (p8 @ v)).sum(-1, keepdim=True)
    do8 = operand(do, recipe.grads if recipe else None)
    ds = p * (do8 @ v.transpose(-1, -2) - delta)
    ds = operand(ds, recipe.scores if recipe else None, BLOCK)
    dq, dk, dv = scale * ds @ k, scale * ds.transpose(-1, -2) @ q, p8.transpose(-1, -2) @ do8
    if turned:
        dq, dk = (hadamard_reference(x, inverse=True, dtype=torch.float64) for x in (dq, dk))
    return dq, dk, dv


def errors(
    kind: Kind, seqlen: int, head_dim: int, *, causal: bool, heads: int = 2, seed: int = 0
) -> dict[str, list[float]]:
    """{recipe: relative root mean square errors of dq, dk and dv}."""
    source = torch.Generator().manual_seed(seed)
    shape = (1, heads, seqlen, head_dim)
    q, k, v, do = (random_values(shape, kind=kind, generator=source).double() for _ in range(4))
    truth = gradients(q, k, v, do, None, causal=causal)
    found = {}
    for recipe in RECIPES:
        got = gradients(q, k, v, do, recipe, causal=causal)
        found[recipe.name] = [((g - t).norm() / t.norm()).item() for g, t in zip(got, truth, strict=True)]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m papers.flash_attention3.fp8_backward", description=__doc__)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args(arguments)
    kinds: tuple[Kind, ...] = ("normal", "outliers")
    for kind in kinds:
        mask = "causal" if options.causal else "full"
        print(f"{kind}, {options.seqlen} keys, head_dim {options.head_dim}, {mask}: dq dk dv")
        for name, row in errors(kind, options.seqlen, options.head_dim, causal=options.causal).items():
            print(f"  {name:30} " + "  ".join(f"{x:.1e}" for x in row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
