"""GPU profiles: what a vendor says a GPU can do, as data with the source of every number.

One TOML file a GPU lies in `profiles/`. Peaks are dense: where a vendor prints only figures with 2:4 sparsity, the
value is half of it and says so in `derived`. A number that no source was found for is absent, with the reason.
The loader refuses unknown keys, units and sources, so that a typo cannot become a fact.
"""

from __future__ import annotations

import difflib
import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from types import MappingProxyType
from typing import Any

from gpu_accel.errors import InvalidInputError, UnsupportedError

SPEC_UNITS: Mapping[str, str] = MappingProxyType(
    {
        "memory": "GB",
        "memory_bandwidth": "GB/s",
        "sm_count": "1",  # SMs, compute units of AMD, Xe cores of Intel
        "shared_per_sm": "KiB",
        "shared_per_block": "KiB",  # the most that one block may ask for
        "registers_per_sm": "KiB",
        "l2": "MiB",
        "last_level_cache": "MiB",
        "link": "GB/s",  # NVLink or Infinity Fabric, all links, both directions together
        "pcie": "GB/s",  # both directions together
        "power": "W",  # board or module limit
        "boost_clock": "MHz",
        "tensor_clock": "MHz",  # the clock behind the vendor's tensor peaks, where it differs
    }
)
PEAK_UNITS: Mapping[str, str] = MappingProxyType(
    {
        "fp64": "TFLOP/s",
        "fp64_tensor": "TFLOP/s",
        "fp32": "TFLOP/s",
        "tf32": "TFLOP/s",
        "fp16": "TFLOP/s",
        "bf16": "TFLOP/s",
        "fp8": "TFLOP/s",
        "fp6": "TFLOP/s",
        "fp4": "TFLOP/s",
        "int8": "TOP/s",
        "fp16_acc16": "TFLOP/s",
        "fp8_acc16": "TFLOP/s",
    }
)
# Other words for the same arithmetic.
DTYPE_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "float32": "fp32",
        "float64": "fp64",
        "e4m3": "fp8",
        "e5m2": "fp8",
        "float8_e4m3fn": "fp8",
        "float8_e5m2": "fp8",
        "mxfp8": "fp8",
        "e2m3": "fp6",
        "e3m2": "fp6",
        "e2m1": "fp4",
        "nvfp4": "fp4",
        "mxfp4": "fp4",
    }
)
SOURCE_KINDS = ("vendor", "measured", "paper", "secondary")


@dataclass(frozen=True)
class Source:
    """Where numbers come from. `via` is set where the document was not read itself but is quoted by others."""

    title: str
    url: str
    kind: str
    via: str = ""


@dataclass(frozen=True)
class Quantity:
    """A number with its unit and the key of its source; `derived` says how it follows from what the source prints."""

    value: float
    unit: str
    source: str
    derived: str = ""
    note: str = ""
    dense: bool | None = None  # True for every peak, None for what is not one


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One GPU. `peak` holds dense TFLOP/s by dtype word, `spec` the rest by the keys of SPEC_UNITS."""

    name: str
    title: str
    vendor: str
    architecture: str
    capability: str  # "9.0", an LLVM target such as "gfx942" for AMD, the architecture ("xe-hpc") for Intel
    introduced: str  # year and month of the vendor's announcement
    device_names: tuple[str, ...]  # as the driver reports them
    aliases: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    peaks: Mapping[str, Quantity] = field(default_factory=dict)
    spec: Mapping[str, Quantity] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """Dense peak in TFLOP/s (TOP/s for int8) for a dtype word such as "bf16", "e4m3" or "fp4".

        Raises UnsupportedError where the profile has no such peak and InvalidInputError for an unknown word.
        """
        key = dtype_word(dtype)
        if key not in self.peaks:
            why = self.absent.get(key, "it has no units for it, or no source was found")
            raise UnsupportedError(f"{self.title} has no {key} peak: {why}. It has {', '.join(self.peaks)}.")
        return self.peaks[key].value

    def value(self, key: str) -> float | None:
        """A number of `spec` in the unit of SPEC_UNITS, or None where it is absent."""
        if key not in SPEC_UNITS:
            raise InvalidInputError(f"{key!r} is not a quantity of a profile; one of {', '.join(SPEC_UNITS)}")
        return self.spec[key].value if key in self.spec else None

    @property
    def memory_gb(self) -> float:
        return self.spec["memory"].value

    @property
    def bandwidth_gbs(self) -> float:
        return self.spec["memory_bandwidth"].value

    @property
    def power_w(self) -> float | None:
        """Limit of the board or module; None where the system sets it."""
        return self.value("power")

    @property
    def sm_count(self) -> int | None:
        return int(self.spec["sm_count"].value) if "sm_count" in self.spec else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-able data, with empty fields left out of quantities and sources."""
        plain: dict[str, Any] = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(self).items()
            if isinstance(value, str | tuple)
        }
        for key in ("peaks", "spec", "sources"):
            plain[key] = {name: _compact(asdict(item)) for name, item in getattr(self, key).items()}
        return plain | {"absent": dict(self.absent)}


