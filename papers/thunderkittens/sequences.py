"""The `linear-attention` and `mamba2` experiments.

    hopper      ours: the forward in Gluon, the backward too where gates need gradients and walk_back.CHECKED has it
    portable    ours, plain Triton
    torch       the same chunks as eager torch products (the reference, and the ruler of the check)
    fla         chunk_linear_attn, chunk_simple_gla, chunk_gla, chunk_delta_rule or chunk_gated_delta_rule of
                flash-linear-attention, where it is installed
    hopper-given, fla-made    one decay a head, forwards: ours with decays that are there, as fla has them, and fla with
                decays that are made in every call, as ours makes them
    mamba_ssm            mamba_chunk_scan_combined on the same tensors, chunk 256, where it is installed
    mamba_ssm-fp32-64    the same on float32 tensors with chunk 64: how the paper's script called it, forwards

Peers tune themselves when they are checked, before anything is timed; their configurations are compiled side by side.

At most 2^26 numbers of a tensor are judged: whole sequences of the batch, which do not depend on each other.
The FLOPs of a case are those of the recurrence (4 K V a step and head); times are the result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.thunderkittens import chunked, delta, walk_hopper
from gpu_accel.thunderkittens import linear as la
from gpu_accel.thunderkittens.gla import chunk_gla
from gpu_accel.thunderkittens.gla import refusal as gla_refusal
from gpu_accel.thunderkittens.mamba2 import mamba_chunk_scan_combined
from gpu_accel.workbench.experiment import Case, Implementation, Settings, Workload, completed, refuse_beyond_memory

from . import judging
from .judging import DTYPES, Function, randn

# batch, seqlen, heads, key_dim, value_dim: the shapes of the paper's scripts, and one long sequence
_SHAPES = [(8, 2048, 16, 128, 128), (8, 8192, 16, 128, 128), (1, 16384, 16, 128, 128), (16, 4096, 16, 16, 64)]
# batch, seqlen, heads, headdim, dstate, groups: mamba_ssm's own, and the paper's
_MAMBA = [(8, 2048, 80, 64, 128, 1)] + [(16, n, 16, 64, 64, 1) for n in (1024, 2048, 4096, 8192, 16384)]
PASSES = ("forward", "backward")
GATES = ("none", "decay", "step", "key", "delta", "delta-step")
_NAMES = ("batch", "seqlen", "heads", "key_dim", "value_dim")
_MAMBA_NAMES = ("batch", "seqlen", "heads", "headdim", "dstate", "groups")
AXES, WORDS = dict(zip(_NAMES, _SHAPES[0], strict=True)), {"gate": GATES, "pass": PASSES}
MAMBA_AXES, MAMBA_WORDS = dict(zip(_MAMBA_NAMES, _MAMBA[0], strict=True)), {"pass": PASSES}
_TUNED = "tuned by its own autotuner over all of its configurations before it is timed"


def attention_cases(settings: Settings) -> list[Case]:
    """The paper's shapes, on a CPU a small one; `settings.shapes` take their place, with all gates and both passes."""
    shapes = _SHAPES[: 1 if settings.quick else None] if settings.on_gpu else [(1, 37, 2, 24, 40)]
    own: list[Case] = [
        dict(zip(_NAMES, shape, strict=True))
        | {"gate": gate, "pass": pass_, "dtype": settings.precision, "input": "normal"}
        for shape in shapes
        for gate in _gates(settings, shape)
        for pass_ in PASSES
    ]  # fmt: skip
    gates = GATES if settings.on_gpu else _gates(settings, ())
    return completed(settings.shapes, own[0], {"gate": gates, "pass": PASSES}) if settings.shapes else own


