"""One call of distributed attention: everything that all ranks must agree on, in one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.ring_attention.layouts import Layout
from gpu_accel.ring_attention.masks import Mask
from gpu_accel.ring_attention.transport import Pending


@dataclass(frozen=True, kw_only=True)
class Call:
    """What to compute, apart from the tensors.

    Args:
        layout: how the sequence is cut.
        mask: which keys a query sees, by global position (documents are the layout's).
        softmax_scale, softcap: as in `gpu_accel.flash_attention3`.
        backend: local attention: "auto", "hopper", "portable" or "reference" (see step.py).
        ulysses: ranks that share a sequence block by exchanging heads, in the `usp` schedule.
        inner: ranks of the inner ring of the `double_ring` schedule.
        mesh: rows and columns of the `mesh` and `concentric` schedules.
        wire: dtype of keys and values on the network, None for their own; float8_e4m3fn and float8_e5m2 travel with a
            scale for each row of a head (wire.py). A rank's own block stays as it is where it does not travel.
        deterministic: the same bits in every run, also of dq: the Hopper backward up to head_dim 128 adds to dq in no
            fixed order. In a ring of whole blocks its tiles then take turns, elsewhere a slower kernel takes its
            place. Forward, dk and dv are so in any case.
        overlap: False makes the rings wait for each hop before they compute, to see what overlapping is worth.
    """

    layout: Layout
    mask: Mask = Mask()
    softmax_scale: float = 1.0
    softcap: float = 0.0
    backend: str = "auto"
    ulysses: int | None = None
    inner: int | None = None
    mesh: tuple[int, int] | None = None
    wire: torch.dtype | None = None
    overlap: bool = True
    deterministic: bool = False

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    def start(self, pending: Pending) -> Pending:
        """A hop that has just been posted, waited for at once where nothing is to overlap."""
        if not self.overlap:
            pending.wait()
        return pending

    def statement(self, schedule: str, *tensors: Tensor) -> str:
        """What this rank is about to do; must read the same on all ranks."""
        import hashlib

        shapes = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in tensors)
        shapes += f" on {tensors[0].device.type}" if tensors else ""
        documents = hashlib.sha256(repr(self.layout.documents).encode()).hexdigest()[:8]
        options = {"ulysses": self.ulysses, "inner": self.inner, "mesh": self.mesh, "wire": self.wire}
        options["deterministic"] = self.deterministic or None
        given = ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)
        return (
            f"{schedule}, {self.layout}, {self.mask}, {shapes}, scale {self.softmax_scale:.9g}, "
            f"softcap {self.softcap:.9g}{', ' + given if given else ''}, documents {documents}"
        )
