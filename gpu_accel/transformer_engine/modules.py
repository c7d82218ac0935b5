"""Layers around `Linear` under Transformer Engine's names: `LayerNormLinear`, `LayerNormMLP`, `TransformerLayer`.

Norms, activations, softmax and sums of residuals stay in high precision; only products are quantised. Under a recipe
the norm and the activation of the combined layers are computed while their results are quantised (`sources.py`), so
those are never written in 16 bits; without one, or where hooks or another dtype want the results, they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import flash_attn_func
from gpu_accel.flash_attention3.problem import normalise_window
from gpu_accel.thunderkittens.rows import layer_norm, rms_norm
from gpu_accel.transformer_engine import taped
from gpu_accel.transformer_engine.activations import ACTIVATIONS, activate
from gpu_accel.transformer_engine.checks import (
    check_between,
    check_choice,
    check_first,
    check_flag,
    check_floats,
    check_one_device,
    check_parameters,
    check_params_dtype,
    check_rows,
    check_size,
)
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.parallel import Parallel, enter, parallel, refuse, shared
from gpu_accel.transformer_engine.quantize_launch import Source
from gpu_accel.transformer_engine.quantizer import DTYPES
from gpu_accel.transformer_engine.recipes import Recipe

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, computed in float32, in the dtype of its input.

    zero_centered_gamma: the weight is 1 + what is stored.
    """

    def __init__(
        self, size: int, normalization: str = "LayerNorm", *, eps: float = 1e-5, zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if normalization not in NORMALIZATIONS:
            raise InvalidInputError(
                f"normalization must be one of {', '.join(NORMALIZATIONS)}, got {normalization!r}"
            )  # fmt: skip
        check_size("size of a norm", size)
        check_between("eps", eps, 0)
        check_flag("zero_centered_gamma", zero_centered_gamma)
        check_params_dtype(params_dtype)
        self.size, self.eps, self.normalization, self.zero_centered = size, eps, normalization, zero_centered_gamma
        self.parallel = Parallel()  # of the column-parallel layer behind it, whose ranks make parts of its gradients
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = nn.Parameter(start(size, dtype=params_dtype, device=device))
        self.bias: nn.Parameter | None = None
        if normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(size, dtype=params_dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        gamma, bias = self.gamma(), shared(self.bias, self.parallel)
        with torch.autocast(x.device.type, enabled=False):
            if x.is_cuda and x.dtype in DTYPES:  # one kernel each way
                return rms_norm(x, gamma, eps=self.eps) if bias is None else layer_norm(x, gamma, bias, eps=self.eps)
            if bias is None:
                y = F.rms_norm(x.float(), (self.size,), gamma.float(), self.eps)
            else:
                y = F.layer_norm(x.float(), (self.size,), gamma.float(), bias.float(), self.eps)
        return y.to(x.dtype)

    def check(self, x: Tensor) -> None:
        check_rows("x", x, self.size)
        check_parameters(x, weight=(self.weight, (self.size,)), bias=(self.bias, (self.size,)))

    def gamma(self) -> Tensor:
        """What normalised values are multiplied with."""
        weight = shared(self.weight, self.parallel)
        assert weight is not None
        return weight.float() + 1 if self.zero_centered else weight

    def source(self) -> Source:
        """This norm as something to quantise."""
        kind, beta = ("rms", None) if self.bias is None else ("layer", shared(self.bias, self.parallel))
        return Source(kind, self.gamma(), beta, self.eps)

    def hooked(self) -> bool:
        return any((self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks))

    def extra_repr(self) -> str:
        return f"{self.size}, {self.normalization}, eps={self.eps}"


def _join(norm: Norm, linear: Linear, returned: bool) -> None:
    """Tell a norm and the layer behind it that they belong together: what they get is gathered before the norm."""
    if returned:
        refuse(linear.parallel, "return_layernorm_output", "with sequence_parallel a rank has a part of it only")
    norm.parallel, linear.entered = linear.parallel, True


def _norm_linear(norm: Norm, linear: Linear, x: Tensor, first: bool | None) -> Tensor:
    """linear(norm(x)), in one go where that can be."""
    norm.check(x)  # before anything looks at what it is
    recipe = linear.active_recipe()
    fuses = recipe is not None and not norm.hooked() and linear.fuses(x, recipe)
    if fuses:
        check_first(first)
        linear.check(x)
        assert recipe is not None
        if (y := linear._of_codes(x, recipe, first, norm.source())) is not None:
            return y
    x = enter(x, linear.parallel)
    if recipe is None or not fuses:
        return linear(norm(x), first)
    check_first(first)
    return linear._quantized(x, recipe, first, norm.source())


def _activated_linear(activation: str, linear: Linear, x: Tensor, first: bool | None) -> Tensor:
    """linear(activation(x)), in one go where that can be."""
    recipe = linear.active_recipe()
    if recipe is None or not linear.fuses(x, recipe):
        return linear(activate(x, activation, kernels=False if linear.backend == "reference" else None), first)
    check_first(first)
    linear.check(x)
    return linear._done(x, recipe, first, Source(activation))


class LayerNormLinear(nn.Module):
    """A norm and a linear layer, as `transformer_engine.pytorch.LayerNormLinear`: (..., in) to (..., out_features).

    Args:
        eps, normalization ("LayerNorm" or "RMSNorm"), zero_centered_gamma (the weight is 1 + what is stored): of the
            norm.
        return_layernorm_output: returns (y, output of the norm).
        in_features, out_features and the rest: as of `Linear`.

    Raises:
        InvalidInputError, UnsupportedError as `Linear`, and UnsupportedError for parallel_mode "row".
    """

    def __init__(
        self, in_features: int, out_features: int, *, eps: float = 1e-5, bias: bool = True,
        normalization: str = "LayerNorm", zero_centered_gamma: bool = False, return_layernorm_output: bool = False,
        params_dtype: torch.dtype | None = None, device: torch.device | str | None = None,
        recipe: Recipe | None = None, backend: str = "auto", parallel_mode: str | None = None, tp_group: Any = None,
        sequence_parallel: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_flag("return_layernorm_output", return_layernorm_output)
        if parallel_mode == "row":
            raise UnsupportedError("parallel_mode 'row' needs whole rows for the norm: use 'column'")
        split: dict[str, Any] = dict(
            parallel_mode=parallel_mode, tp_group=tp_group, sequence_parallel=sequence_parallel
        )  # fmt: skip
        common: dict[str, Any] = dict(params_dtype=params_dtype, device=device)
        self.norm = Norm(
            in_features, normalization, eps=eps, zero_centered_gamma=zero_centered_gamma, **common
        )  # fmt: skip
        self.linear = Linear(in_features, out_features, bias, recipe=recipe, backend=backend, **split, **common)
        _join(self.norm, self.linear, return_layernorm_output)
        self.return_layernorm_output = return_layernorm_output

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if not self.return_layernorm_output:
            return _norm_linear(self.norm, self.linear, x, is_first_microbatch)
        normed = self.norm(x)
        return self.linear(normed, is_first_microbatch), normed


def _modes(split: bool, group: Any, sequence: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a column-parallel layer and of the row-parallel one behind it; of plain ones unless `split`."""
    split, sequence = check_flag("set_parallel_mode", split), check_flag("sequence_parallel", sequence)
    if not split:
        if group is not None or sequence:
            raise InvalidInputError("tp_group and sequence_parallel go with set_parallel_mode=True")
        return {}, {}
    more = dict(tp_group=group, sequence_parallel=sequence)
    return dict(parallel_mode="column", **more), dict(parallel_mode="row", **more)


class LayerNormMLP(nn.Module):
    """A norm, a linear layer, an activation, a linear layer: (..., hidden_size) to the same.

    ffn_hidden_size: width between the layers. activation: "gelu" (tanh), "relu", "silu", "srelu", or gated "geglu",
    "reglu", "swiglu", whose first layer is twice as wide. Other arguments and errors as of `LayerNormLinear`.
    set_parallel_mode, tp_group, sequence_parallel: the two split over ranks, see `parallel.py`. The part of a gated
    first layer is a rank's share of the gate and, behind it, that of the value.
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, *, eps: float = 1e-5, bias: bool = True,
        normalization: str = "LayerNorm", activation: str = "gelu", zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False, params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None, recipe: Recipe | None = None, backend: str = "auto",
        set_parallel_mode: bool = False, tp_group: Any = None, sequence_parallel: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_choice("activation", activation, ACTIVATIONS)
        check_flag("return_layernorm_output", return_layernorm_output)
        check_size("hidden_size", hidden_size)
        check_size("ffn_hidden_size", ffn_hidden_size)
        common: dict[str, Any] = dict(params_dtype=params_dtype, device=device)
        quantised: dict[str, Any] = dict(recipe=recipe, backend=backend, **common)
        self.norm = Norm(
            hidden_size, normalization, eps=eps, zero_centered_gamma=zero_centered_gamma, **common
        )  # fmt: skip
        self.activation, (_, widening) = activation, ACTIVATIONS[activation]
        check_flag("set_parallel_mode", set_parallel_mode)
        first, second = _modes(set_parallel_mode, tp_group, sequence_parallel)
        self.fc1 = Linear(hidden_size, widening * ffn_hidden_size, bias, **first, **quantised)
        self.fc2 = Linear(ffn_hidden_size, hidden_size, bias, **second, **quantised)
        _join(self.norm, self.fc1, return_layernorm_output)
        self.return_layernorm_output = return_layernorm_output

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if self.return_layernorm_output:
            normed = self.norm(x)
            hidden = self.fc1(normed, is_first_microbatch)
            return _activated_linear(self.activation, self.fc2, hidden, is_first_microbatch), normed
        hidden = _norm_linear(self.norm, self.fc1, x, is_first_microbatch)
        return _activated_linear(self.activation, self.fc2, hidden, is_first_microbatch)


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d / 2) of x (batch, seqlen, heads, d) by angles (seqlen, d / 2), as Llama does."""
    cos, sin = (f(angles.float())[None, :, None, :] for f in (torch.cos, torch.sin))
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def rotary_angles(
    seqlen: int, dim: int, *, base: float = 10000.0, device: torch.device | str | None = None
) -> Tensor:  # fmt: skip
    """(seqlen, dim / 2) float32: position times base ** (-2 i / dim)."""
    check_size("seqlen", seqlen)
    if check_size("dim", dim) % 2:
        raise InvalidInputError(f"rotary embeddings need an even head dimension, got {dim}")
    check_between("base", base, 1)
    inverse = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    return torch.arange(seqlen, device=device, dtype=torch.float32)[:, None] * inverse


class DotProductAttention(nn.Module):
    """Attention of `flash_attention3` in bfloat16 or float16; float32 inputs go through its own float32 path.

    Shapes (batch, seqlen, heads, head_dim), or (seqlen, batch, heads, head_dim) with qkv_format="sbhd". Masks:
    "causal" and "no_mask". softmax_scale, window_size, backend: those of `flash_attn_func`.

    Raises:
        InvalidInputError: shapes, dtypes, another format. UnsupportedError: another mask, or dropout, which the kernels
        have not; what `flash_attn_func` raises.
    """

    def __init__(
        self, *, attn_mask_type: str = "causal", qkv_format: str = "sbhd", softmax_scale: float | None = None,
        attention_dropout: float = 0.0, window_size: tuple[int, int] = (-1, -1), backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        if attn_mask_type not in ("causal", "no_mask"):
            raise UnsupportedError(f"attn_mask_type must be 'causal' or 'no_mask', got {attn_mask_type!r}")
        if qkv_format not in ("sbhd", "bshd"):
            raise InvalidInputError(f"qkv_format must be 'sbhd' or 'bshd', got {qkv_format!r}")
        if check_between("attention_dropout", attention_dropout, 0, 1):
            raise UnsupportedError("the attention kernels have no dropout: attention_dropout must be 0")
        left, right = normalise_window(window_size, attn_mask_type == "causal")
        self._bounds, self._kinds = (int(left), int(right)), taped.Kinds()
        self.causal, self.qkv_format = attn_mask_type == "causal", qkv_format
        self.softmax_scale, self.window_size, self.backend = softmax_scale, window_size, backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(..., heads * head_dim), the leading dimensions those of q."""
        sbhd = self.qkv_format == "sbhd"
        for name, t in (("q", q), ("k", k), ("v", v)):
            check_floats(name, t)
            if t.dim() != 4:
                order = "seqlen, batch" if sbhd else "batch, seqlen"
                raise InvalidInputError(f"{name} must be ({order}, heads, head_dim), got shape {tuple(t.shape)}")
        check_one_device(q=q, k=k, v=v)
        if sbhd:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        out = self._played(q, k, v)
        if out is None:
            out = flash_attn_func(
                q, k, v, causal=self.causal, softmax_scale=self.softmax_scale, window_size=self.window_size,
                backend=self.backend,
            )  # fmt: skip
        return (out.transpose(0, 1) if sbhd else out).flatten(2)

    def _played(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """The same from a tape, where there is one of such a step (`taped.py`)."""
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else float(self.softmax_scale)
        return taped.attention(self._kinds, q, k, v, (scale, *self._bounds, 0.0, False, self.backend))


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then + MLP(norm(.)); the four products are those of `Linear`.

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, layernorm_epsilon, normalization, activation,
            bias, self_attn_mask_type, attn_input_format ("sbhd": (seqlen, batch, hidden), or "bshd"): as in Transformer
            Engine. hidden_dropout: its default is 0.1, here it is 0, and so is that of attention, which has none.
        backend: of the products; "reference" is also that of attention, whose own choice it is otherwise.
        set_parallel_mode, tp_group, sequence_parallel: split over ranks as in Transformer Engine: heads and the width
            of the perceptron, and with sequence_parallel the first dimension in between ("sbhd" only).

    Raises:
        InvalidInputError: heads that do not divide. UnsupportedError: dropout in attention, other masks.
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, *, num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.0, attention_dropout: float = 0.0,
        self_attn_mask_type: str = "causal", window_size: tuple[int, int] = (-1, -1),
        zero_centered_gamma: bool = False, normalization: str = "LayerNorm", activation: str = "gelu",
        bias: bool = True, attn_input_format: str = "sbhd", params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None, recipe: Recipe | None = None, backend: str = "auto",
        set_parallel_mode: bool = False, tp_group: Any = None, sequence_parallel: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_size("hidden_size", hidden_size)
        check_size("num_attention_heads", num_attention_heads)
        check_size("num_gqa_groups", groups)
        check_between("layernorm_epsilon", layernorm_epsilon, 0)
        check_between("hidden_dropout", hidden_dropout, 0, 1)
        if hidden_size % num_attention_heads or num_attention_heads % groups:
            raise InvalidInputError(
                f"hidden_size {hidden_size} must be a multiple of num_attention_heads {num_attention_heads}, and that "
                f"one of num_gqa_groups {groups}"
            )
        if check_flag("sequence_parallel", sequence_parallel) and attn_input_format != "sbhd":
            raise UnsupportedError('sequence_parallel cuts the first dimension: use attn_input_format="sbhd"')
        self.head_dim, self.hidden_size = hidden_size // num_attention_heads, hidden_size
        first, second = _modes(set_parallel_mode, tp_group, sequence_parallel)
        split = parallel(first.get("parallel_mode"), tp_group, sequence_parallel)
        self.heads = split.part("num_attention_heads", num_attention_heads)
        self.groups = split.part("num_gqa_groups", groups)
        quantised: dict[str, Any] = dict(params_dtype=params_dtype, device=device, recipe=recipe, backend=backend)
        norms: dict[str, Any] = dict(
            eps=layernorm_epsilon, normalization=normalization, zero_centered_gamma=zero_centered_gamma
        )  # fmt: skip
        self.qkv = LayerNormLinear(
            hidden_size, (num_attention_heads + 2 * groups) * self.head_dim, bias=bias, **first, **norms, **quantised
        )  # fmt: skip
        self.attention = DotProductAttention(
            attn_mask_type=self_attn_mask_type, qkv_format=attn_input_format, attention_dropout=attention_dropout,
            window_size=window_size, backend="reference" if backend == "reference" else "auto",
        )  # fmt: skip
        self.proj = Linear(hidden_size, hidden_size, bias, **second, **quantised)
        self.mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, bias=bias, activation=activation, set_parallel_mode=set_parallel_mode,
            tp_group=tp_group, sequence_parallel=sequence_parallel, **norms, **quantised,
        )  # fmt: skip
        self.dropout = nn.Dropout(hidden_dropout)

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor | None = None, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """(seqlen, batch, hidden) or, for "bshd", (batch, seqlen, hidden); the same shape comes back.

        rotary_pos_emb: (seqlen, head_dim / 2) angles, see `rotary_angles`.
        """
        x = hidden_states
        check_rows("hidden_states", x, self.hidden_size)
        if x.dim() != 3:
            order = "seqlen, batch" if self.attention.qkv_format == "sbhd" else "batch, seqlen"
            raise InvalidInputError(f"hidden_states must be ({order}, hidden), got shape {tuple(x.shape)}")
        sizes = [self.heads, self.groups, self.groups]
        packed = self.qkv(x, is_first_microbatch)
        q, k, v = packed.unflatten(-1, (sum(sizes), self.head_dim)).split(sizes, -2)
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb
            check_rows("rotary_pos_emb", angles, self.head_dim // 2)
            check_one_device(hidden_states=x, rotary_pos_emb=angles)
            length = q.shape[0] if self.attention.qkv_format == "sbhd" else q.shape[1]
            if angles.dim() != 2 or angles.shape[0] not in (1, length) or self.head_dim % 2:
                raise InvalidInputError(
                    f"rotary_pos_emb must be ({length}, {self.head_dim / 2:g}), got shape {tuple(angles.shape)}"
                )
            if self.attention.qkv_format == "sbhd":
                q, k = (apply_rotary(t.transpose(0, 1), angles).transpose(0, 1) for t in (q, k))
            else:
                q, k = apply_rotary(q, angles), apply_rotary(k, angles)
        x = x + self.dropout(self.proj(self.attention(q, k, v), is_first_microbatch))
        return x + self.dropout(self.mlp(x, is_first_microbatch))
