"""How much work an operation is: floating-point operations, and the bytes that must cross the memory bus at least.

Two conventions for attention. `exact` counts the pairs of query and key that the mask allows. `paper` is the one of
the FlashAttention papers, 4 * seqlen_q * seqlen_k * head_dim * heads * batch, half of it when causal, 2.5 times it
backward, which published TFLOP/s figures use. They agree without a mask; with seqlen_q = seqlen_k, causal `exact` is
slightly more than half.
Only matrix products count (softmax does not), and recomputation in the backward pass counts, in both.

Compulsory bytes: every input is read once and every output written once. Real kernels move more, mostly through L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.hardware.catalog import dtype_word

Pass = Literal["forward", "backward"]
Convention = Literal["exact", "paper"]
PASSES, CONVENTIONS = ("forward", "backward"), ("exact", "paper")
Window = tuple[int | None, int | None]

BYTES: dict[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "int8": 1,
    "fp6": 0.75,
    "fp4": 0.5,
}


def bytes_of(dtype: str) -> float:
    """Bytes per element of a dtype word, without block scales."""
    word = dtype_word(dtype)
    if word not in BYTES:
        raise InvalidInputError(f"{dtype!r} is a kind of arithmetic, not a format; one of {', '.join(BYTES)}")
    return BYTES[word]


def attention_pairs(seqlen_q: int, seqlen_k: int, *, causal: bool = False, window_size: Window = (-1, -1)) -> int:
    """Pairs (query, key) that the mask allows: bottom-right aligned causal, window inclusive, -1 or None unlimited."""
    left, right = (None if side is None or side < 0 else side for side in window_size)
    if causal:
        right = 0 if right is None else min(right, 0)
    offset = seqlen_k - seqlen_q
    # Query i sees the keys below `end` and not below `start`, both cut to [0, seqlen_k].
    ends = seqlen_q * seqlen_k if right is None else _sum_clamped(offset + right + 1, seqlen_q, seqlen_k)
    starts = 0 if left is None else _sum_clamped(offset - left, seqlen_q, seqlen_k)
    return ends - starts


def attention_flops(
    *,
    batch: int = 1,
    seqlen_q: int = 0,
    seqlen_k: int | None = None,
    heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    which: Pass = "forward",
    convention: Convention = "exact",
    lengths_q: Sequence[int] | None = None,
    lengths_k: Sequence[int] | None = None,
) -> int:
    """Floating-point operations of attention; `heads` are query heads, the number of key heads does not matter.

    Forward has two products (Q K^T, P V), backward five (Q K^T again, dO V^T, P^T dO, dS K, dS^T Q). `lengths_q` and
    `lengths_k` give unequal sequences and take the place of batch and seqlen. The paper convention has no windows and
    one head size: InvalidInputError.
    """
    _check_choice("which", which, PASSES)
    _check_choice("convention", convention, CONVENTIONS)
    _check_sizes(heads=heads, head_dim=head_dim, head_dim_v=head_dim_v)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    sequences = _sequences(batch, seqlen_q, seqlen_k, lengths_q, lengths_k)
    windowed = any(side is not None and side >= 0 for side in window_size)
    if convention == "paper":
        if windowed or head_dim_v != head_dim:
            raise InvalidInputError(
                "the papers' convention knows neither windows nor head_dim_v; use convention='exact'"
            )
        full = sum(4 * q * k * head_dim * heads for q, k in sequences)
        halves = full if causal else 2 * full
        return halves // 2 if which == "forward" else halves * 5 // 4
    pairs = sum(attention_pairs(q, k, causal=causal, window_size=window_size) for q, k in sequences)
    if which == "forward":
        return 2 * pairs * heads * (head_dim + head_dim_v)
    return 2 * pairs * heads * (3 * head_dim + 2 * head_dim_v)


def attention_bytes(
    *,
    batch: int = 1,
    seqlen_q: int = 0,
    seqlen_k: int | None = None,
    heads: int,
    heads_kv: int | None = None,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: str = "bf16",
    out_dtype: str | None = None,
    which: Pass = "forward",
    lengths_q: Sequence[int] | None = None,
    lengths_k: Sequence[int] | None = None,
) -> int:
    """Compulsory bytes. Forward: q, k, v read, o and the float32 lse written. Backward: q, k, v, o, do, lse read, dq,
    dk, dv written. `out_dtype`, of o and all gradients, is that of the inputs, or bf16 where those have at most 8 bits.
    """
    _check_choice("which", which, PASSES)
    _check_sizes(heads=heads, heads_kv=heads_kv, head_dim=head_dim, head_dim_v=head_dim_v)
    heads_kv = heads if heads_kv is None else heads_kv
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    sequences = _sequences(batch, seqlen_q, seqlen_k, lengths_q, lengths_k)
    total_q, total_k = (sum(lengths) for lengths in zip(*sequences, strict=True)) if sequences else (0, 0)
    size = bytes_of(dtype)
    out_size = bytes_of(out_dtype or ("bf16" if size <= 1 else dtype))
    q, k, v = total_q * heads * head_dim, total_k * heads_kv * head_dim, total_k * heads_kv * head_dim_v
    o = total_q * heads * head_dim_v
    lse = 4 * total_q * heads
    if which == "forward":
        return round((q + k + v) * size + o * out_size + lse)
    return round((q + k + v) * (size + out_size) + 2 * o * out_size + lse)


def gemm_flops(m: int, n: int, k: int, *, batch: int = 1) -> int:
    """2 m n k for each of `batch` products (m, k) x (k, n)."""
    _check_sizes(m=m, n=n, k=k, batch=batch)
    return 2 * m * n * k * batch


def gemm_bytes(
    m: int,
    n: int,
    k: int,
    *,
    batch: int = 1,
    dtype: str = "bf16",
    out_dtype: str | None = None,
    accumulate: bool = False,
) -> int:
    """Both operands read and the result written; with `accumulate` the result is read as well."""
    _check_sizes(m=m, n=n, k=k, batch=batch)
    out_size = bytes_of(out_dtype or dtype)
    return round(batch * ((m * k + k * n) * bytes_of(dtype) + m * n * out_size * (2 if accumulate else 1)))


def copy_bytes(elements: int, dtype: str = "bf16") -> int:
    """A copy reads and writes every element once."""
    _check_sizes(elements=elements)
    return round(2 * elements * bytes_of(dtype))


def _sum_clamped(first: int, count: int, limit: int) -> int:
    """The sum over i < count of first + i cut to [0, limit], without a loop."""
    begin = min(max(-first, 0), count)  # terms below this index are 0
    end = min(max(limit - first, begin), count)  # terms from this index on are `limit`
    rising = end - begin
    return rising * (2 * (first + begin) + rising - 1) // 2 + (count - end) * limit


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidInputError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and not size >= 0:  # also refuses NaN
            raise InvalidInputError(f"{name} must not be negative, got {shown(size)}")


def _sequences(
    batch: int,
    seqlen_q: int,
    seqlen_k: int | None,
    lengths_q: Sequence[int] | None,
    lengths_k: Sequence[int] | None,
) -> list[tuple[int, int]]:
    if lengths_q is None and lengths_k is not None:
        raise InvalidInputError("lengths_k goes with lengths_q")
    _check_sizes(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    for length in (*(lengths_q or ()), *(lengths_k or ())):
        _check_sizes(lengths=length)
    if lengths_q is None:
        return [(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k)] * batch
    lengths_k = lengths_q if lengths_k is None else lengths_k
    if len(lengths_q) != len(lengths_k):
        raise InvalidInputError(f"{len(lengths_q)} query and {len(lengths_k)} key lengths; give one per sequence")
    return list(zip(lengths_q, lengths_k, strict=True))
