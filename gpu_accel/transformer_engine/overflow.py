"""`OverflowGuard`: a step whose gradients hold NaN or Inf is skipped, counted, and scales give way.

    guard = OverflowGuard(model, optimizer)
    loss.backward()
    guard.step()                    # instead of optimizer.step(); False where it was skipped

What overflows under delayed scaling: a tensor that holds NaN or Inf (its maximum is not entered, so the scale does not
follow), or finite values beyond what an old scale covers, which saturate. Only the first is a reason to skip; both are
counted per layer and role in `Histories.overflowed`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.transformer_engine.context import process_group
from gpu_accel.transformer_engine.delayed import Histories
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.recipes import ROLES
from gpu_accel.transformer_engine.scales import MIN_SCALE
from gpu_accel.transformer_engine.sharded import is_dtensor, plain


def _numbers(grad: Tensor) -> Tensor:
    """What a gradient holds; of a sparse one, as an embedding's may be, summed up where rows are named twice."""
    return grad.coalesce().values() if grad.layout == torch.sparse_coo else grad


class OverflowGuard:
    """Args:
    backoff: after a skipped step the layers that saw NaN or Inf get room for a factor of 2**backoff: the larger maximum
        is entered in their histories and leaves them in time. 0 leaves scales alone.
    limit: so many skipped steps one after the other raise, since then it is not the scales.
    group: ranks that must skip together, a process group or a mesh of one dimension. Those among which parameters are
        sharded (FSDP2) or layers are split (tp_group) do so anyway; pipeline stages need it.

    Reads one number from the device per step. Raises InvalidInputError for a negative backoff or limit.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, backoff: int = 1, limit: int = 16,
        group: Any = None,
    ) -> None:  # fmt: skip
        for name, value in (("backoff", backoff), ("limit", limit)):
            if isinstance(value, bool) or not isinstance(value, int) or value < (name == "limit"):
                raise InvalidInputError(f"{name} must be a whole number, not negative, got {shown(value)}")
        self.model, self.optimizer, self.backoff, self.limit = model, optimizer, backoff, limit
        self.group = process_group(group)
        self.skipped = 0
        self._in_a_row = 0

    def _histories(self) -> list[Histories]:
        return [m for m in self.model.modules() if isinstance(m, Histories)]

    def _groups(self) -> list[Any]:
        """Groups of ranks that have parts of one gradient, in an order that is the same on all of them."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        meshes = dict.fromkeys(p.device_mesh for p in parameters if is_dtensor(p))
        split = (m.parallel for m in self.model.modules() if isinstance(m, Linear))
        groups = [g for mesh in meshes for g in mesh.get_all_groups()]
        return list(dict.fromkeys([*groups, *(one.group for one in split if one.active), self.group]))

    def _reduce(self, x: Tensor) -> Tensor:
        """The largest on any rank, NaN as Inf."""
        x = torch.where(x.isnan(), float("inf"), x)
        for group in self._groups():
            if group is not None:
                dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
        return x

    def found(self) -> Tensor:
        """() bool on the device of the first gradient: whether any gradient is not finite, on any rank."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        bad = [~torch.isfinite(_numbers(plain(p.grad))).all() for p in parameters if p.grad is not None]
        if not parameters:
            return torch.zeros((), dtype=torch.bool)
        device = bad[0].device if bad else plain(parameters[0]).device
        here = torch.stack([torch.zeros((), dtype=torch.bool, device=device), *(b.to(device) for b in bad)]).any()
        return self._reduce(here.float()) > 0

    def step(self) -> bool:
        """`optimizer.step()`, unless a gradient is not finite. Whether the step was made.

        Raises RuntimeError after `limit` skipped steps in a row.
        """
        if not bool(self.found()):
            self._in_a_row = 0
            self.optimizer.step()
            return True
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= self.limit:
            raise RuntimeError(
                f"{self._in_a_row} steps in a row had gradients that are not finite: larger scales do not help, look "
                f"for NaN in the inputs, or lower the learning rate"
            )
        if self.backoff:
            every = [histories.of(role) for histories in self._histories() for role in ROLES]
            if every:
                for one, pending in zip(every, self._reduce(torch.stack([h.pending for h in every])), strict=True):
                    wrong = ~(pending < float("inf"))
                    top = one.history.max() * 2.0**self.backoff
                    moved = torch.cat((top[None], one.history[:-1]))
                    use = wrong & (top < float("inf")) & (top > 0)
                    one.history.copy_(torch.where(use, moved, one.history))
                    grown = (one.scale * 2.0**self.backoff).clamp_min(MIN_SCALE)
                    one.scale.copy_(torch.where(use & (grown < float("inf")), grown, one.scale))
        return False

    def report(self) -> dict[str, dict[str, tuple[int, int]]]:
        """{layer: {role: (tensors with NaN or Inf, tensors that were clipped)}} of the layers that had any."""
        out: dict[str, dict[str, tuple[int, int]]] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, Histories):
                counts = module.overflowed().tolist()
                found: dict[str, tuple[int, int]] = {
                    role: (a, b) for role, (a, b) in zip(ROLES, counts, strict=True) if a or b
                }
                if found:
                    out[name.rpartition(".")[0]] = found
        return out
