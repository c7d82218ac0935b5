"""`gather_in_fp8`: weights that FSDP2 shards in high precision and gathers as FP8 codes, with one scale on all ranks.

    convert(model, Float8CurrentScaling())
    gather_in_fp8(model)                    # before fully_shard
    for layer in model.layers:
        fully_shard(layer)
    ...
    optimizer.step()
    precompute_scales(model)                # not needed: one small sum over ranks for all weights, not one each

A rank quantises its rows of a weight, and the codes are gathered: a byte a value, where bfloat16 has two. What arrives
is a `QuantizedTensor`, bit for bit what quantising the whole weight would give. For that, ranks must agree on the scale
of a tensor before they cast (TransformerEngine#1688 and pull request 2245 are about shards that did not): the largest
magnitude is reduced over the mesh. 128 x 128 blocks need no such thing where each rank has whole blocks. The copy for
the backward pass is the same codes turned round, made when that pass has gathered the weight again; so no rank keeps a
whole weight in between.

MX, NVFP4 and 1 x 128 blocks round the two copies of a weight differently: both would have to travel, or what they are
made from. They are refused; FSDP2 then gathers such weights as it does others.

What holds the parts is a `ShardedWeight`: a tensor that computes like any other, which is what optimizers and
checkpoints see, and has the two functions that FSDP2 looks for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.transformer_engine.context import check_recipe, recomputing
from gpu_accel.transformer_engine.delayed import Histories
from gpu_accel.transformer_engine.quantize_launch import Three, as_matrix, on_device, plain_tile, quick, turned_codes
from gpu_accel.transformer_engine.quantizer import choose_backend, quantize, quantize_op
from gpu_accel.transformer_engine.recipes import DelayedScaling, Recipe
from gpu_accel.transformer_engine.scales import amax_bits, scale_fp32
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.sources import quickly
from gpu_accel.transformer_engine.tensor import QuantizedTensor

aten = torch.ops.aten
# what hands the values on, or makes room for new ones in the same role; everything else gives plain tensors
_KEEPS = {
    aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default, aten.empty_like.default,
    aten.new_zeros.default, aten.view.default, aten.as_strided.default, aten.slice.Tensor, aten.split.Tensor,
    aten.copy_.default, aten._pin_memory.default,
}  # fmt: skip


@dataclass(eq=False)
class Casting:
    """How a weight is cast, shared by all views of it."""

    recipe: Recipe
    changes: int = 0  # counted, so that maxima from before a change are not used
    ahead: tuple[Tensor, int] | None = None  # a maximum over all ranks that the next cast takes, and `changes` then
    scale: Tensor | None = None  # of the last forward pass, which its backward pass uses again
    # the codes and scales of this rank's rows, and what they are good for: (scale, changes). A byte a value of a shard,
    # until the weight changes, so that a backward pass and further batches of a step need not cast again
    made: tuple[Tensor, Tensor, Tensor | None, int] | None = None

    @property
    def scheme(self) -> Scheme:
        return self.recipe.scheme("weight")

    @property
    def delayed(self) -> bool:
        return isinstance(self.recipe, DelayedScaling)

    def change(self) -> None:
        """The weight is written to."""
        self.changes += 1
        self.made = None

    def unchanged(self, value: Tensor) -> bool:
        """Whether codes have been made of the weight as it is."""
        made = self.made
        return made is not None and made[3] == self.changes and made[0].shape == value.shape and (
            made[0].device == value.device
        )  # fmt: skip

    def cast(self, value: Tensor, scale: Tensor | None, backend: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """(codes, scales) of this rank's rows, and their largest magnitude where they were cast with a given scale."""
        made = self.made if self.unchanged(value) else None
        if made is not None and made[2] is scale:
            if value.is_cuda:
                for t in made[:2]:
                    t.record_stream(torch.cuda.current_stream(t.device))
            return *made[:2], None
        if backend == "portable":  # without what `quantize` checks and wraps
            arguments = (self.scheme.text, True, False, 0, None if scale is None else scale.reshape(1, 1))
            codes, scales, *_, amax = quickly(quantize_op, value)(value.detach(), *arguments)
        else:
            q = quantize(value, self.scheme, scale=scale, backend=backend)
            assert q.codes is not None and q.scales is not None
            codes, scales, amax = q.codes.view(torch.uint8), q.scales, q.seen_amax
        self.made = codes, scales, scale, self.changes
        return codes, scales, None if scale is None else amax

    def amax(self, group: Any, here: Callable[[], Tensor]) -> Tensor:
        """() float32, the largest magnitude on any rank; `here` finds this rank's."""
        if self.ahead is not None:
            (amax, changes), self.ahead = self.ahead, None
            if changes != self.changes:
                raise InvalidInputError(
                    "a weight was changed after precompute_scales: call it behind the last change of a step"
                )
            return amax
        return reduced([here()], group)[0]

    def next_scale(self, value: Tensor, group: Any, module: nn.Module, backend: str) -> Tensor:
        """() float32, the same on all ranks. A backward pass gets that of its forward pass."""
        if self.scale is not None and recomputing():
            return self.scale
        if self.delayed:
            assert isinstance(module.delayed, Histories)
            self.scale = module.delayed.weight.scale.clone()
            return self.scale
        if self.scale is not None and self.ahead is None and self.unchanged(value):
            return self.scale  # the largest magnitude is what it was
        power = self.scheme.scale == "pow2"
        amax = self.amax(group, lambda: largest(value, finite_only=True, backend=backend))
        self.scale = scale_fp32(amax, self.scheme.largest, power_of_two=power)
        return self.scale

    def enter(self, seen: Tensor, group: Any, module: nn.Module, backend: str) -> None:
        """Enter a maximum, found by the cast, in the history of delayed scaling: at once: it is that of all ranks."""
        assert isinstance(self.recipe, DelayedScaling) and isinstance(module.delayed, Histories)
        history = module.delayed.weight
        history.pending.copy_(self.amax(group, lambda: _infinite(seen)))
        history.roll(self.recipe, self.scheme.largest, kernels=backend == "portable")


