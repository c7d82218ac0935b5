"""What fp8 attention costs in accuracy: every recipe of the paper's table 3, emulated in torch on your own tensors.

The paper (FlashAttention-3, arXiv:2407.08608, section 4.3) draws q, k and v from N(0, 1) + N(0, 100) * Bernoulli(0.001)
and does not state the shape. The errors depend on it: they grow with seqlen (the softmax of outlier rows gets sharper)
and shrink with head_dim. `PAPER_SHAPE` is the one, of those tried, whose errors come closest to the printed ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3.fp8_inputs import as_heads, check_heads, check_rows_per_scale
from gpu_accel.flash_attention3.fp8_quantize import fp8_format
from gpu_accel.flash_attention3.hadamard import hadamard_reference
from gpu_accel.flash_attention3.problem import check_number, check_seed, normalise_window
from gpu_accel.flash_attention3.reference import attention_truth, visible, without_autocast
from gpu_accel.flash_attention3.reference_fp8 import fp8_attention_reference, quantize_reference


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to compute attention: in fp16 or fp8, with which of the paper's two ingredients."""

    name: str
    fp8: bool = True
    block_scale: bool = False
    hadamard: bool = False
    softmax_fp16: bool = False  # scores, exponentials and sums kept in fp16 instead of float32
    quantize_p: bool = True


RECIPES = (
    Recipe(name="fp16-standard", fp8=False, softmax_fp16=True),
    Recipe(name="fp16-flash", fp8=False),
    Recipe(name="fp8-baseline", softmax_fp16=True),
    Recipe(name="fp8-tensor", hadamard=False),
    Recipe(name="fp8-tensor-hadamard", hadamard=True),
    Recipe(name="fp8-block", block_scale=True),
    Recipe(name="fp8-block-hadamard", block_scale=True, hadamard=True),
    Recipe(name="fp8-block-hadamard-exact-p", block_scale=True, hadamard=True, quantize_p=False),
)

# What `fp8_attention` can do, the simplest first; the others emulate the paper's comparisons.
USABLE = ("fp8-tensor", "fp8-block", "fp8-tensor-hadamard", "fp8-block-hadamard")

# FlashAttention-3 (arXiv:2407.08608v2), table 3. The shape is not stated there.
# Emulated here with seqlen 8192, head_dim 128, not causal (4 heads, 512 query rows, 2 seeds): 3.3e-4, 2.2e-4, 2.7e-2,
# 8.9e-3, 9.1e-3, 2.1e-2 in the order below. Seqlen 4096: 2.5e-4, 1.6e-4, 2.2e-2, 8.9e-3, 8.6e-3, 1.6e-2; 16384: 4.1e-4,
# 2.4e-4, 2.7e-2, 9.5e-3, 9.6e-3, 2.3e-2. At head_dim 64 and seqlen 8192 all fp8 errors are about 1.6 times as large.
PAPER_SHAPE = {"seqlen": 8192, "head_dim": 128, "causal": False}
PAPER_RMSE = {
    "fp16-standard": 3.2e-4,
    "fp16-flash": 1.9e-4,
    "fp8-baseline": 2.4e-2,
    "fp8-block-hadamard": 9.1e-3,
    "fp8-tensor-hadamard": 9.3e-3,
    "fp8-block": 2.4e-2,
}


def _mask_of(sq: int, sk: int, causal: bool, window_size, device) -> Tensor:
    left, right = (-1 if w is None or w < 0 else w for w in window_size)
    return visible(torch.arange(sq, device=device), sq, sk, left, 0 if causal else right)


@without_autocast
def _half_precision(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softmax_fp16: bool):
    """fp16 operands, float32 products. Standard: scores and probabilities are rounded to fp16. Flash: only P is."""
    half = torch.float16
    q, k, v = (x.to(half).float() for x in (q, k, v))
    s = q @ k.transpose(-1, -2)
    if softmax_fp16:
        s = (s.to(half).float() * scale).to(half).masked_fill(~mask, float("-inf"))
        p = torch.softmax(s.float(), -1).nan_to_num(0.0).to(half).float()
        return (p @ v).to(half)
    s = (s * scale).masked_fill(~mask, float("-inf"))
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(m == float("-inf"), 0.0, m))
    total = p.sum(-1, keepdim=True)
    return ((p.to(half).float() @ v) / torch.where(total == 0, 1.0, total)).to(half)


