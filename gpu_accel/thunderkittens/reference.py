"""Plain torch, step by step: what the kernels must compute, for tests, papers, notebooks and readers.

Everything follows the dtype it is given: pass float64 for truth. Everything is differentiable by autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.flash_attention3.reference import without_autocast


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, seqlen, heads of q, dim) to (batch, seqlen, heads, dim): each repeated for its group; none stay none."""
    return x.repeat_interleave(heads // max(1, x.shape[2]), 2)


def linear_attention_recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None = None, w: Tensor | None = None, scale: float,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S_t = exp(g_t) S_{t-1} + w_t k_t v_t', o_t = scale q_t' S_t: the definition, one step after the other.

    Args:
        q, k: (batch, seqlen, heads of q, K); the heads of q divide those of v. v: (batch, seqlen, heads, V).
        g: logarithms of the gates, w: weights; (batch, seqlen, heads). initial: (batch, heads, K, V).

    Returns:
        o (batch, seqlen, heads, V) and the state at the end (batch, heads, K, V).
    """
    heads = v.shape[2]
    q, k = (_for_heads(x, heads) for x in (q, k))
    state = q.new_zeros(v.shape[0], heads, q.shape[3], v.shape[3]) if initial is None else initial.to(q.dtype)
    out = []
    for t in range(v.shape[1]):
        if g is not None:
            state = state * g[:, t].to(q.dtype).exp()[..., None, None]
        added = k[:, t, :, :, None] * v[:, t, :, None, :]
        if w is not None:
            added = added * w[:, t].to(q.dtype)[..., None, None]
        state = state + added
        out.append((q[:, t, :, :, None] * state).sum(2) * scale)
    return (torch.stack(out, 1) if out else torch.empty_like(v)), state


@without_autocast
def linear_attention_chunked(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None = None, w: Tensor | None = None, scale: float,
    initial: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same chunk by chunk, as matrix products in the dtype of q: a yardstick, and what a CPU runs.

    Gates and the state are float32 (float64 where q is), operands of products are rounded to the dtype of q.
    """
    heads, dtype = v.shape[2], q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (_for_heads(x, heads).transpose(1, 2) for x in (q, k, v))  # (b, h, t, d)
    gates = q.new_zeros(q.shape[:3], dtype=wide) if g is None else g.transpose(1, 2).to(wide).clamp_min(-88.0)
    weights = torch.ones_like(gates) if w is None else w.transpose(1, 2).to(wide)
    shape = (*v.shape[:2], q.shape[3], v.shape[3])
    state = q.new_zeros(shape, dtype=wide) if initial is None else initial.to(wide)
    out = []
    for t in range(0, v.shape[2], chunk):
        qc, kc, vc = (x[:, :, t : t + chunk] for x in (q, k, v))
        b = gates[:, :, t : t + chunk].cumsum(-1)
        wc = weights[:, :, t : t + chunk]
        causal = torch.ones(b.shape[-1], b.shape[-1], dtype=torch.bool, device=b.device).tril()
        decay = (b[..., :, None] - b[..., None, :]).masked_fill(~causal, -torch.inf).exp()
        scores = (qc @ kc.mT).to(wide).masked_fill(~causal, 0.0)  # a NaN of the future times no weight would be NaN
        scores = (scores * decay * wc[..., None, :] * scale).to(dtype)
        inter = (qc @ state.to(dtype)).to(wide) * (b.exp() * scale)[..., None]
        out.append(((scores @ vc).to(wide) + inter).to(dtype))
        left = (vc.to(wide) * ((b[..., -1:] - b).exp() * wc)[..., None]).to(dtype)
        state = state * b[..., -1:, None].exp() + (kc.mT @ left).to(wide)
    o = torch.cat(out, 2) if out else v
    return o.transpose(1, 2), state


@without_autocast
def window_softmax(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, low: Tensor | None = None, block: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention of query t over the last `window` keys up to t, a block of queries after the other.

    Args:
        q, k: (batch, seqlen, heads of q, K); v: (batch, seqlen, heads, V). low: (seqlen,) integers, first keys that
            rows see, for windows that begin later; t + 1 is no key at all.

    Returns:
        o (batch, seqlen, heads, V) in the dtype of v; log-sum-exp and largest score (batch, seqlen, heads), float32 or
        float64. No key: 0, -inf and 0. A NaN or Inf of v reaches all queries of the block that share its keys.
    """
    heads, wide = v.shape[2], torch.float64 if v.dtype == torch.float64 else torch.float32
    q, k = (_for_heads(x, heads) for x in (q, k))
    low = torch.arange(v.shape[1], device=v.device) - (window - 1) if low is None else low
    outs = [(torch.empty_like(v[:, :0]), *(v.new_empty(v.shape[0], 0, heads, dtype=wide) for _ in range(2)))]
    for start in range(0, v.shape[1], block):
        rows = torch.arange(start, min(start + block, v.shape[1]), device=v.device)
        cols = torch.arange(max(0, start - window + 1), start + len(rows), device=v.device)
        scores = torch.einsum("bthk,bshk->bhts", q[:, rows].to(wide), k[:, cols].to(wide)) * scale
        seen = (cols[None, :] >= low[rows][:, None]) & (cols[None, :] <= rows[:, None])
        scores = scores.masked_fill(~seen, -torch.inf)
        largest = torch.where(seen.any(1), scores.amax(-1), 0.0)
        weights = (scores - largest.detach()[..., None]).exp()
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total == 0, 1.0, total)
        lse = torch.where(seen.any(1), total[..., 0], 1.0).log() + largest.detach()
        lse = torch.where(seen.any(1), lse, -torch.inf)
        o = torch.einsum("bhts,bshv->bthv", weights.to(v.dtype), v[:, cols])
        outs.append((o, lse.transpose(1, 2), largest.transpose(1, 2)))
    o, lse, largest = (torch.cat(parts, 1) for parts in zip(*outs, strict=True))
    return o, lse, largest


def delta_rule_recurrent(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, g: Tensor | None = None, scale: float,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """u_t = beta_t (v_t - exp(g_t) S_{t-1}' k_t), S_t = exp(g_t) S_{t-1} + k_t u_t', o_t = scale S_t' q_t.

    Shapes as in `linear_attention_recurrent`; beta (batch, seqlen, heads).
    """
    heads = v.shape[2]
    q, k = (_for_heads(x, heads) for x in (q, k))
    state = q.new_zeros(v.shape[0], heads, q.shape[3], v.shape[3]) if initial is None else initial.to(q.dtype)
    out = []
    for t in range(v.shape[1]):
        if g is not None:
            state = state * g[:, t].to(q.dtype).exp()[..., None, None]
        known = (k[:, t, :, :, None] * state).sum(2)
        u = beta[:, t].to(q.dtype)[..., None] * (v[:, t] - known)
        state = state + k[:, t, :, :, None] * u[:, :, None, :]
        out.append((q[:, t, :, :, None] * state).sum(2) * scale)
    return (torch.stack(out, 1) if out else torch.empty_like(v)), state


@without_autocast
def delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, g: Tensor | None = None, scale: float,
    initial: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same chunk by chunk (arXiv 2412.06464, section 3.3): a yardstick, and what a CPU runs.

    Gates, the triangular system and the state are float32 (float64 where q is); operands of products are rounded.
    """
    heads, dtype = v.shape[2], q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (_for_heads(x, heads).transpose(1, 2) for x in (q, k, v))  # (b, h, t, d)
    gates = q.new_zeros(q.shape[:3], dtype=wide) if g is None else g.transpose(1, 2).to(wide).clamp_min(-88.0)
    strength = beta.transpose(1, 2).to(wide)
    shape = (*v.shape[:2], q.shape[3], v.shape[3])
    state = q.new_zeros(shape, dtype=wide) if initial is None else initial.to(wide)
    out = []
    for t in range(0, v.shape[2], chunk):
        qc, kc, vc = (x[:, :, t : t + chunk] for x in (q, k, v))
        b = gates[:, :, t : t + chunk].cumsum(-1)
        bc = strength[:, :, t : t + chunk, None]
        causal = torch.ones(b.shape[-1], b.shape[-1], dtype=torch.bool, device=b.device).tril()
        decay = (b[..., :, None] - b[..., None, :]).masked_fill(~causal, -torch.inf).exp()
        system = (kc @ kc.mT).to(wide) * decay * bc
        system = system.tril(-1) + torch.eye(b.shape[-1], dtype=wide, device=b.device)
        right = torch.cat([vc.to(wide) * bc, kc.to(wide) * bc * b.exp()[..., None]], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).to(dtype)
        fresh, known = solved.split([v.shape[3], k.shape[3]], -1)
        u = fresh.to(wide) - (known @ state.to(dtype)).to(wide)
        scores = ((qc @ kc.mT).to(wide) * decay * scale).to(dtype)
        inter = (qc @ state.to(dtype)).to(wide) * (b.exp() * scale)[..., None]
        out.append(((scores @ u.to(dtype)).to(wide) + inter).to(dtype))
        left = (u * (b[..., -1:] - b).exp()[..., None]).to(dtype)
        state = state * b[..., -1:, None].exp() + (kc.mT @ left).to(wide)
    o = torch.cat(out, 2) if out else v
    return o.transpose(1, 2), state


def gla_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = diag(exp(g_t)) S_{t-1} + k_t v_t', o_t = scale S_t' q_t (arXiv 2312.06635, section 4), step by step.

    q, k and the logarithms of gates g (batch, seqlen, heads, K); v (batch, seqlen, heads, V).
    """
    heads = v.shape[2]
    state = q.new_zeros(v.shape[0], heads, q.shape[3], v.shape[3]) if initial is None else initial.to(q.dtype)
    out = []
    for t in range(v.shape[1]):
        state = state * g[:, t].to(q.dtype).exp()[..., None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append((q[:, t, :, :, None] * state).sum(2) * scale)
    return (torch.stack(out, 1) if out else torch.empty_like(v)), state


@without_autocast
def gla_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float, initial: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """The same chunk by chunk: a yardstick, and what a CPU runs.

    Pairs of steps by levels, as `gla_kernels` has them: no exponent is above 0. Gates and the state are float32
    (float64 where q is), operands of products are rounded.
    """
    dtype = q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))  # (b, h, t, d)
    gates = g.to(wide).clamp_min(-88.0)
    shape = (*v.shape[:2], q.shape[3], v.shape[3])
    state = q.new_zeros(shape, dtype=wide) if initial is None else initial.to(wide)
    out = []
    for t in range(0, v.shape[2], chunk):
        qc, kc, vc = (x[:, :, t : t + chunk] for x in (q, k, v))
        b = gates[:, :, t : t + chunk].cumsum(-2)
        steps = torch.arange(b.shape[2], device=b.device)
        apart = steps[:, None] ^ steps
        pairs = torch.diag_embed((qc.to(wide) * kc.to(wide)).sum(-1))
        for level in range((b.shape[2] - 1).bit_length()):
            middle = ((steps >> level + 1 << level + 1) + (1 << level) - 1).clamp_max(b.shape[2] - 1)
            second = (steps >> level & 1 == 1)[:, None]
            anchor = b[:, :, middle]
            near = torch.where(second, b - anchor, anchor - b).exp()
            x = (torch.where(second, qc, kc).to(wide) * near).to(dtype)
            pairs = pairs + (x @ x.mT).to(wide).masked_fill(apart >> level != 1, 0.0).tril(-1)
        inter = (qc.to(wide) * b.exp() * scale).to(dtype) @ state.to(dtype)
        out.append((((pairs * scale).to(dtype) @ vc).to(wide) + inter.to(wide)).to(dtype))
        left = (kc.to(wide) * (b[:, :, -1:] - b).exp()).to(dtype)
        state = state * b[:, :, -1].exp()[..., None] + (left.mT @ vc).to(wide)
    o = torch.cat(out, 2) if out else v
    return o.transpose(1, 2), state


def softmax(x: Tensor) -> Tensor:
    """exp(x - max) / sum over the last dimension."""
    if not x.shape[-1]:
        return x
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y if weight is None else y * weight


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias."""
    x = x - x.mean(-1, keepdim=True)
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU without its products (arXiv 2002.05202): gate * sigmoid(gate) * up."""
    return gate * torch.sigmoid(gate) * up


def gelu_mul(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """GEGLU without its products: gelu(gate) * up."""
    return (gelu_tanh(gate) if approximate == "tanh" else torch.nn.functional.gelu(gate)) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """torch's, with its gradient beyond 5e19 too, where torch multiplies an infinite square by zero."""
    near = torch.where(x.isfinite(), x.clamp(-1e4, 1e4), x)
    return torch.where(near == x, torch.nn.functional.gelu(near, approximate="tanh"), torch.nn.functional.relu(x))


_MASK32 = 0xFFFFFFFF


def philox(seed: int, low: Tensor, high: Tensor) -> Tensor:
    """The first word of Philox-4x32-10 (Salmon et al., SC 2011) for counters (low, high, 0, 0), in int64."""
    c0, c1 = low.long() & _MASK32, high.long() & _MASK32
    c2 = c3 = torch.zeros_like(c0)
    key0, key1 = seed & _MASK32, (seed >> 32) & _MASK32

    def multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
        """High and low word of a 64-bit product, in pieces that int64 holds."""
        b_low, b_high = b & 0xFFFF, b >> 16
        part = a * b_low
        upper = a * b_high + (part >> 16)
        return upper >> 16, ((upper << 16) | (part & 0xFFFF)) & _MASK32

    for _ in range(10):
        high0, low0 = multiply(0xD2511F53, c0)
        high2, low2 = multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ key0, low2, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & _MASK32, (key1 + 0xBB67AE85) & _MASK32
    return c0


def dropout_keep(seed: int, rows: int, cols: int, p: float, device: torch.device | str = "cpu") -> Tensor:
    """Which elements of (rows, cols) dropout keeps: counters are (column, row), kept where the word >= p * 2^32."""
    col = torch.arange(cols, device=device)[None, :].expand(rows, cols)
    row = torch.arange(rows, device=device)[:, None].expand(rows, cols)
    return philox(seed, col, row) >= dropout_limit(p)


def dropout_limit(p: float) -> int:
    """The word below which an element is dropped."""
    return min(_MASK32, round(p * 2**32))
