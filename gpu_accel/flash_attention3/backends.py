"""Which kernels can run a problem, and which one does.

A backend is a module with `refuse(problem) -> str | None` and `forward(q, k, v, ...)`, and perhaps a module with
`refuse` and `backward(do, q, k, v, o, lse, ...)`. The order below is the order of preference; modules are imported only
when asked about. All of them produce the same (o, lse), so the forward of one goes with the backward of another.

What not every kernel can do (sinks, ALiBi, modifiers, block masks ...) is in `Problem.features`, and a module that can
names it in its constant `FEATURES` and takes `features=`; a module without one is never offered such a problem.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass, replace
from types import ModuleType

from gpu_accel.errors import GpuAccelError, HardwareError, InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.problem import Problem

_PACKAGE = "gpu_accel.flash_attention3"
_OF_THE_FORWARD = frozenset({"return_max_logits", "batch_invariant"})  # nothing that a backward would have to know


@dataclass(frozen=True)
class Backend:
    """Where a backend lives, the capability of a machine that it is made for, and why "auto" never takes it."""

    name: str
    forward: str
    backward: str
    made_for: tuple[int, int] | None = None
    only_by_name: str = ""


BACKENDS = {
    b.name: b
    for b in (
        Backend("hopper", "hopper", "hopper_backward", (9, 0)),
        Backend("blackwell", "blackwell", "blackwell_backward", (10, 0), "experimental and not measured"),
        Backend("portable", "portable_forward", "portable_backward", (9, 0)),
        Backend("reference", "reference_backend", "reference_backend"),
    )
}
NAMES = ("auto", *BACKENDS)


@functools.cache
def module(backend: Backend, pass_: str) -> ModuleType | None:
    """The module of one pass ("forward" or "backward"), or None where the backend has none."""
    name = f"{_PACKAGE}.{backend.forward if pass_ == 'forward' else backend.backward}"
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


def features_of(features: frozenset[str], pass_: str) -> frozenset[str]:
    """Those that a pass has to know."""
    return features - _OF_THE_FORWARD if pass_ == "backward" else features


def refusal(name: str, pass_: str, problem: Problem) -> str | None:
    """Why backend `name` cannot run this pass of the problem, or None."""
    found = module(BACKENDS[name], pass_)
    if found is None:
        return f"has no {pass_} kernel"
    wanted = features_of(problem.features, pass_)
    missing = sorted(wanted - getattr(found, "FEATURES", frozenset()))
    if missing:
        return f"does not do {', '.join(missing)}"
    if pass_ == "backward" and "score_mod" in wanted and "score_mod_grad" not in wanted:
        return "score_mod has no score_mod_grad"
    return found.refuse(replace(problem, requires_grad=False))


def _error(name: str, pass_: str, problem: Problem, why: str) -> GpuAccelError:
    """HardwareError where only the machine is in the way, otherwise UnsupportedError."""
    made_for = BACKENDS[name].made_for
    elsewhere = replace(problem, device_type="cuda", capability=made_for)
    only_machine = made_for is not None and refusal(name, pass_, elsewhere) is None
    kind = HardwareError if only_machine else UnsupportedError
    return kind(f"backend {name!r} cannot run the {pass_} of {problem}: {why}")


def check_name(backend: object) -> None:
    """The name of a backend, or "auto"."""
    if not isinstance(backend, str) or backend not in NAMES:
        raise InvalidInputError(f"backend must be one of {', '.join(NAMES)}, got {shown(backend)}")


def choose(problem: Problem, backend: str, pass_: str) -> tuple[str, dict[str, str]]:
    """The backend for one pass, and why each one before it in the order of preference was refused.

    "auto" never takes the reference for a GPU tensor: it would be slow without saying so. A named backend without a
    backward for this problem leaves that pass to "auto", since every backward takes every forward's results.

    Raises:
        InvalidInputError: unknown name. HardwareError, UnsupportedError: nothing (or not the named one) can run it.
    """
    check_name(backend)
    if backend != "auto":
        why = refusal(backend, pass_, problem)
        if why is None:
            return backend, {}
        if pass_ == "forward":
            raise _error(backend, pass_, problem, why)
    refused: dict[str, str] = {}
    for name, one in BACKENDS.items():
        if one.only_by_name:
            refused[name] = f"{one.only_by_name}, so only when asked for by backend={name!r}"
            continue
        if name == "reference" and problem.device_type != "cpu":
            refused[name] = "slow, so only when asked for by backend='reference'"
            continue
        why = refusal(name, pass_, problem)
        if why is None:
            return name, refused
        refused[name] = why
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
    raise UnsupportedError(f"no backend can run the {pass_} of {problem} ({reasons})")
