"""What stands in the way on this machine, and what to do about it: the findings behind `gpu-accel doctor`.

Works without a GPU, and with torch or Triton missing or broken. Triton is looked at on disk and never imported, because
its decorators read TRITON_INTERPRET when they run: importing it here would fix the choice for the whole process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gpu_accel.hardware.detection import detect

Level = Literal["ok", "warn", "fail"]
Run = Callable[[Sequence[str]], str | None]
Ask = Callable[[str], str | None]

PYTHON = (3, 11)
TORCH = (2, 11)
TRITON = ((3, 6), (3, 9))  # oldest and newest that the kernels are compiled with
LOW_MEMORY = 0.5  # of the whole memory, free
LOW_DISK = 1e9  # bytes
HOT = 85  # degrees Celsius
OPTIONAL = {
    "plotly": "plots in notebooks and reports: pip install 'gpu-accel[notebook]'",
    "ipywidgets": "controls in notebooks: pip install 'gpu-accel[notebook]'",
    "transformers": "real model inputs: pip install 'gpu-accel[models]'",
    "huggingface_hub": "downloads of models: pip install 'gpu-accel[hub]'",
    "cuda-bindings": "hardware microbenchmarks in CUDA C++: pip install 'gpu-accel[microbenchmarks]'",
}
CHROME = ("google-chrome", "google-chrome-stable", "chromium", "chromium-browser", "chrome")
# Bits of NVML's clock event reasons that mean the GPU is held back; idle (1) and application clocks (2) do not.
THROTTLE = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Finding:
    """`ok`; `warn`: works, but with less speed or scope; `fail`: kernels cannot run or cannot be trusted."""

    level: Level
    what: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def doctor(index: int = 0, *, run: Run | None = None) -> list[Finding]:
    """Look at the software and at one GPU. `run` executes a command and returns its output or None (for tests)."""
    run = _run if run is None else run
    findings = [*_python(), *_torch(), *_triton()]
    findings += _guarded("GPU", lambda: list(_gpu(index, run)))
    findings += _guarded("profiling counters", lambda: list(_counters()))
    findings += _guarded("cache of compiled kernels", lambda: list(_cache()))
    return [*findings, *_optional()]


def one_line(findings: Sequence[Finding]) -> str:
    """What a bug report needs, as one line without anything that names a person or a machine."""
    import gpu_accel

    commit, dirty = _git()
    parts = [f"gpu-accel {gpu_accel.__version__}" + (f" ({commit[:7]}{' changed' if dirty else ''})" if commit else "")]
    parts.append(f"Python {platform.python_version()}")
    parts += [f"{name} {version}" for name in ("torch", "triton") if (version := _version(name))]
    for start in ("driver ", "GPU ", "no GPU"):
        parts += [finding.what for finding in findings if finding.what.startswith(start)][:1]
    parts.append(f"{platform.system()} {platform.machine()}")
    trouble = [finding.what for finding in findings if finding.level == "fail"]
    warned = sum(finding.level == "warn" for finding in findings)
    parts.append(f"{warned} warnings, {len(trouble)} failures" + "".join(f"; {what}" for what in trouble))
    return " | ".join(" ".join(part.split()) for part in parts)


def _git() -> tuple[str, bool]:
    from gpu_accel.workbench.environment import git_state

    return git_state()


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level among findings."""
    levels: tuple[Level, ...] = ("fail", "warn", "ok")
    return next((level for level in levels if any(f.level == level for f in findings)), "ok")