@without_autocast
def _fp8_standard(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The paper's baseline: a scale per tensor, float32 products, softmax values kept in fp16, P rounded to e4m3."""
    half = torch.float16
    (q, sq), (k, sk), (v, sv) = ((y.float(), s) for y, s in (quantize_reference(x, 128, False) for x in (q, k, v)))
    s = ((q @ k.transpose(-1, -2)) * (sq * sk * scale)).to(half).masked_fill(~mask, float("-inf"))
    p = torch.softmax(s.float(), -1).nan_to_num(0.0).to(half).float()
    p = (p * 2.0**8).to(torch.float8_e4m3fn).float() * 2.0**-8
    return ((p @ v) * sv).to(half)


def run_recipe(
    recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1), block_size: int = 128, dtype: str = "e4m3", seed: int = 0,
) -> Tensor:  # fmt: skip
    """o (batch, heads, seqlen_q, head_dim) of one recipe, rounded to fp16. `dtype` does not change the baseline."""
    group = q.shape[1] // k.shape[1]
    mask = _mask_of(q.shape[2], k.shape[2], causal, window_size, q.device)
    if not recipe.fp8:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return _half_precision(q, k, v, mask, softmax_scale, recipe.softmax_fp16)
    if recipe.softmax_fp16:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return _fp8_standard(q, k, v, mask, softmax_scale)
    options = {"hadamard": recipe.hadamard, "seed": seed}
    q8, qs = quantize_reference(q, block_size, recipe.block_scale, dtype, **options)
    k8, ks = quantize_reference(k, block_size, recipe.block_scale, dtype, **options)
    v8, vs = quantize_reference(v, block_size, recipe.block_scale, dtype)
    o, _ = fp8_attention_reference(
        q8, k8, v8, qs, ks, vs, q_block=block_size, k_block=block_size, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, quantize_p=recipe.quantize_p, block_n=block_size,
    )  # fmt: skip
    return o.to(torch.float16)


