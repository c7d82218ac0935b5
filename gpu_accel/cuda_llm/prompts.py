"""What a language model is told: the task, how kernels are given here, the GPU, and what became of its last kernels.

The three parts of a prompt are those of Feature Search and Reinforcement: the task in words, the code around the
kernel, and the GPU. Until a kernel is right the last ones go back with their errors; then the fastest one, with its
time and what is left to the roofline. Hidden shapes, seeds and expected results are not in any of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_accel.hardware.catalog import profile

from .proposers import Attempt, Brief, ranked
from .triton_source import TL_FUNCTIONS

Message = dict[str, str]
MOST_FAILURES = 2  # that go back at once
LONGEST_LOG = 1500  # characters of an error


SYSTEM = """You write GPU kernels. Answer with one code block that holds one candidate: a launch header in comments,
then its kernel, and nothing else. In Triton the header's lines begin with #, in CUDA C++ with //.

The header is TOML between `# /// launch` and `# ///`: grid = ["..."] (one to three sizes), num_warps, num_stages,
[constants] (tl.constexpr parameters; in CUDA C++ they are #defined), [fill] (outputs set to a value before the launch).
Sizes are integers or expressions of the dimensions and constants with + - * // %, cdiv, min, max, next_power_of_2.
CUDA C++ also has entry = "name", args = ["...", ...], block = ["..."], shared = bytes, and one kernel that is
extern "C" __global__. Further kernels may follow on the same buffers: give them in the same block, and for each a
table [[then]] with entry = "name", grid and warps (args, block and shared in CUDA C++); [workspace.name] with shape =
["..."] is memory between them. Arguments are passed by name: buffers are pointers to contiguous row-major arrays,
dimensions are integers (long long in CUDA C++). Any size may be odd: mask. No host code, no imports, no state between
launches, no tensor-library calls.
"""


def messages(brief: Brief, history: Sequence[Attempt]) -> list[Message]:
    """System and user message for the next candidate."""
    asked = _improve(brief, history) if any(one.number > 0 and one.ok for one in history) else _repair(brief, history)
    user = "\n\n".join([_task(brief), _gpu(brief), asked])
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]


def kernels_in(reply: str) -> list[str]:
    """The code blocks of a reply; all of it where there is none."""
    inside = (part.partition("\n") for part in reply.split("```")[1::2])  # the rest of a fence's line is no code
    found = [text for _, end, text in inside if end and text.strip()]
    return found or [reply]


def _task(brief: Brief) -> str:
    task = brief.task
    lines = [f"Task: {task.title} ({task.name}). Dimensions: {', '.join(task.dims)}."]
    for word, buffers in (("Input", task.inputs), ("Output", task.outputs)):
        lines += [f"{word} {one.name}: {one.dtype} of shape ({', '.join(map(str, one.shape))})." for one in buffers]
    sizes = " or ".join(", ".join(f"{k} = {v}" for k, v in dims.items()) for dims in (task.bench, *task.shown))
    lines.append(f"Sizes are such as {sizes}; it is timed at the first. Results are compared with float64.")
    lines.append(f"Triton functions that may be used: {', '.join(sorted(TL_FUNCTIONS))}.")
    return "\n".join(lines)


def _gpu(brief: Brief) -> str:
    card = profile(brief.target)
    return (
        f"GPU: {card.title}, {card.bandwidth_gbs:.0f} GB/s. The least time by its datasheet is "
        f"{brief.task.floor_ms(brief.task.bench, card):.4g} ms."
    )


def _repair(brief: Brief, history: Sequence[Attempt]) -> str:
    parts = [f"This kernel is right; write a faster one:\n```\n{brief.start.text}```"]
    for one in [one for one in history if one.number > 0 and not one.ok][-MOST_FAILURES:]:
        parts.append(f"Do not repeat this one, which was rejected, {_why(one)}\n```\n{one.source}\n```")
    return "\n\n".join(parts)


def _improve(brief: Brief, history: Sequence[Attempt]) -> str:
    best = ranked(history)[0]
    took = f"It takes {best.ms:.4g} ms. " if best.ms else ""
    parts = [f"The best kernel so far. {took}Write a faster one:\n```\n{best.source}```"]
    last = history[-1]
    if not last.ok:
        parts.append(f"Your last one was rejected, {_why(last)}\n```\n{last.source}\n```")
    return "\n\n".join(parts)


def _why(attempt: Attempt) -> str:
    return f"{attempt.judgement.name}: {attempt.judgement.detail[:LONGEST_LOG]}"