def _guarded(what: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # a broken driver must not hide the other findings
        return [Finding("fail", f"{what}: {type(error).__name__}: {error}", "check the driver with nvidia-smi")]


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info[:2] < PYTHON:
        yield Finding("fail", f"Python {version}", f"use Python {_dotted(PYTHON)} or newer")
    else:
        yield Finding("ok", f"Python {version}")


def _torch() -> Iterator[Finding]:
    wanted = f"pip install 'torch>={_dotted(TORCH)}'"
    found = _version("torch")
    if found is None:
        yield Finding("fail", "torch is not installed", wanted)
        return
    if _numbers(found) < TORCH:
        yield Finding("fail", f"torch {found} is older than {_dotted(TORCH)}", wanted)
        return
    try:
        import torch
    except Exception as error:
        yield Finding("fail", f"torch {found} cannot be imported: {error}", "reinstall torch for this Python")
        return
    built = torch.version.cuda or torch.version.hip
    yield Finding("ok", f"torch {found}, " + (f"built for {built}" if built else "built for the CPU alone"))


def _triton() -> Iterator[Finding]:
    oldest, newest = TRITON
    wanted = f"pip install 'triton>={_dotted(oldest)},<{newest[0]}.{newest[1] + 1}'"
    found = _version("triton")
    folder = _folder("triton")
    if found is None or folder is None:
        yield Finding("fail", "triton is not installed", f"{wanted} (Linux; it comes with torch for CUDA)")
        return
    numbers = _numbers(found)
    if numbers < oldest:
        yield Finding("fail", f"triton {found} is older than {_dotted(oldest)}", wanted)
    elif numbers > newest:
        yield Finding("warn", f"triton {found} is newer than {_dotted(newest)}, the newest one tried", wanted)
    else:
        yield Finding("ok", f"triton {found}")
    if (folder / "experimental" / "gluon" / "__init__.py").exists():
        yield Finding("ok", "Gluon, Triton's lower level, is there")
    else:
        yield Finding("warn", "this Triton has no Gluon: only the plain Triton kernels can run", wanted)


def _gpu(index: int, run: Run) -> Iterator[Finding]:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if _version("torch") is None:
        return
    found = detect(index)
    if found is None:
        why = _why_no_gpu(run)
        yield Finding("warn", f"no GPU: {why}", "kernels run in Triton's interpreter: results are checked, not timed")
        if interpreted:
            yield Finding("ok", "TRITON_INTERPRET=1: plain Triton kernels run on the CPU")
        else:
            yield Finding(
                "warn",
                "TRITON_INTERPRET is not set, so kernels cannot run on CPU tensors from Python",
                "set TRITON_INTERPRET=1 before importing gpu_accel; the command line does so by itself",
            )
        return
    yield Finding("ok", f"GPU {index}: {found.name}, compute capability {found.capability}, {found.memory_gb:.0f} GB")
    if found.profile is None:
        yield Finding("warn", f"no hardware profile fits {found.name}", "rooflines and peaks are not available for it")
    elif not found.exact:
        yield Finding("warn", f"not quite {found.profile.title}: {found.note}", "do not compare with its peaks")
    if interpreted:
        yield Finding(
            "warn", "TRITON_INTERPRET=1 although a GPU is here", "unset it: interpreted kernels are not timed"
        )
    if found.untested:
        where = "device='xpu'" if found.platform == "xpu" else "backend='auto'"
        yield Finding(
            "warn", found.untested, f"use {where}, compare with backend='reference', and tell us what you see"
        )
    yield from _capability(found.capability)
    if found.platform == "xpu":
        return
    yield from _memory(index)
    if found.platform == "cuda":
        yield from _nvidia(index, run)


def _capability(capability: str) -> Iterator[Finding]:
    if not capability[:1].isdigit():
        yield Finding("ok", f"{capability}: the plain Triton kernels are what runs; Hopper's and Blackwell's do not")
        return
    major = int(capability.split(".")[0])
    if major >= 9:
        yield Finding("ok", f"TMA, the tensor memory accelerator: yes (capability {capability})")
        if capability != "9.0":
            yield Finding("warn", "the kernels tuned and measured here are for capability 9.0", "backend='auto' fits")
    elif major >= 8:
        yield Finding("warn", f"no TMA (capability {capability}): the plain Triton kernels run", "expect less speed")
    else:
        yield Finding("fail", f"capability {capability} is older than 8.0", "use an Ampere or newer GPU, or the CPU")


def _memory(index: int) -> Iterator[Finding]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    words = f"{free / 1e9:.0f} of {total / 1e9:.0f} GB of GPU memory free"
    if free < LOW_MEMORY * total:
        yield Finding("warn", words, "another process holds memory; see nvidia-smi. Timings suffer from company")
    else:
        yield Finding("ok", words)


def _nvidia(index: int, run: Run) -> Iterator[Finding]:
    # One query a fact: an unknown field, as in older or newer drivers, fails a whole query.
    def ask(field: str) -> str | None:
        answer = run(
            ["nvidia-smi", f"--id={_physical(index)}", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
        )
        lines = [line.strip() for line in (answer or "").splitlines() if line.strip()]
        return lines[0] if lines and not lines[0].startswith("[") else None

    driver = ask("driver_version")
    if driver is None:
        yield Finding("warn", "nvidia-smi does not answer", "driver, clocks and other processes are unknown")
        return
    yield from _driver(driver)
    yield from _ecc(ask)
    if ask("mig.mode.current") == "Enabled":
        yield Finding("warn", "MIG is on: this is a slice of a GPU", "results do not compare with a whole GPU")
    reasons = ask("clocks_event_reasons.active") or ask("clocks_throttle_reasons.active")
    if reasons:
        bits = int(reasons, 0)
        held = [words for bit, words in THROTTLE.items() if bits & bit]
        if held:
            yield Finding("warn", f"the clocks are held back: {', '.join(held)}", "let it cool, or free its power")
        else:
            yield Finding("ok", "the clocks are not held back")
    yield from _state(ask)
    query = [f"--id={_physical(index)}", "--query-compute-apps=pid", "--format=csv,noheader"]
    answer = run(["nvidia-smi", *query])
    if answer is not None:
        others = {line.strip() for line in answer.splitlines() if line.strip().isdigit()} - {str(os.getpid())}
        if others:
            yield Finding("warn", f"{len(others)} other process(es) use this GPU", "wait for them before timing")
        else:
            yield Finding("ok", "no other process uses this GPU")


def _driver(version: str) -> Iterator[Finding]:
    """The driver, and whether it is new enough for the CUDA that torch was built for."""
    import torch

    built = torch.version.cuda
    try:
        number = vars(torch._C)["_cuda_getDriverVersion"]()  # what torch itself asks; not among its public names
    except (KeyError, RuntimeError):
        number = 0
    if not number or not built:
        yield Finding("ok", f"driver {version}")
        return
    supports = (number // 1000, number % 1000 // 10)
    words = f"driver {version}, for CUDA up to {_dotted(supports)}; torch is built for {built}"
    if supports[0] < _numbers(built)[0]:
        yield Finding("fail", words, f"install a driver for CUDA {built}, or a torch built for CUDA {supports[0]}")
    else:
        yield Finding("ok", words)


def _ecc(ask: Ask) -> Iterator[Finding]:
    mode = ask("ecc.mode.current")
    if mode == "Enabled":
        errors = ask("ecc.errors.uncorrected.volatile.total")
        if errors and errors.isdigit() and int(errors):
            remedy = "results cannot be trusted: reset the GPU, and have it replaced if they come back"
            yield Finding("fail", f"{errors} uncorrected memory errors since the driver was loaded", remedy)
        else:
            yield Finding("ok", "ECC is on, without uncorrected errors")
    elif mode == "Disabled":
        yield Finding("warn", "ECC is off: errors of the memory go unseen", "nvidia-smi -e 1, and restart the machine")


def _state(ask: Ask) -> Iterator[Finding]:
    """Clocks, power limit, temperature and mode, as far as the driver tells."""
    now, most = _number(ask("clocks.sm")), _number(ask("clocks.max.sm"))
    if now is not None and most is not None:
        yield Finding("ok", f"SM clock {now:.0f} MHz now, at most {most:.0f} MHz")
    limit, usual = _number(ask("power.limit")), _number(ask("power.default_limit"))
    if limit is not None and usual is not None:
        if limit < 0.99 * usual:
            remedy = f"nvidia-smi -pl {usual:.0f}, or compare with results under the same limit only"
            yield Finding("warn", f"the power limit is {limit:.0f} W, the card's own {usual:.0f} W", remedy)
        else:
            yield Finding("ok", f"power limit {limit:.0f} W")
    heat = _number(ask("temperature.gpu"))
    if heat is not None and heat >= HOT:
        yield Finding("warn", f"the GPU has {heat:.0f} C", "let it cool, or see to its air: it clocks down soon")
    mode = ask("compute_mode")
    if mode not in (None, "Default"):
        remedy = "nvidia-smi -c 0; tests and workers that run in several processes cannot share it"
        yield Finding("fail" if mode == "Prohibited" else "warn", f"compute mode {mode}", remedy)


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _cache() -> Iterator[Finding]:
    """Whether compiled kernels can be kept: without a place for them nothing runs."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton")
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    free, home = shutil.disk_usage(place).free, str(Path.home())
    shown = str(cache).replace(home, "~", 1) if str(cache).startswith(home) else str(cache)
    if not os.access(place, os.W_OK) or free < LOW_DISK:
        yield Finding("fail", f"no room for compiled kernels in {shown}", "set TRITON_CACHE_DIR to a folder with space")
    else:
        yield Finding("ok", f"compiled kernels are kept in {shown}, {free / 1e9:.0f} GB free")


def _counters(params: Path = Path("/proc/driver/nvidia/params")) -> Iterator[Finding]:
    if not params.exists():
        return
    restricted = "RmProfilingAdminOnly: 1" in params.read_text()
    if restricted and os.geteuid() != 0:
        remedy = "run ncu as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        yield Finding("warn", "ncu may not read the profiling counters (ERR_NVGPUCTRPERM)", remedy)
    else:
        yield Finding("ok", "ncu may read the profiling counters")


def _optional() -> Iterator[Finding]:
    for package, purpose in OPTIONAL.items():
        found = _version(package)
        yield Finding("ok", f"{package} {found}") if found else Finding("warn", f"{package} is not installed", purpose)
    chrome = next((path for name in CHROME if (path := shutil.which(name))), None)
    if chrome:
        yield Finding("ok", f"Chrome at {chrome}")
    else:
        yield Finding(
            "warn", "no Chrome or Chromium", "only the export of plotly figures as PNG or PDF needs one: install it"
        )


def _why_no_gpu(run: Run) -> str:
    try:
        import torch
    except Exception as error:
        return f"torch cannot be imported ({error})"
    names = [
        n for n in (run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]) or "").splitlines() if n.strip()
    ]
    if not names:
        return "there is none, or its driver does not answer"
    if not (torch.version.cuda or torch.version.hip):
        return f"{names[0]} is here, but this torch is built for the CPU alone"
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return f"{names[0]} is here, but CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides it"
    return f"{names[0]} is here, but torch cannot use it; the driver may be too old for CUDA {torch.version.cuda}"


def _physical(index: int) -> str:
    """What nvidia-smi calls the GPU that torch calls `index`."""
    visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return visible[index] if index < len(visible) else str(index)


def _run(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(package: str) -> str | None:
    for name in (package, package.replace("_", "-")):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _folder(package: str) -> Path | None:
    """Where a top-level package lies, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def _numbers(version: str) -> tuple[int, int]:
    parts = [int(number) for number in re.findall(r"\d+", version.split("+")[0])[:2]]
    return (parts + [0, 0])[0], (parts + [0, 0])[1]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