def exact(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal=False, window_size=(-1, -1)) -> Tensor:
    """Attention in float64; q, k, v (batch, heads, seqlen, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, _ = attention_truth(q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size)
    return o.transpose(1, 2)


def lost_values(tensor: Tensor, recipe: Recipe, block_size: int, dtype: str, seed: int) -> tuple[float, float]:
    """(share of values at the largest fp8 number, share of non-zero values that became 0).

    Nothing is clipped, because the scale comes from the largest value: the first share counts the values that set a
    scale and those that round to them.
    """
    options = {"hadamard": recipe.hadamard, "seed": seed}
    values, _ = quantize_reference(tensor, block_size, recipe.block_scale, dtype, **options)
    x = hadamard_reference(tensor, seed=seed) if recipe.hadamard else tensor.float()
    nonzero = x != 0
    zeroed = (nonzero & (values.float() == 0)).sum() / nonzero.sum().clamp_min(1)
    largest = (values.float().abs() == fp8_format(dtype).largest).float().mean()
    return largest.item(), zeroed.item()


@dataclass(frozen=True)
class RecipeError:
    """The error of one recipe against float64: root mean square, largest, and relative to the size of the output."""

    recipe: str
    rmse: float
    max_error: float
    relative: float
    clipped: float  # share of q, k or v, whichever is worst, at the largest fp8 number
    underflow: float  # share of the non-zero q, k or v that became 0, whichever is worst
    paper_rmse: float | None


@dataclass(frozen=True)
class ErrorReport:
    """`rows` in the order of `RECIPES`; `recommended` is the fp8 recipe to use on these tensors."""

    rows: tuple[RecipeError, ...]
    recommended: str
    shape: str

    def __getitem__(self, recipe: str) -> RecipeError:
        return next(r for r in self.rows if r.recipe == recipe)

    def __str__(self) -> str:
        columns = "".join(f" {c:>9}" for c in ("rmse", "max", "relative", "clipped", "to zero", "paper"))
        head = f"{self.shape}\n{'recipe':28}{columns}"
        lines = [
            f"{r.recipe:28} {r.rmse:9.2e} {r.max_error:9.2e} {r.relative:9.2e} {r.clipped:9.2e} {r.underflow:9.2e} "
            f"{f'{r.paper_rmse:9.2e}' if r.paper_rmse else '-':>9}"
            for r in self.rows
        ]
        return "\n".join([head, *lines, f"recommended: {self.recommended} (of those that kernels run)"])


def fp8_error_report(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    block_size: int = 128,
    dtype: str | torch.dtype = "e4m3",
    layout: str = "bhsd",
    seed: int = 0,
) -> ErrorReport:
    """What each fp8 recipe costs in accuracy on these tensors, emulated in torch (no GPU needed, no kernel run).

    Every recipe of the paper's table 3 is compared with float64 attention of the unrounded inputs. Memory grows with
    seqlen_q x seqlen_k: pass a few heads.

    Args:
        q, k, v, softmax_scale, causal, window_size, dtype, layout, seed: as of `fp8_attention`.
        block_size: rows per scale, where a recipe has one per block.

    Returns:
        an `ErrorReport`; print it. `recommended` is the simplest of the four recipes that the kernels run (`USABLE`)
        with an error within 10 % of the best of them. fp8-baseline is the paper's, in e4m3 whatever `dtype` says.

    Raises:
        InvalidInputError: shapes, dtypes or options that do not fit, or no keys.
    """
    q, k, v = (x.detach() for x in as_heads(layout, q=q, k=k, v=v))
    check_heads(q, k, v)
    name = fp8_format(dtype).name
    scale = check_number("softmax_scale", q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    normalise_window(window_size, causal)
    check_rows_per_scale("block_size", block_size)
    seed = check_seed(seed)
    if k.shape[2] == 0:
        raise InvalidInputError(f"the error of attention to no key is not defined, got k of shape {tuple(k.shape)}")
    block_size = min(block_size, k.shape[2] + q.shape[2])  # longer is one block all the same
    truth = exact(q, k, v, softmax_scale=scale, causal=causal, window_size=window_size)
    size = truth.square().mean().sqrt().item()
    rows = []
    for recipe in RECIPES:
        o = run_recipe(
            recipe, q, k, v, softmax_scale=scale, causal=causal, window_size=window_size, block_size=block_size,
            dtype=name, seed=seed,
        )  # fmt: skip
        error = o.double() - truth
        rmse = error.square().mean().sqrt().item() if error.numel() else 0.0
        clipped, zeroed = 0.0, 0.0
        if recipe.fp8 and q.numel() and k.numel():
            as_v = replace(recipe, hadamard=False)  # v is never multiplied by the Hadamard matrix
            pairs = ((q, recipe), (k, recipe), (v, as_v))
            lost = [lost_values(x, how, block_size, name, seed) for x, how in pairs]
            clipped, zeroed = (max(pair) for pair in zip(*lost, strict=True))
        largest = error.abs().max().item() if error.numel() else 0.0
        rows.append(
            RecipeError(
                recipe=recipe.name,
                rmse=rmse,
                max_error=largest,
                relative=rmse / size if size else 0.0,
                clipped=clipped,
                underflow=zeroed,
                paper_rmse=PAPER_RMSE.get(recipe.name),
            )  # fmt: skip
        )
    by_name = {r.recipe: r for r in rows}
    best = min(by_name[n].rmse for n in USABLE)
    recommended = next((n for n in USABLE if by_name[n].rmse <= 1.1 * best), "none: the inputs are not finite")
    return ErrorReport(tuple(rows), recommended, f"q {tuple(q.shape)}, k {tuple(k.shape)} (batch, heads, seqlen, dim)")
