"""Every launch that was timed, once more: in a freshly loaded module, on other memory, in another order.

    log = Log(lambda: Bits(...))         # beside the timing: what each launch left in its memory, as two numbers
    log.note(memory)                     # before the memory is made ready for the next
    found = repeat(log, memory, launch)  # afterwards, outside of all times

Outputs of all timed launches are too much to take out of the process, so a number over all of their bits is kept of
each. A kernel that computes the same function every time gives the same bits again, whatever ran before it; one that
counts its launches, keeps results or leaves some out does not. With the few outputs that the controller compares with
its oracle that makes every timed launch one whose result is known. Inputs are looked at in the same way: a launch must
have left them as they were drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .verdict import Kind, Rejected, Verdict


class Bits:
    """A sum over a buffer's 32-bit words, each with a random odd weight: what differs in one word differs in the sum.

    Args:
        largest: bytes of the largest buffer.
        seed: of the weights; what is summed must not depend on it.
    """

    def __init__(self, largest: int, seed: int, device: str) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)
        size = (max(largest // 4, 64),)
        self._weights = torch.randint(-(2**31), 2**31, size, dtype=torch.int32, device=device, generator=generator) | 1

    def __call__(self, buffers: Sequence[Tensor]) -> Tensor:
        """One int64 of some contiguous buffers, on their device; nothing waits for it."""
        total = torch.zeros((), dtype=torch.int64, device=self._weights.device)
        factor = 1  # another odd one for each buffer, and each time that the weights are used again
        for one in buffers:
            flat = one.view(-1).view(torch.uint8)
            words = flat.view(torch.int32) if flat.numel() % 4 == 0 else flat.to(torch.int32)
            for start in range(0, words.numel(), self._weights.numel()):
                part = words[start : start + self._weights.numel()]
                # a product of 32-bit numbers wraps around, and an odd weight loses nothing of a difference
                total += factor * (part * self._weights[: part.numel()]).sum(dtype=torch.int64)
                factor += 2
        return total


class Held(Protocol):
    """Memory that launches run on, such as `gpu_jobs.Memory`."""

    seed: int

    def renew(self, seed: int) -> None: ...
    def named(self, role: str) -> list[Tensor]: ...


class Log:
    """What timed launches left behind: for each the seed of its inputs, and the bits of its inputs and outputs.

    Both are kept on the host at once, and weights are drawn anew for the repeats: device code may write to all memory
    that its process has on the device.

    Args:
        made: makes the sum of bits, the same each time.
    """

    def __init__(self, made: Callable[[], Bits]) -> None:
        self._made, self._bits = made, made()
        self.rows: list[tuple[int, int, int]] = []

    def note(self, memory: Held) -> None:
        """The memory as it is after a launch."""
        self.rows.append((memory.seed, *self.told(memory)))

    def told(self, memory: Held) -> tuple[int, int]:
        """The bits of its inputs and of its outputs."""
        inputs, outputs = torch.stack([self._bits(memory.named(role)) for role in ("input", "output")]).tolist()
        return inputs, outputs

    def anew(self) -> None:
        """Draw the weights again."""
        self._bits = self._made()


def repeat(log: Log, memory: Held, launch: Callable[[], object], *, seed: int) -> dict[str, Any]:
    """Launch on the inputs of every row again, in an order drawn by `seed`; how many rows are not as they were."""
    order = list(range(len(log.rows)))
    random.Random(seed).shuffle(order)
    found = {"launches": len(order), "inputs": 0, "outputs": 0}
    log.anew()
    for at in order:
        drawn, inputs, outputs = log.rows[at]
        memory.renew(drawn)
        found["inputs"] += inputs != log.told(memory)[0]
        launch()
        found["outputs"] += outputs != log.told(memory)[1]
    return found


def judge_repeats(found: Any, *, bits: bool) -> str:
    """What a process says of its repeats, in words; untrusted.

    Args:
        bits: whether the same inputs must give the same bits.
    Raises:
        Rejected: cheating(input_mutated), wrong(not_deterministic), or crashed where it said nothing.
    """
    keys = ("launches", "inputs", "outputs")
    if not isinstance(found, Mapping) or not all(type(found.get(key)) is int and found[key] >= 0 for key in keys):
        raise Rejected(Verdict.CRASHED, None, "its process repeated no timed launches")
    count = found["launches"]
    if count == 0:
        raise Rejected(Verdict.CRASHED, None, "its process repeated no timed launches")
    if found["inputs"]:
        raise Rejected(
            Verdict.CHEATING, Kind.INPUT_MUTATED, f"{found['inputs']} of {count} timed launches changed inputs"
        )
    if bits and found["outputs"]:
        raise Rejected(
            Verdict.WRONG, Kind.NOT_DETERMINISTIC,
            f"{found['outputs']} of {count} timed launches give other bits when they are repeated in another order",
        )  # fmt: skip
    if not bits:
        return f"inputs of {count} timed launches unchanged"
    return f"{count} timed launches repeated bit for bit in another order, their inputs unchanged"