class ShardedWeight(torch.Tensor):
    """A weight, or a rank's rows of one. value: the numbers. casting: what it is gathered as."""

    value: Tensor
    casting: Casting

    @staticmethod
    def __new__(cls, value: Tensor, casting: Casting):
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype,
            device=value.device,
        )  # fmt: skip

    def __init__(self, value: Tensor, casting: Casting) -> None:
        self.value, self.casting = value, casting

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.casting.scheme}, {self.value!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the plain tensor: a checkpoint does not depend on how weights travel."""
        return self.value.__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["value"], self.casting

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], casting: Any, outer_size: Any, outer_stride: Any):
        return cls(inner["value"], casting)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        first: list[ShardedWeight] = []

        def plain(t: ShardedWeight) -> Tensor:
            first.append(t)
            if func._schema.is_mutable:
                t.casting.change()
            return t.value

        plain_args, plain_kwargs = tree_map_only(ShardedWeight, plain, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func not in _KEEPS:
            return out
        casting = first[0].casting
        if func is aten.copy_.default:
            return args[0]
        if func is aten.clone.default:  # another weight from here on, such as that of a copied model
            casting = replace(casting, ahead=None, scale=None, made=None)
        return tree_map_only(Tensor, lambda t: ShardedWeight(t, casting), out)

    # -- what FSDP2 calls

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """(what is gathered along the first dimension, what `fsdp_post_all_gather` needs besides)."""
        value, casting, scheme, ranks = self.value, self.casting, self.casting.scheme, mesh.size()
        if value.shape[1:] != outer_size[1:]:
            raise UnsupportedError("weights in FP8 are gathered by rows: fully_shard must cut the first dimension")
        rows = -(-outer_size[0] // ranks)  # of the first rank; others may have fewer, and pad
        if scheme.block[0] and ranks > 1 and outer_size[0] % (ranks * scheme.block[0]):
            raise UnsupportedError(
                f"a weight of {outer_size[0]} rows on {ranks} ranks would cut blocks of {scheme.block[0]} rows: leave "
                f"this layer out of gather_in_fp8 with `filter`"
            )
        scale, backend = None, _backend(module, value)
        again = casting.scale is not None and recomputing()
        if not scheme.block[0]:
            scale = casting.next_scale(value, mesh.get_group(), module, backend)
        codes, scales, seen = casting.cast(value, scale, backend)
        if casting.delayed and module.training and not again:
            assert seen is not None
            casting.enter(seen, mesh.get_group(), module, backend)
        if codes.shape[0] < rows:
            codes = nn.functional.pad(codes, (0, 0, 0, rows - codes.shape[0]))
        if not scheme.block[0] or ranks == 1:  # FSDP2 hands on the first tensor only where there is nothing to gather
            return (codes,), (outer_size, scales)
        return (codes, scales), (outer_size, None)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight as a `QuantizedTensor`, in memory that FSDP2 takes and gives; or into `out` again."""
        shape, scales = metadata
        scheme = self.casting.scheme
        codes = outputs[0].view(-1, shape[1])[: shape[0]].view(_dtype(scheme))
        if scales is None:
            scales = outputs[1]
        elif scales.is_cuda:  # made on the stream that copies
            scales.record_stream(torch.cuda.current_stream(scales.device))
        if out is not None:
            whole = local(out)
            assert isinstance(whole, QuantizedTensor)
            whole.codes, whole.scales = codes, scales
            return None
        return QuantizedTensor({"codes": codes, "scales": scales}, scheme, shape, param_dtype), ()


torch.serialization.add_safe_globals([ShardedWeight])


def _dtype(scheme: Scheme) -> torch.dtype:
    return torch.float8_e5m2 if scheme.element == "e5m2" else torch.float8_e4m3fn


def _backend(module: nn.Module, value: Tensor) -> str:
    """The quantiser's backend of a layer: Hopper's products have no say in it."""
    backend = getattr(module, "backend", "auto")
    return choose_backend("auto" if backend == "hopper" else backend, value, "a layer")


def is_dtensor(t: Any) -> bool:
    """Whether t is a DTensor, without importing what that is."""
    return hasattr(t, "_local_tensor")


def local(t: Any) -> Tensor:
    """This rank's part of a DTensor, any other tensor as it is."""
    return t._local_tensor if is_dtensor(t) else t


def plain(t: Tensor) -> Tensor:
    """The numbers of a weight, or of this rank's part of it, as a tensor that kernels read."""
    t = local(t)
    return t.value if isinstance(t, ShardedWeight) else t


def changed(t: Tensor) -> None:
    """Note that a kernel has written to `plain(t)`."""
    t = local(t)
    if isinstance(t, ShardedWeight):
        t.casting.change()


def largest(x: Tensor, *, finite_only: bool, backend: str = "auto") -> Tensor:
    """() float32, the largest magnitude; NaN counts as Inf, and with `finite_only` neither counts."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    if choose_backend(backend, x, "a maximum") == "portable":
        from gpu_accel.transformer_engine.quantize_kernels import _amax_kernel

        bits, m = x.new_zeros(1, dtype=torch.int32), as_matrix(x)
        bm, bk, warps = plain_tile(m, False, 8192)
        tiles = -(-m.cols // bk)
        place = (m.rows, m.cols, m.inner, m.s_outer, m.s_row, m.s_col, tiles)
        options = dict(
            BM=bm, BK=bk, AXIS=0, FINITE=finite_only, HADAMARD=False, ROW=True, COL=False, NESTED=m.nested,
            EVEN=m.rows % bm == 0 and m.cols % bk == 0, SOURCE="", GATED=False, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
        with on_device(x):
            quick(_amax_kernel, -(-m.rows // bm) * tiles, (x, x, x, x, x, bits, bits, x, *place), options)
    else:
        bits = amax_bits(x, finite_only=finite_only).amax().reshape(1)
    return _infinite(bits.view(torch.float32)[0])


def _infinite(amax: Tensor) -> Tensor:
    """A maximum in which NaN counts as Inf, which no backend loses in a reduction."""
    return amax.float().nan_to_num(nan=float("inf"), posinf=float("inf"))


def reduced(maxima: list[Tensor], group: Any) -> list[Tensor]:
    """The largest of each on any rank, in one call."""
    together = torch.stack(maxima) if len(maxima) > 1 else maxima[0].reshape(1)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
    return list(together.unbind())


# -- what `Linear` does with a weight that has been gathered


def whole_rows(weight: QuantizedTensor) -> Three:
    """The row-wise copy, for the forward pass."""
    assert weight.codes is not None and weight.scales is not None
    return weight.codes.view(torch.uint8), weight.scales, weight.scales.new_empty(0)


def whole_columns(weight: QuantizedTensor) -> Three:
    """The column-wise copy, for the backward pass: the same codes, since blocks are square or the whole."""
    codes, scales, none = whole_rows(weight)
    return turned_codes(codes), scales.t().contiguous(), none


# -- what users call


def _refusal(recipe: Recipe) -> str:
    """Why weights of a recipe are not gathered as codes, "" where they are."""
    scheme = recipe.scheme("weight")
    if scheme != recipe.scheme_columnwise("weight") or scheme.element not in ("e4m3", "e5m2"):
        return "its weights are not e4m3 or e5m2"
    if scheme.block not in ((0, 0), (128, 128)):
        return "the two copies of a weight have different codes, so both would have to travel"
    return ""


def gather_in_fp8(
    model: nn.Module, recipe: Recipe | None = None, filter: Callable[[str, nn.Module], bool] | None = None
) -> nn.Module:
    """Let FSDP2 gather the weights of the layers of this package as FP8 codes; before `fully_shard`. Returns the model.

    Args:
        recipe: DelayedScaling, Float8CurrentScaling, or Float8BlockScaling with 128 x 128 blocks for weights; None is
            the recipe of each layer. Layers without a recipe of their own get it. An `autocast` around a call may have
            another one with the same format for weights.
        filter: called with the full name and the layer, False leaves it out. None takes all `Linear`, those within
            other layers of this package included.

    Parameters stay in the dtype they have, and are quantised from it whatever the param_dtype of a mixed-precision
    policy, which is that of their gradients. Delayed scaling enters the maximum of a weight when it is gathered for a
    forward pass in training, over the ranks it is sharded on; `amax_reduction_group` is about the rest.

    Raises:
        InvalidInputError: no layer to be gathered so, no recipe, or parameters that are sharded already.
        UnsupportedError: recipes whose two copies differ, and weights that other modules read as well.
    """
    from gpu_accel.transformer_engine.linear import Linear

    check_recipe(recipe)
    chosen = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, Linear) and (filter is None or filter(name, layer))
    ]
    if not chosen:
        raise InvalidInputError("no layer of this package to gather in FP8: convert(model) makes them")
    mine = {id(layer) for _, layer in chosen}
    elsewhere = {id(p) for m in model.modules() if id(m) not in mine for p in m.parameters(recurse=False)}
    made: dict[int, nn.Parameter] = {}
    for name, layer in chosen:
        its = layer.recipe if recipe is None else recipe
        if its is None:
            raise InvalidInputError(f"{name or 'the layer'} has no recipe: give one, gather_in_fp8(model, recipe)")
        if why := _refusal(its):
            raise UnsupportedError(f"weights of {type(its).__name__} cannot be gathered in FP8: {why}")
        if is_dtensor(layer.weight):
            raise InvalidInputError(f"{name or 'the layer'} is sharded already: call gather_in_fp8 before fully_shard")
        if id(layer.weight) in elsewhere:
            raise UnsupportedError(f"the weight of {name} is that of another module too: leave it out with `filter`")
    for _, layer in chosen:
        its = layer.recipe if recipe is None else recipe
        assert its is not None
        if layer.recipe is None:
            layer.recipe = its
        if isinstance(its, DelayedScaling):
            layer.make_histories(its.amax_history_len).gathered = True
        old = layer.weight
        if isinstance(old, ShardedWeight):
            continue
        if id(old) not in made:
            weight = ShardedWeight(old.detach(), Casting(its))
            made[id(old)] = nn.Parameter(weight, requires_grad=old.requires_grad)
        layer.weight = made[id(old)]
    return model


def precompute_scales(model: nn.Module) -> None:
    """Find the largest magnitudes of all weights that are gathered in FP8, on all ranks, in one call for each mesh.

    Behind optimizer.step(): the next forward pass takes them, and sends nothing of its own. All ranks must call it.
    """
    found: dict[Any, list[ShardedWeight]] = {}
    for parameter in model.parameters():
        part = local(parameter)
        if isinstance(part, ShardedWeight) and part is not parameter and not part.casting.scheme.block[0]:
            found.setdefault(_group_of(parameter), []).append(part)
    with torch.no_grad():
        for group, parts in found.items():
            maxima = [largest(one.value, finite_only=not one.casting.delayed) for one in parts]
            for one, amax in zip(parts, reduced(maxima, group), strict=True):
                one.casting.ahead = (amax, one.casting.changes)
    if not found:
        warnings.warn("no weight is gathered in FP8 with a scale per tensor: nothing to compute", stacklevel=2)


def _group_of(parameter: Any) -> Any:
    """The process group over which FSDP2 shards a parameter."""
    mesh, placements = parameter.device_mesh, parameter.placements
    cut: Iterable[int] = (i for i, one in enumerate(placements) if one.is_shard())
    return mesh.get_group(next(iter(cut)))
