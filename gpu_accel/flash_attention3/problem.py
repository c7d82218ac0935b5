"""What is being asked for: one frozen description of an attention call, and the checks made before any launch.

Backends look at a `Problem` only, so whether one can run something is a question that needs no tensors.
"""

from __future__ import annotations

import numbers
import operator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal float32 numbers
LARGEST_SOFTCAP = 2.0**16  # with which a score errs by up to 2**-7, see check_softcap
_NO_BOUND = 1 << 30  # windows are clamped to this, so that index arithmetic stays in int32


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention call. Lengths of packed (varlen) inputs are totals over the batch."""

    device_type: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    varlen: bool
    requires_grad: bool = False
    deterministic: bool = False  # of the backward: the same inputs give the same bits
    features: frozenset[str] = frozenset()  # names of arguments beyond these that are in use: see features.py
    block_size: tuple[int, int] = (0, 0)  # queries and keys of a block of block_mask

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // max(1, self.heads_kv)

    def __str__(self) -> str:
        heads = f"H{self.heads}" + (f"kv{self.heads_kv}" if self.heads_kv != self.heads else "")
        dim = f"D{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        mask = "causal" if self.causal else "full"
        if self.window_left >= 0 or (self.window_right >= 0 and not self.causal):
            mask += f"-window({self.window_left},{self.window_right})"
        mask += "".join(f"+{name}" for name in sorted(self.features))
        kind = "packed " if self.varlen else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{kind}B{self.batch}-Sq{self.seqlen_q}-Sk{self.seqlen_k}-{heads}-{dim}-{mask} {dtype}"


def _plain(name: str, x: object) -> object:
    """A tensor of one element as its Python value (which waits for its device); anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    if x.requires_grad:
        raise InvalidInputError(f"{name} gets no gradient: pass {name}.item(), not a tensor that requires one")
    if x.dim() != 0 or x.is_meta:
        raise InvalidInputError(f"{name} must be one number, got a tensor of shape {_shape(x)} on {x.device}")
    return x.item()


def check_number(name: str, x: object, *, zero: str = "") -> float:
    """x as a float: positive and normal in float32, the type kernels take. `zero` says what 0 means, if allowed."""
    x = _plain(name, x)
    kind = (f"0 ({zero}) or " if zero else "") + "positive and finite"
    if not isinstance(x, (int, float)) and isinstance(x, numbers.Real):  # numpy's
        try:
            x = float(x)
        except OverflowError:  # a fraction beyond float64
            x = float("inf")
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise InvalidInputError(f"{name} must be {kind}, a number; got {shown(x)} of type {type(x).__name__}")
    # comparisons, not math.isfinite: torch.compile with dynamic shapes can trace them. NaN fails both.
    if not (_SMALLEST <= x <= _LARGEST or (zero and x == 0)):
        raise InvalidInputError(
            f"{name} must be {kind}, a normal float32 number (about 1.2e-38 to 3.4e38); got {shown(x, 40)}"
        )
    return float(x)


def check_flag(name: str, x: object) -> bool:
    """x as a bool: True, False, or numpy's."""
    if isinstance(x, bool) or type(x).__name__ in ("bool", "bool_"):
        return bool(x)
    raise InvalidInputError(f"{name} must be True or False, got {shown(x)} of type {type(x).__name__}")


def check_first_gradient(what: str, *given: Tensor | None, depends: bool = False) -> None:
    """In a backward pass whose result knows nothing of how it was made: that nobody wants to differentiate it again.

    given: gradients that came in, and tensors that were saved, as far as the result depends on them. depends: whether
    it depends on inputs that want gradients by other ways, codes for one, which want none.
    """
    if torch.is_grad_enabled() and (depends or any(t is not None and t.requires_grad for t in given)):
        raise UnsupportedError(f"{what} has first gradients only: create_graph=True is not supported")


def values_readable(x: Tensor) -> bool:
    """Whether looking at values neither waits for a device nor is impossible (compilers, fake tensors, transforms)."""
    return _has_address(x) and x.device.type == "cpu"


