"""`OverflowGuard`: a step whose gradients hold NaN or Inf is skipped, counted, and scales give way.

    guard = OverflowGuard(model, optimizer)
    loss.backward()
    guard.step()                    # instead of optimizer.step(); False where it was skipped

What overflows under delayed scaling: a tensor that holds NaN or Inf (its maximum is not entered, so the scale does not
follow), or finite values beyond what an old scale covers, which saturate. Only the first is a reason to skip; both are
counted per layer and role in `Histories.overflowed`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpu_accel.errors import InvalidInputError
from gpu_accel.transformer_engine.delayed import Histories
from gpu_accel.transformer_engine.recipes import ROLES
from gpu_accel.transformer_engine.scales import MIN_SCALE


class OverflowGuard:
    """Args:
    backoff: after a skipped step the layers that saw NaN or Inf get room for a factor of 2**backoff: the larger maximum
        is entered in their histories and leaves them in time. 0 leaves scales alone.
    limit: so many skipped steps one after the other raise, since then it is not the scales.

    Reads one number from the device per step. Raises InvalidInputError for a negative backoff or limit.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, backoff: int = 1, limit: int = 16
    ) -> None:
        for name, value in (("backoff", backoff), ("limit", limit)):
            if isinstance(value, bool) or not isinstance(value, int) or value < (name == "limit"):
                raise InvalidInputError(f"{name} must be a whole number, not negative, got {value!r}")
        self.model, self.optimizer, self.backoff, self.limit = model, optimizer, backoff, limit
        self.skipped = 0
        self._in_a_row = 0

    def _histories(self) -> list[Histories]:
        return [m for m in self.model.modules() if isinstance(m, Histories)]

    def found(self) -> Tensor:
        """() bool on the device of the first gradient: whether any gradient is not finite."""
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            return torch.zeros((), dtype=torch.bool)
        bad = [~torch.isfinite(g).all() for g in grads]
        return torch.stack([b.to(bad[0].device) for b in bad]).any()

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
            for histories in self._histories():
                for role in ROLES:
                    one = histories.of(role)
                    wrong = ~(one.pending < float("inf"))
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
