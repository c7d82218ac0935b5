"""`AdamW8bit` and `Lion8bit`: torch's optimizers with states of eight bits, one kernel per parameter.

    optimizer = AdamW8bit(model.parameters(), lr=1e-3)         # 2 bytes of state a value, AdamW has 8
    optimizer = AdamW8bit(model.parameters(), bf16_stochastic_rounding=True)    # for parameters that are bfloat16

The states are e4m3 in blocks of 256 with a float32 scale, rounded stochastically, v as its square root (why: see
`optimizer_kernels.py`). Every step draws a seed per parameter from torch's generator, so `torch.manual_seed` fixes it;
with `seed` they follow from it and the number of the step, so that copies of a parameter on several ranks (DDP, HSDP)
round alike whatever those ranks draw besides.

Parameters that FSDP2 shards (DTensor): each rank updates its part, and the states are DTensors too, so that
torch.distributed.checkpoint saves all of them. Scales belong to blocks of a rank's part.
bitsandbytes has a table of 256 numbers of its own for the same purpose, torchao e4m3 of v itself. Small parameters
(norms, biases) keep float32 states: `min_8bit_size`, as in both.

A NaN in a gradient makes its value of the parameter and of the states NaN, as in torch's optimizers, whatever the
states: `OverflowGuard` skips such a step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.launch import launch
from gpu_accel.transformer_engine import formats
from gpu_accel.transformer_engine.checks import check_between
from gpu_accel.transformer_engine.formats import E4M3, decode, encode_with
from gpu_accel.transformer_engine.linear_op import next_seed
from gpu_accel.transformer_engine.optimizer_kernels import BLOCK, _step_kernel
from gpu_accel.transformer_engine.quantizer import BACKENDS, choose_backend, native_fp8
from gpu_accel.transformer_engine.scales import amax_bits, divide, scale_fp32
from gpu_accel.transformer_engine.sharded import changed, is_dtensor, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OWN = ("bf16_stochastic_rounding", "min_8bit_size", "backend", "seed")  # attributes of an optimizer
_LABELS = ("params", "param_names", "name", "initial_lr")  # of a group, torch's and its schedulers'


def _largest_part(p: Any) -> int:
    """Values of the largest part that a rank has."""
    sizes = list(p.shape)
    for i, one in enumerate(p.placements if is_dtensor(p) else ()):
        if one.is_shard():
            sizes[one.dim] = -(-sizes[one.dim] // p.device_mesh.size(i))
    return math.prod(sizes)


def _sharded_like(p: Any, t: Tensor) -> Tensor:
    """t of the shape of this rank's part, split as p is."""
    if not is_dtensor(p):
        return t
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(t, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _of_each_part(p: Any, t: Tensor) -> Tensor:
    """t (n,), of which each rank with a part of its own has as many."""
    if not is_dtensor(p):
        return t
    from torch.distributed.tensor import DTensor, Shard

    placements = [Shard(0) if one.is_shard() else one for one in p.placements]
    return DTensor.from_local(t, p.device_mesh, placements, run_check=False)


def _narrow(x: Tensor, seed: int, stream: int) -> tuple[Tensor, Tensor]:
    """(e4m3 codes (n,), scales (blocks,)) of x (n,), rounded stochastically."""
    n = x.numel()
    padded = torch.nn.functional.pad(x, (0, -n % BLOCK)).view(-1, BLOCK)
    amax = amax_bits(padded, finite_only=True).amax(1).view(torch.float32)
    scales = scale_fp32(amax, E4M3.largest)
    inverse = divide(1.0, scales, scales)
    words = formats.random_words(padded.numel(), seed, stream, x.device).view_as(padded)
    return encode_with(padded * inverse[:, None], E4M3, saturate=True, words=words).view(-1)[:n], scales


def _wide(codes: Tensor, scales: Tensor) -> Tensor:
    return decode(codes, E4M3) * scales.repeat_interleave(BLOCK)[: codes.numel()]


def round_stochastically(x: Tensor, seed: int) -> Tensor:
    """bfloat16 below or above x (n,) float32, the nearer the likelier. NaN and Inf stay."""
    words = formats.random_words(x.numel(), seed, 0, x.device)
    bits = x.contiguous().view(torch.int32).long() + (words & 0xFFFF)
    moved = (bits & 0xFFFF0000).to(torch.uint32).view(torch.float32)
    return torch.where(x.abs() < float("inf"), moved, x).to(torch.bfloat16)


def _check_numbers(group: Mapping[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if name in group:
            check_between(name, group[name], 0)
    if "betas" not in group:
        return
    betas = group["betas"]
    good = isinstance(betas, tuple | list) and len(betas) == 2
    if not good or not all(isinstance(b, int | float) and not isinstance(b, bool) and 0 <= b < 1 for b in betas):
        raise InvalidInputError(f"betas must be two numbers from 0 to below 1, got {shown(betas)}")


class _EightBit(torch.optim.Optimizer):
    """What both have in common."""

    LION = False

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
        bf16_stochastic_rounding: bool, min_8bit_size: int, backend: str, seed: int | None,
    ) -> None:  # fmt: skip
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        _check_numbers(defaults)
        if not isinstance(bf16_stochastic_rounding, bool):
            raise InvalidInputError(f"bf16_stochastic_rounding must be True or False, got {bf16_stochastic_rounding!r}")
        if isinstance(min_8bit_size, bool) or not isinstance(min_8bit_size, int) or min_8bit_size < 0:
            raise InvalidInputError(f"min_8bit_size must be a whole number, not negative, got {shown(min_8bit_size)}")
        if backend not in BACKENDS:
            raise InvalidInputError(f"backend must be one of {', '.join(BACKENDS)}, got {shown(backend)}")
        self.bf16_stochastic_rounding, self.min_8bit_size, self.backend = (
            bf16_stochastic_rounding, min_8bit_size, backend,
        )  # fmt: skip
        self.seed = None if seed is None else formats.check_seed(seed)
        if isinstance(params, Tensor) or not isinstance(params, Iterable):
            raise InvalidInputError(
                f"params must be parameters, such as model.parameters(), or groups of them; got {type(params).__name__}"
            )
        given = list(params)
        if not given:
            raise InvalidInputError("params holds no parameters; an iterator that was used before is empty")
        super().__init__(given, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """Torch's leaves out what is ours; copies and pickles need it."""
        return super().__getstate__() | {name: getattr(self, name) for name in _OWN}  # type: ignore[no-untyped-call]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; numbers of a group are checked as the optimizer's own, and unknown keys are refused."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise InvalidInputError(f"a group must be a dictionary with params, got {shown(param_group)}")
        own = ["lr", "betas", "weight_decay", *(() if self.LION else ("eps",))]
        if unknown := [key for key in param_group if key not in (*own, *_LABELS)]:
            raise InvalidInputError(
                f"a group has no {', '.join(map(repr, unknown))}; it may have params, {', '.join(own)} and name"
            )
        _check_numbers(param_group)
        try:
            super().add_param_group(param_group)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(str(error)) from error

    def _new_state(self, p: Tensor) -> dict[str, Any]:
        names = ("exp_avg",) if self.LION else ("exp_avg", "exp_avg_root")
        state: dict[str, Any] = {"step": 0}
        part = plain(p)
        shape = part.shape if is_dtensor(p) else (p.numel(),)
        for name in names:
            if p.numel() < self.min_8bit_size:
                state[name] = _sharded_like(p, torch.zeros(shape, dtype=torch.float32, device=p.device))
            else:
                blocks = triton.cdiv(_largest_part(p), BLOCK)
                state[name] = _sharded_like(p, torch.zeros(shape, dtype=torch.uint8, device=p.device))
                state[f"{name}_scale"] = _of_each_part(p, torch.ones(blocks, dtype=torch.float32, device=p.device))
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Gradients must be dense; parameters float32, bfloat16 or float16, contiguous."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index = -1
        for group in self.param_groups:
            for p in group["params"]:
                index += 1
                if p.grad is None or not p.numel():
                    continue
                if p.grad.is_sparse:
                    raise UnsupportedError("sparse gradients have no eight-bit states: use torch.optim.SparseAdam")
                if p.dtype not in DTYPES:
                    raise InvalidInputError(f"parameters must be float32, bfloat16 or float16, got {p.dtype}")
                part = plain(p)
                if not part.is_contiguous():
                    raise InvalidInputError(
                        f"parameters must be contiguous, got strides {part.stride()} of shape {tuple(part.shape)}"
                    )
                if is_dtensor(p) != is_dtensor(p.grad):
                    raise InvalidInputError("a parameter that is a DTensor needs a gradient that is one, and no other")
                if not self.state[p]:
                    self.state[p].update(self._new_state(p))
                self.state[p]["step"] += 1
                if part.numel():
                    state = {key: plain(v).view(-1) if isinstance(v, Tensor) else v for key, v in self.state[p].items()}
                    self._one(part, plain(p.grad).contiguous(), state, group, index)
                    changed(p)
        return loss

    def _next_seed(self, index: int, step: int) -> int:
        """Of the parameter with this index, at this step."""
        if self.seed is None:
            return next_seed()
        return (self.seed + 0x9E3779B97F4A7C15 * (1 + index + (step << 32))) % 2**62

    @torch.compiler.disable
    def _one(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], index: int) -> None:
        (beta1, beta2), lr, t = group["betas"], float(group["lr"]), state["step"]
        decay = 1 - lr * group["weight_decay"]
        step_size, inverse = (lr, 1.0) if self.LION else (lr / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t))
        stochastic = self.bf16_stochastic_rounding and p.dtype == torch.bfloat16
        narrow = state["exp_avg"].dtype == torch.uint8
        seed = self._next_seed(index, t) if stochastic or narrow else 0
        backend = choose_backend(self.backend, p, "an eight-bit optimizer")
        if narrow and backend == "portable":
            rows = 8
            m, m_scale = state["exp_avg"], state["exp_avg_scale"]
            v, v_scale = (m, m_scale) if self.LION else (state["exp_avg_root"], state["exp_avg_root_scale"])
            arguments = (
                p, g, m, m_scale, v, v_scale, p.numel(), seed, lr, beta1, beta2, 1 - beta1, 1 - beta2, group["eps"],
                decay, step_size, inverse,
            )  # fmt: skip
            options = dict(
                ROWS=rows, LION=self.LION, STOCHASTIC=stochastic, NATIVE=native_fp8(p.device), num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
            launch(_step_kernel, triton.cdiv(p.numel(), rows * BLOCK), arguments, options)
            return
        value, grad = p.view(-1).float() * decay, g.view(-1).float()
        m = _wide(state["exp_avg"], state["exp_avg_scale"]) if narrow else state["exp_avg"]
        if self.LION:
            blend = m * beta1 + grad * (1 - beta1)
            value = value - lr * torch.where(blend.isnan(), blend, blend.sign())  # sign(NaN) is 0
            m = m * beta2 + grad * (1 - beta2)
        else:
            root = _wide(state["exp_avg_root"], state["exp_avg_root_scale"]) if narrow else state["exp_avg_root"]
            m = m * beta1 + grad * (1 - beta1)
            root = (root * root * beta2 + grad * grad * (1 - beta2)).sqrt()
            value = value - step_size * (m / (root * inverse + group["eps"]))
            self._keep(state, "exp_avg_root", root, seed, 2)
        self._keep(state, "exp_avg", m, seed, 1)
        p.view(-1).copy_(round_stochastically(value, seed) if stochastic else value)

    def _keep(self, state: dict[str, Any], name: str, value: Tensor, seed: int, stream: int) -> None:
        if state[name].dtype == torch.uint8:
            codes, scales = _narrow(value, seed, stream)
            state[name].copy_(codes)
            state[f"{name}_scale"][: scales.numel()].copy_(scales)
        else:
            state[name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts states to the dtype of the parameter; codes would not survive that and are kept.

        Raises:
            InvalidInputError: states of another optimizer, or of parameters of other sizes, which a kernel would read
                and write beyond their end.
        """
        self._check_states(state_dict)
        super().load_state_dict(state_dict)
        saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        mine = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(saved, mine, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[p][name] = value.to(p.device).clone() if isinstance(value, Tensor) else value

    def _check_states(self, state_dict: Mapping[str, Any]) -> None:
        groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
        if not isinstance(groups, list | tuple) or not isinstance(state_dict.get("state"), Mapping):
            raise InvalidInputError("a state_dict of an optimizer has param_groups and state")
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise InvalidInputError("the state_dict is of other groups of parameters")
        for group, own in zip(groups, self.param_groups, strict=True):
            _check_numbers(group)
            for key, p in zip(group["params"], own["params"], strict=True):
                if (kept := state_dict["state"].get(key)) and (fault := self._fault(p, kept)):
                    raise InvalidInputError(f"the state of parameter {shown(key)}, {tuple(p.shape)}, {fault}")

    def _fault(self, p: Tensor, kept: Mapping[str, Any]) -> str:
        """What keeps a state from being that of p; "" for nothing."""
        names = ("exp_avg",) if self.LION else ("exp_avg", "exp_avg_root")
        if type(kept.get("step")) is not int or kept["step"] < 0:
            return "has no number of steps: it is of another optimizer"
        known = {"step", *names, *(f"{name}_scale" for name in names)}
        if unknown := [name for name in kept if name not in known]:
            return f"has {shown(unknown[0], 40)}: it is of another optimizer"
        for name in names:
            value, scale = kept.get(name), kept.get(f"{name}_scale")
            if not isinstance(value, Tensor) or value.dtype not in (torch.uint8, torch.float32):
                return f"lacks {name}: it is of another optimizer"
            if is_dtensor(value) != is_dtensor(p) or plain(value).numel() != plain(p).numel():
                return f"has an {name} of {plain(value).numel()} values, and {plain(p).numel()} belong there"
            if (value.dtype == torch.uint8) != (scale is not None):
                return f"has codes without scales, or scales without codes, as {name}"
            if scale is not None and (
                not isinstance(scale, Tensor) or scale.dtype != torch.float32
                or plain(scale).numel() != triton.cdiv(_largest_part(p), BLOCK)
            ):  # fmt: skip
                return f"has other scales of {name} than one float32 for each block of {BLOCK}"
        if len({kept[name].dtype for name in names}) > 1:
            return "is of eight bits in part"
        return ""

    def state_bytes(self) -> int:
        """Bytes of all states that this rank has."""
        tensors = (plain(v) for state in self.state.values() for v in state.values() if isinstance(v, Tensor))
        return sum(t.numel() * t.element_size() for t in tensors)


class AdamW8bit(_EightBit):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) as torch.optim.AdamW computes it.

    Args:
        bf16_stochastic_rounding: round parameters that are bfloat16 so that small updates are kept on average.
        min_8bit_size: parameters with fewer values keep float32 states.
        seed: of rounding; None draws from torch's generator.
        backend: "portable" (Triton), "reference" (plain torch), or "auto", as of `quantize`.

    Raises:
        InvalidInputError: numbers out of range, of a group too; an unknown key of a group; no parameters; parameters
            of another dtype or not contiguous, at a step.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, bf16_stochastic_rounding: bool = False, min_8bit_size: int = 4096,
        backend: str = "auto", seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, bf16_stochastic_rounding, min_8bit_size, backend, seed)


class Lion8bit(_EightBit):
    """Lion (Chen et al., arXiv:2302.06675): the sign of a blend of momentum and gradient; one state.

    Arguments and errors as of `AdamW8bit`.
    """

    LION = True

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0, *, bf16_stochastic_rounding: bool = False, min_8bit_size: int = 4096,
        backend: str = "auto", seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, 0.0, weight_decay, bf16_stochastic_rounding, min_8bit_size, backend, seed)