def _gates(settings: Settings, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Gates for every key dimension and the delta rule at the first shape only: fla tries some 250 configurations each.

    "delta" and "delta-step": the delta rule without gates, and with one a step.
    """
    if not settings.on_gpu:
        return "none", "step", "key", "delta-step"
    few = ("none", "step") if settings.quick else ("none", "decay", "step")
    return (*few, "key", "delta", "delta-step") if shape == _SHAPES[0] and not settings.quick else few


def _inputs(case: Case, seed: int, device: str) -> list[Tensor]:
    """q, k, v and for gates "step" and "key" log gates of about -0.06.

    For the delta rule q and k of unit length, beta in 0 .. 1 and, for "delta-step", such gates.
    """
    batch, seqlen, heads = (int(case[n]) for n in ("batch", "seqlen", "heads"))
    dims = (int(case["key_dim"]),) * 2 + (int(case["value_dim"]),)
    dtype = DTYPES[str(case["dtype"])]
    made = [randn(batch, seqlen, heads, d, seed=8 * seed + n, device=device, dtype=dtype) for n, d in enumerate(dims)]
    if _is_delta(case):
        made[:2] = (torch.nn.functional.normalize(x.float(), dim=-1).to(dtype) for x in made[:2])
        made.append(randn(batch, seqlen, heads, seed=8 * seed + 4, device=device).sigmoid())
    if case["gate"] in ("step", "key", "delta-step"):
        shape = (batch, seqlen, heads, dims[0])[: 4 if case["gate"] == "key" else 3]
        made.append(torch.nn.functional.logsigmoid(3 + randn(*shape, seed=8 * seed + 3, device=device)))
    return made


def _is_delta(case: Case) -> bool:
    return str(case["gate"]).startswith("delta")


def _linear(case: Case, backend: str, given: bool = False) -> Function:
    """given: decays of heads are made once, and not in every call."""
    if _is_delta(case):
        return lambda q, k, v, beta, g=None: delta.delta_rule(q, k, v, beta, g=g, backend=backend)[0]

    made: list[Tensor] = []

    def call(q, k, v, g=None):
        if given:
            if not made:
                made.append(la.retention_decay(q.shape[2], q.device))
            return la.chunk_simple_gla(q, k, v, g_gamma=made[0], backend=backend)[0]
        if case["gate"] == "decay":
            return la.chunk_retention(q, k, v, backend=backend)[0]
        if case["gate"] == "key":
            return chunk_gla(q, k, v, g, backend=backend)[0]
        return la.chunk_simple_gla(q, k, v, g, backend=backend)[0]

    return call


def _fla(case: Case, given: bool = True) -> Function:
    def corrects(q, k, v, beta, g=None):
        if g is None:
            from fla.ops.delta_rule import chunk_delta_rule

            return chunk_delta_rule(q, k, v, beta)[0]
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(q, k, v, g, beta)[0]

    if _is_delta(case):
        return corrects

    decays: list[Tensor] = []  # if given made once, not in what is timed; ours makes them in every call

    def call(q, k, v, g=None):
        if case["gate"] == "none":
            from fla.ops.linear_attn import chunk_linear_attn

            return chunk_linear_attn(q, k, v, normalize=False)[0]
        if case["gate"] == "key":
            from fla.ops.gla import chunk_gla as theirs

            return theirs(q, k, v, g)[0]
        from fla.ops.simple_gla import chunk_simple_gla

        if case["gate"] == "decay" and not (given and decays):
            decays[:] = [la.retention_decay(q.shape[2], q.device)]
        return chunk_simple_gla(q, k, v, g, g_gamma=decays[0] if decays else None)[0]

    return call


def part_of(case: Case) -> judging.Part | None:
    """The first sequences of the batch, or None where all are judged."""
    wide = max(int(case[n]) for n in ("key_dim", "value_dim", "headdim", "dstate") if n in case)
    few = max(1, judging.MOST // (int(case["seqlen"]) * int(case["heads"]) * wide))
    return None if few >= int(case["batch"]) else lambda x: x[:few]


def hopper_refusal(settings: Settings, precision: str, half: bool = False) -> str:
    """Why the kernels in Gluon cannot run here; empty when they can. half: those that take float16, too."""
    return walk_hopper.machine_refusal(torch.empty(0, dtype=DTYPES[precision], device=settings.device), half) or ""


def _refuse_sizes(case: Case, wide: tuple[str, str]) -> None:
    """What no implementation here takes. wide: names of the dimensions of keys and of values."""
    key_dim, value_dim = (int(case[name]) for name in wide)
    refuse_beyond_memory(int(case["batch"]) * int(case["seqlen"]) * int(case["heads"]) * (key_dim + value_dim))
    if max(key_dim, value_dim) > la.LARGEST_DIM:
        raise UnsupportedError(f"{' and '.join(wide)} are at most {la.LARGEST_DIM}, got {key_dim} and {value_dim}")


def _size_refusal(case: Case, key_dim: int, value_dim: int) -> str:
    """Why the kernels in Gluon cannot take these sizes; empty when they can."""
    shape = [int(case[name]) for name in ("batch", "seqlen", "heads")]
    q, v = (torch.empty(*shape, dim, device="meta") for dim in (key_dim, value_dim))
    return walk_hopper.size_refusal(q, v, None, chunked.CHUNK) or ""


def _implementation(
    name: str, role: str, function: Function, truth: Function, ruler: Function, make_inputs: Callable, case: Case,
    settings: Settings, why: str = "", note: str = "", shared: tuple[int, ...] = (), known: dict | None = None,
) -> Implementation:  # fmt: skip
    backward = case["pass"] == "backward"
    part = part_of(case)

    def check(seed: int):
        return judging.judge(
            function, truth, ruler, make_inputs(seed), seed, backward, settings.on_gpu, part=part, shared=shared,
            factor=judging.RIVALS_FACTOR if role == "peer" else judging.FACTOR, ahead=role == "peer",
            known=known,
        )  # fmt: skip

    def make(seed: int):
        return judging.timed(function, make_inputs(seed), seed, backward)

    return Implementation(name=name, role=role, check=check, make=make, unavailable=why, note=note)


def build_attention(case: Case, settings: Settings) -> Workload:
    _refuse_sizes(case, ("key_dim", "value_dim"))
    make_inputs = functools.partial(_inputs, case, device=settings.device)
    eager = _linear(case, "reference")
    made = functools.partial(
        _implementation, truth=eager, ruler=eager, make_inputs=make_inputs, case=case, settings=settings, known={}
    )
    batch, seqlen, heads, key_dim, value_dim = (
        int(case[n]) for n in ("batch", "seqlen", "heads", "key_dim", "value_dim")
    )
    steps, itemsize = batch * seqlen * heads, DTYPES[str(case["dtype"])].itemsize
    reads = 2 * key_dim + value_dim
    moved = reads + value_dim if case["pass"] == "forward" else 2 * reads + value_dim
    gates = 4 * steps * {"step": 1, "key": key_dim, "delta": 1, "delta-step": 2}.get(str(case["gate"]), 0)
    half = not _is_delta(case) and case["gate"] != "key"
    why, plain = hopper_refusal(settings, str(case["dtype"]), half) or _size_refusal(case, key_dim, value_dim), ""
    if _is_delta(case) and key_dim > delta.LARGEST_KEY:
        plain = f"the kernels of the delta rule hold keys of {delta.LARGEST_KEY} dimensions"
    if case["gate"] == "key":
        why = why or ("" if case["pass"] == "forward" else "gradients of gates of every key dimension are `portable`")
        values = torch.empty(0, 0, 0, value_dim, dtype=DTYPES[str(case["dtype"])], device=settings.device)
        plain = gla_refusal(values, key_dim) or ""
    no_fla, more = judging.missing("fla", settings), []
    if case["gate"] == "decay" and case["pass"] == "forward":
        given, every = "decays made once, as for fla", "decays made in every call, as ours are"
        more = [
            made("hopper-given", "ours", _linear(case, "hopper", given=True), why=why, note=given),
            made("fla-made", "peer", _fla(case, given=False), why=no_fla, note=every),
        ]
    return Workload(
        implementations=[
            made("hopper", "ours", _linear(case, "hopper"), why=why),
            made("portable", "ours", _linear(case, "portable"), why=plain),
            made("torch", "reference", eager, note="chunks of 64 as eager products"),
            made("fla", "peer", _fla(case), why=no_fla),
            *more,
        ],
        baselines=("fla", *(["fla-made"] if more else []), "torch"),
        flops=steps * 4.0 * key_dim * value_dim * (1 if case["pass"] == "forward" else 2.5),
        bytes_moved=steps * moved * itemsize + gates * (1 if case["pass"] == "forward" else 2),
    )


def mamba_cases(settings: Settings) -> list[Case]:
    """mamba_ssm's own shape and the paper's, on a CPU a small one; `settings.shapes` take their place."""
    shapes = _MAMBA[: 2 if settings.quick else None] if settings.on_gpu else [(1, 21, 2, 16, 16, 1)]
    own: list[Case] = [
        dict(zip(_MAMBA_NAMES, shape, strict=True)) | {"pass": pass_, "dtype": settings.precision, "input": "normal"}
        for shape in shapes
        for pass_ in PASSES
    ]
    return completed(settings.shapes, own[0], {"pass": PASSES}) if settings.shapes else own


def _mamba_inputs(case: Case, seed: int, device: str) -> list[Tensor]:
    """x, dt (after softplus, 0.001 to 0.1), A (-1 to -16), B, C, as a fresh Mamba-2 layer has them."""
    batch, seqlen, heads, headdim, dstate, groups = (
        int(case[n]) for n in ("batch", "seqlen", "heads", "headdim", "dstate", "groups")
    )
    dtype = DTYPES[str(case["dtype"])]
    x = randn(batch, seqlen, heads, headdim, seed=8 * seed, device=device, dtype=dtype)
    dt = 0.01 * torch.exp(2.3 * randn(batch, seqlen, heads, seed=8 * seed + 1, device=device).clamp(-1, 1))
    decay = -(1 + 15 * torch.sigmoid(randn(heads, seed=8 * seed + 2, device=device)))
    b, c = (
        randn(batch, seqlen, groups, dstate, seed=8 * seed + n, device=device, dtype=dtype) for n in (3, 4)
    )  # fmt: skip
    return [x, dt, decay, b, c]


def _mamba(backend: str) -> Function:
    as_it_is = (-math.inf, math.inf)  # dt is positive
    return lambda x, dt, A, B, C: mamba_chunk_scan_combined(x, dt, A, B, C, 64, dt_limit=as_it_is, backend=backend)


def _mamba_ssm(chunk: int) -> Function:
    def call(x, dt, A, B, C):
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined as theirs

        return theirs(x, dt, A, B, C, chunk)

    return call


def build_mamba(case: Case, settings: Settings) -> Workload:
    _refuse_sizes(case, ("dstate", "headdim"))
    if int(case["heads"]) % int(case["groups"]):
        raise UnsupportedError(f"the {case['heads']} heads must be a multiple of the {case['groups']} groups")
    make_inputs = functools.partial(_mamba_inputs, case, device=settings.device)
    eager = _mamba("reference")
    made = functools.partial(
        _implementation, truth=eager, ruler=eager, make_inputs=make_inputs, case=case, settings=settings, shared=(2,),
        known={},
    )  # fmt: skip
    why = judging.missing("mamba_ssm", settings)
    no_hopper = hopper_refusal(settings, str(case["dtype"]), True)
    no_hopper = no_hopper or _size_refusal(case, int(case["dstate"]), int(case["headdim"]))

    def wide_inputs(seed: int) -> list[Tensor]:
        return [t.float() for t in make_inputs(seed)]

    def as_tensor_cores(x, dt, A, B, C):
        """Tensor cores cut what they multiply to tf32, also what a chunk made; 16 bits are coarser: the same in them.

        Rounding the inputs alone, as this did, bounds nothing: they are 16-bit numbers already.
        """
        x, B, C = (t.to(DTYPES[str(case["dtype"])]) for t in (x, B, C))
        return eager(x, dt, A, B, C).to(dt.dtype)

    batch, seqlen, heads, headdim, dstate, groups = (
        int(case[n]) for n in ("batch", "seqlen", "heads", "headdim", "dstate", "groups")
    )
    steps, itemsize = batch * seqlen, DTYPES[str(case["dtype"])].itemsize
    inputs = (heads * headdim + 2 * groups * dstate) * itemsize + 4 * heads
    forward = case["pass"] == "forward"
    handicapped = made(
        "mamba_ssm-fp32-64",
        "peer",
        _mamba_ssm(64),
        why=why,
        make_inputs=wide_inputs,
        ruler=as_tensor_cores,
        known={},
        note=f"float32 x, B and C, chunk 64: as the paper's script called it, which has no backward; {_TUNED}",
    )
    return Workload(
        implementations=[
            made("hopper", "ours", _mamba("hopper"), why=no_hopper),
            made("portable", "ours", _mamba("portable")),
            made("torch", "reference", eager, note="chunks of 64 as eager products"),
            made("mamba_ssm", "peer", _mamba_ssm(256), why=why, note=f"chunk 256, the module's default; {_TUNED}"),
            *([handicapped] if forward else []),
        ],
        baselines=("mamba_ssm", *(["mamba_ssm-fp32-64"] if forward else []), "torch"),
        flops=steps * heads * 4.0 * headdim * dstate * (1 if forward else 2.5),
        bytes_moved=steps * (inputs * (1 if forward else 2) + heads * headdim * itemsize),
    )  # fmt: skip