def _has_address(x: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and isinstance(x, Tensor)
        and type(x) in (Tensor, torch.nn.Parameter)
        and not x.is_meta
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def check_sink_values(sinks: Tensor) -> None:
    """Finite or -inf (no sink), where that can be seen; on a GPU the rows of a NaN or +inf sink become NaN."""
    if values_readable(sinks) and not (sinks.detach() < float("inf")).all():
        raise InvalidInputError("sinks must be finite, or -inf for none: got NaN or +inf, and its rows would be NaN")


def check_seed(seed: object) -> int:
    """A seed is an int of 64 bits."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63:
        raise InvalidInputError(f"seed must be an integer from -2**63 to 2**63 - 1, got {shown(seed)}")
    return seed


def check_strided(name: str, x: Tensor, *, tangents: bool = False) -> None:
    """Kernels read memory by strides, which sparse and nested tensors do not have; and tangents not at all.

    Args:
        tangents: leave those to whatever comes next, which may be torch's own.
    """
    if x.is_nested:
        raise UnsupportedError(
            f"{name} is a nested tensor: pass {name}.values() and cu_seqlens to flash_attn_varlen_func, or pad"
        )
    if x.layout != torch.strided:
        raise UnsupportedError(f"{name} has layout {x.layout}: pass {name}.to_dense()")
    if not torch.compiler.is_compiling() and x.is_neg():  # dynamo does not trace it
        raise UnsupportedError(f"{name} is a view that negates its memory: pass {name}.resolve_neg()")
    if x.is_quantized:
        raise UnsupportedError(f"{name} is of torch's quantised dtype {x.dtype}: pass {name}.dequantize()")
    if not tangents:
        check_tangents(**{name: x})


def check_tangents(**tensors: Tensor | None) -> None:
    """No derivative in forward mode is being taken: a custom op would leave its part out without a word. And no
    torch.jit.trace, in which sizes are tensors."""
    if torch.compiler.is_compiling():
        return
    if torch._C._get_tracing_state() is not None:
        raise UnsupportedError("torch.jit.trace cannot follow a launch: use torch.export or torch.compile")
    if forward_ad._current_level < 0:
        return
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(
                f"{name} has a tangent, and there are no derivatives in forward mode (torch.func.jvp, "
                f"torch.autograd.forward_ad): take them backwards"
            )


def check_written(name: str, x: Tensor) -> None:
    """A tensor that is written: no two of its elements may be one place in memory, as in an expanded tensor."""
    if any(step == 0 and n > 1 for n, step in zip(x.shape, x.stride(), strict=True)):
        raise InvalidInputError(
            f"{name} is written, but some of its elements share memory (shape {_shape(x)}, strides {x.stride()}): "
            f"pass {name}.contiguous()"
        )


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether an element of x lies where one of y does; views may interleave without. False where nobody can say.

    That is in compilers and modes, and for views of one storage with strides so different that it would take long.
    """
    if not (_has_address(x) and _has_address(y) and x.numel() and y.numel()):
        return False
    ours, theirs = x.untyped_storage(), y.untyped_storage()
    start, other = ours.data_ptr(), theirs.data_ptr()
    if start + ours.nbytes() <= other or other + theirs.nbytes() <= start:
        return False
    # step in bytes -> how many such steps an element of x may be ahead of one of y, least and most
    steps = {1: (1 - y.element_size(), x.element_size() - 1)}
    for tensor, own in ((x, True), (y, False)):
        for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
            step = stride * tensor.element_size()
            if step and n > 1:
                least, most = steps.get(step, (0, 0))
                steps[step] = (least, most + n - 1) if own else (least - n + 1, most)
    terms = sorted(((step, *bounds) for step, bounds in steps.items()), reverse=True)
    below = [(0, 0)]  # what the smaller steps can add up to
    for step, least, most in reversed(terms):
        below.append((below[-1][0] + step * least, below[-1][1] + step * most))
    below.reverse()
    budget = 10_000

    def reaches(i: int, distance: int) -> bool:
        nonlocal budget
        budget -= 1
        if i == len(terms) or budget < 0:
            return budget >= 0 and distance == 0
        step, least, most = terms[i]
        first = max(least, -((below[i + 1][1] - distance) // step))
        last = min(most, (distance - below[i + 1][0]) // step)
        return any(reaches(i + 1, distance - count * step) for count in range(first, last + 1))

    return reaches(0, y.data_ptr() - x.data_ptr())


def check_not_over(written: str, x: Tensor, **read: Tensor | None) -> None:
    """A tensor that is written lies on none that is read meanwhile, but element on element, which whoever wants it
    has read before."""
    for name, y in read.items():
        if y is None or not share_memory(x, y):
            continue
        if (x.data_ptr(), x.shape, x.stride(), x.dtype) != (y.data_ptr(), y.shape, y.stride(), y.dtype):
            raise InvalidInputError(
                f"{written} and {name} share memory, so results would be written over what is still read: "
                f"give {written} memory of its own"
            )


def _bound(name: str, x: object) -> int:
    if x is None:
        return -1
    x = _plain(name, x)
    try:
        value = x if isinstance(x, int) else operator.index(x)  # type: ignore[arg-type]
    except TypeError:
        value = None
    if value is None or isinstance(x, bool):
        raise InvalidInputError(f"{name} must be an integer, -1 or None for no bound, got {shown(x)}")
    if value < -1:  # flash-attn takes it for no bound; here it is more likely a mistake
        raise InvalidInputError(f"{name} must be 0 or more, or -1 or None for no bound, got {value}: pass -1")
    return min(value, _NO_BOUND)


def normalise_window(window_size, causal: bool) -> tuple[int, int]:
    """(left, right) with every "no bound" written as -1, and causal folded in as right = 0."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise InvalidInputError(
            f"window_size is a pair (left, right), for example (-1, -1) for none; got {shown(window_size)}"
        ) from None
    left, right = _bound("the left of window_size", left), _bound("the right of window_size", right)
    return left, (0 if check_flag("causal", causal) else right)


def _shape(x: Tensor) -> str:
    return "(" + ", ".join(str(n) for n in x.shape) + ")"


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One dtype, and one that attention is computed in."""
    if q.dtype in FP8_DTYPES:
        if q.requires_grad or k.requires_grad or v.requires_grad:
            raise InvalidInputError(
                "float8 q, k, v cannot require gradients: keep the parameters in bfloat16 and detach the float8 copies"
            )
        raise UnsupportedError(
            "float8 tensors carry no scales: pass bfloat16 or float16 and use "
            "gpu_accel.flash_attention3.fp8_attention (or FlashAttention3(precision='fp8')), which quantises per block"
        )
    if q.dtype not in FLOAT_DTYPES:
        raise InvalidInputError(f"q must be float16, bfloat16, float32 or float64, got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise InvalidInputError(f"q, k, v must have one dtype, got q {q.dtype} and {name} {x.dtype}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, varlen: bool) -> None:
    """Kinds, ranks, dtypes, devices and shapes of q, k, v. Never looks at values, so it is free of synchronisation."""
    rank, layout = (3, "(total, heads, head_dim)") if varlen else (4, "(batch, seqlen, heads, head_dim)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise InvalidInputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        check_strided(name, x)
        if x.dim() != rank:
            raise InvalidInputError(f"{name} must be {layout}, got shape {_shape(x)}")
    check_dtypes(q, k, v)
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise InvalidInputError(f"q, k, v must be on one device, got q on {q.device} and {name} on {x.device}")
    heads, heads_kv, head_dim, head_dim_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    if k.shape[-1] != head_dim:
        raise InvalidInputError(f"q and k must have one head_dim, got {head_dim} and {k.shape[-1]}")
    if k.shape[:-1] != v.shape[:-1]:
        raise InvalidInputError(f"k and v must agree in all but head_dim, got {_shape(k)} and {_shape(v)}")
    if not varlen and k.shape[0] != q.shape[0]:
        raise InvalidInputError(f"q and k must have one batch size, got {q.shape[0]} and {k.shape[0]}")
    if heads_kv == 0 or heads % heads_kv != 0:
        raise InvalidInputError(f"heads of q ({heads}) must be a multiple of the heads of k and v ({heads_kv})")
    for name, dim in (("q and k", head_dim), ("v", head_dim_v)):
        if dim == 0 or dim % 8 != 0:
            raise InvalidInputError(
                f"head_dim of {name} must be a multiple of 8, got {dim}: pad the last dimension with zeros "
                f"(torch.nn.functional.pad) and give softmax_scale explicitly"
            )


def check_scalars(softmax_scale: object, softcap: object) -> tuple[float, float]:
    """Both as floats: softmax_scale is positive and finite; softcap is not negative (0 is off)."""
    return check_number("softmax_scale", softmax_scale), check_softcap(softcap, zero="off")


def check_softcap(x: object, *, zero: str = "") -> float:
    """x as a float. Kernels take tanh as 1 - 2 / (1 + exp), so that a score errs by up to softcap * 2**-23."""
    x = check_number("softcap", x, zero=zero)
    if x > LARGEST_SOFTCAP:
        raise InvalidInputError(
            f"softcap must be at most {LARGEST_SOFTCAP:.0f}, got {x:g}: scores would be rounded to {x * 2**-23:.2g}; "
            f"leave it out, since a cap as high changes no score"
        )
    return x


def _check_longest(name: str, x: object) -> None:
    if x is None or (isinstance(x, int) and not isinstance(x, bool) and x >= 0):
        return
    if isinstance(x, Tensor) and x.numel() == 1 and not x.is_floating_point() and not x.is_complex():
        return
    raise InvalidInputError(f"{name} must be an integer, not negative, or None; got {shown(x)}")


def check_packed(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    *,
    values: bool,
) -> None:
    """Offsets of packed sequences. Their values are read (a device synchronisation) only when `values` is true."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(x, Tensor):
            raise InvalidInputError(f"{name} must be an int32 tensor of shape (batch + 1,), got {type(x).__name__}")
        check_strided(name, x)
        if x.dtype != torch.int32:
            raise InvalidInputError(f"{name} must be int32, got {x.dtype}: use {name}.to(torch.int32)")
        if x.dim() != 1 or x.shape[0] < 1:
            raise InvalidInputError(f"{name} must have shape (batch + 1,), got {_shape(x)}")
        if x.device != q.device:
            raise InvalidInputError(f"{name} must be on the device of q ({q.device}), got {x.device}")
    assert cu_seqlens_q is not None and cu_seqlens_k is not None  # checked above
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise InvalidInputError(
            f"cu_seqlens_q and cu_seqlens_k must have one length, got {cu_seqlens_q.shape[0]} and "
            f"{cu_seqlens_k.shape[0]}"
        )
    batch = cu_seqlens_q.shape[0] - 1
    for name, x in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if x is not None and not isinstance(x, Tensor):
            raise InvalidInputError(f"{name} must be an int32 tensor of shape ({batch},), got {type(x).__name__}")
        if x is not None and (x.dtype != torch.int32 or tuple(x.shape) != (batch,) or x.device != q.device):
            raise InvalidInputError(
                f"{name} must be an int32 tensor of shape ({batch},) on {q.device}, got {x.dtype} {_shape(x)} on "
                f"{x.device}"
            )
    _check_longest("max_seqlen_q", max_seqlen_q)
    _check_longest("max_seqlen_k", max_seqlen_k)
    if not values:
        return
    sides = (
        ("q", cu_seqlens_q, seqused_q, max_seqlen_q, q.shape[0]),
        ("k", cu_seqlens_k, seqused_k, max_seqlen_k, k.shape[0]),
    )
    for side, cu, used, longest, total in sides:
        ends = cu.tolist()
        lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
        if ends[0] != 0:
            raise InvalidInputError(f"cu_seqlens_{side} must start with 0, got {ends[0]}")
        if any(n < 0 for n in lengths):
            at = next(i for i, n in enumerate(lengths) if n < 0)
            raise InvalidInputError(
                f"cu_seqlens_{side} must not decrease, got {ends[at]} then {ends[at + 1]} at position {at + 1}"
            )
        if ends[-1] > total:
            raise InvalidInputError(f"cu_seqlens_{side} ends at {ends[-1]}, but {side} has only {total} rows")
        if longest is not None and lengths and max(lengths) > int(longest):
            raise InvalidInputError(
                f"max_seqlen_{side} is {int(longest)}, but the longest sequence has {max(lengths)} rows"
            )
        if used is not None:
            for i, (n, u) in enumerate(zip(lengths, used.tolist(), strict=True)):
                if not 0 <= u <= n:
                    raise InvalidInputError(f"seqused_{side}[{i}] is {u}, but that sequence has {n} rows")


def effective_window(window_left: int, window_right: int, sq: int, sk: int) -> tuple[int, int]:
    """Dense lengths known: a bound that hides no key becomes -1, so that the kernel without it is used."""
    if window_left >= sk - 1:
        window_left = -1
    if window_right >= sq - 1:
        window_right = -1
    return window_left, window_right