def dtype_word(dtype: str) -> str:
    """The key of PEAK_UNITS that a dtype word means. Raises InvalidInputError for an unknown one."""
    word = dtype.removeprefix("torch.").lower()
    word = DTYPE_WORDS.get(word, word)
    if word not in PEAK_UNITS:
        raise InvalidInputError(f"dtype {dtype!r} is unknown; one of {', '.join([*PEAK_UNITS, *DTYPE_WORDS])}")
    return word


@functools.cache
def profiles() -> tuple[Profile, ...]:
    """All profiles, sorted by name."""
    folder = resources.files("gpu_accel.hardware") / "profiles"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return tuple(parse(file.read_text(encoding="utf-8"), file.name) for file in files)


def profile(name: str) -> Profile:
    """The profile of a name or alias such as "h100" or "b200", or of what the driver calls the card, where only one
    profile has that; InvalidInputError with suggestions otherwise."""
    if not isinstance(name, str):
        raise InvalidInputError(f"the name of a hardware profile is a string such as 'h100', not {name!r}")
    called = [p for p in profiles() if name.strip().lower() in (device.lower() for device in p.device_names)]
    if len(called) == 1:
        return called[0]
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    known = {word: p for p in profiles() for word in (p.name, *p.aliases)}
    if wanted in known:
        return known[wanted]
    close = [p.name for p in called] or difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? There are" if close else "there are"
    names = ", ".join(p.name for p in profiles())
    raise InvalidInputError(f"no hardware profile is named {name!r}; {hint}: {names}")


def parse(text: str, file: str) -> Profile:
    """Read one profile; InvalidInputError names the file and key of anything unknown, missing or in a wrong unit."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{file}: {error}") from error
    tables = {key: data.pop(key, {}) for key in ("peak", "spec", "absent", "sources")}
    head: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    _keys(file, "", head, {"name", "title", "vendor", "architecture", "capability", "introduced", "device_names"},
          {"aliases", "notes"})  # fmt: skip
    sources = {}
    for key, item in tables["sources"].items():
        _keys(file, f"sources.{key}", item, {"title", "url", "kind"}, {"via"})
        if item["kind"] not in SOURCE_KINDS or not item["url"].startswith("https://"):
            raise InvalidInputError(f"{file}: sources.{key} needs an https url and a kind of {', '.join(SOURCE_KINDS)}")
        sources[key] = Source(**item)
    made = Profile(
        **head,
        peaks=_quantities(file, "peak", tables["peak"], PEAK_UNITS, sources),
        spec=_quantities(file, "spec", tables["spec"], SPEC_UNITS, sources),
        absent=MappingProxyType(tables["absent"]),
        sources=MappingProxyType(sources),
    )
    _check(file, made)
    return made


def _quantities(
    file: str, table: str, items: Mapping[str, Any], units: Mapping[str, str], sources: Mapping[str, Source]
) -> Mapping[str, Quantity]:
    made = {}
    for key, item in items.items():
        where = f"{table}.{key}"
        if key not in units:
            raise InvalidInputError(f"{file}: {where} is not known; one of {', '.join(units)}")
        required = {"value", "unit", "source"} | ({"dense"} if table == "peak" else set())
        _keys(file, where, item, required, {"derived", "note"})
        if item["unit"] != units[key]:
            raise InvalidInputError(f"{file}: {where} is in {item['unit']!r}, the unit must be {units[key]!r}")
        if item["source"] not in sources:
            raise InvalidInputError(f"{file}: {where} names the source {item['source']!r}, which [sources] lacks")
        number = item["value"]
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise InvalidInputError(f"{file}: {where} must be a positive number, got {number!r}")
        if item.get("dense") is False:
            raise InvalidInputError(f"{file}: {where} is not dense; give the dense figure and say how it is derived")
        made[key] = Quantity(**item)
    return MappingProxyType(made)


def _check(file: str, made: Profile) -> None:
    for key in ("memory", "memory_bandwidth", "power"):
        if key not in made.spec and not (key == "power" and key in made.absent):
            raise InvalidInputError(f"{file}: spec.{key} is missing")
    for key in made.absent:
        if key in made.spec or key in made.peaks or key not in {*SPEC_UNITS, *PEAK_UNITS}:
            raise InvalidInputError(f"{file}: absent.{key} is present or unknown")
    unused = set(made.sources) - {q.source for q in (*made.peaks.values(), *made.spec.values())}
    if unused:
        raise InvalidInputError(f"{file}: nothing uses the sources {', '.join(sorted(unused))}")


def _keys(file: str, where: str, item: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    unknown, missing = set(item) - required - optional, required - set(item)
    if unknown or missing:
        words = [f"unknown {', '.join(sorted(unknown))}"] if unknown else []
        words += [f"missing {', '.join(sorted(missing))}"] if missing else []
        raise InvalidInputError(f"{file}: {where or 'top level'}: {'; '.join(words)}")


def _compact(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if value not in ("", None)}
