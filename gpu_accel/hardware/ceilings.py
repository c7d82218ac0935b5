"""Measured ceilings: what a GPU gave at best on record, beside what its vendor prints.

    measured_ceilings("h100-sxm")          # from committed records, None where there are none
    measured_ceilings(records=mine)        # from records of one's own

They are the results of the experiment `ceilings` of papers/hopper_microbenchmarks (`gpu-accel hardware measure`): dense
products through cuBLAS, and copies, reads and writes of gigabytes. A kernel may pass them, by being better than cuBLAS
or by running on a cooler card; it may not pass the datasheet's peak at the clock it ran with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpu_accel.hardware.catalog import Profile, dtype_word, profile

if TYPE_CHECKING:
    from gpu_accel.workbench.records import Record

PAPER, EXPERIMENT = "hopper_microbenchmarks", "ceilings"
MEMORY = ("copy", "read", "write")


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The best results of one GPU. ``tflops`` by dtype word, ``gbps`` by "copy", "read" and "write"."""

    gpu: str
    tflops: Mapping[str, float] = field(default_factory=dict)
    gbps: Mapping[str, float] = field(default_factory=dict)
    launch_us: float | None = None  # one empty kernel, on the device
    records: tuple[Record, ...] = ()

    @property
    def bandwidth_gbs(self) -> float | None:
        """The most of copy, read and write."""
        return max(self.gbps.values(), default=None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu,
            "tflops": dict(self.tflops),
            "gbps": dict(self.gbps),
            "launch_us": self.launch_us,
            "records": [record.name for record in self.records],
        }


def measured_ceilings(gpu: str | Profile = "", records: Iterable[Record] | None = None) -> Ceilings | None:
    """The ceilings of a GPU, or None where none is on record.

    Args:
        gpu: a profile or its name; "" takes any GPU that the records name, the newest first.
        records: to choose from; by default those committed with this repository.
    """
    from gpu_accel.workbench.records import merge

    wanted = gpu if isinstance(gpu, Profile) else profile(gpu) if gpu else None
    found = [
        record
        for record in (_committed() if records is None else records)
        if record.kind == "measured" and (record.paper, record.experiment) == (PAPER, EXPERIMENT)
        if wanted is None or _is_of(record, wanted)
    ]
    if not found:
        return None
    name = str(max(found, key=lambda record: record.when).env.get("gpu"))
    mine = merge(record for record in found if record.env.get("gpu") == name)
    tflops: dict[str, float] = {}
    gbps: dict[str, float] = {}
    launches = []
    for record in mine:
        what = record.case.get("what")
        if what == "matmul" and record.has("tflops"):
            word = dtype_word(str(record.case["dtype"]))
            tflops[word] = max(tflops.get(word, 0.0), record.value("tflops"))
        elif what in MEMORY and record.has("gbps"):
            gbps[str(what)] = max(gbps.get(str(what), 0.0), record.value("gbps"))
        elif what == "launch" and record.has("ms"):
            launches.append(1e3 * record.value("ms"))
    return Ceilings(
        gpu=name,
        tflops=MappingProxyType(tflops),
        gbps=MappingProxyType(gbps),
        launch_us=min(launches, default=None),
        records=tuple(mine),
    )


def _is_of(record: Record, wanted: Profile) -> bool:
    """Whether a record is from a whole GPU of this profile: a slice of one (MIG) has another variant name."""
    from gpu_accel.workbench.records import gpu_slug

    name, sku = str(record.env.get("gpu") or ""), str(record.env.get("sku") or "")
    named = name.lower() in (device.lower() for device in wanted.device_names)
    return named and (not sku or " MIG " not in sku) or bool(sku) and gpu_slug(sku) == wanted.name


def _committed() -> list[Record]:
    """The records of the experiment in this repository; none where the papers are not installed."""
    from gpu_accel.errors import InvalidInputError
    from gpu_accel.workbench import registry

    try:
        return registry.paper(PAPER).records()
    except InvalidInputError:
        return []
