"""Malformed candidates by the thousand: each must get a typed verdict, and the harness must live on.

    found = fuzz(1000, pool=pool)
    found.counts, found.ok

They are made from real kernels and known hacks: cut, shuffled, sprinkled with words and bytes, blown up, turned into
noise, and given endless loops, bombs of memory and foreign addresses. The same seed makes the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_accel.errors import shown

from .fixtures import FIXTURES
from .harness import check
from .pool import Pool
from .sandbox import Sandbox
from .tasks import TASKS, Task
from .verdict import Judgement, Verdict

Text = str | bytes
SECONDS = 4.0  # wall clock of one; endless ones take all of it
HEALTH = 50  # after so many, an honest kernel must still be accepted

_WORDS = [
    *"\0\t()[]:\n=é\\*/{%", "import os", "tl.", "__class__", "while 1: pass", "def ", "# ///", "@triton.jit",
    "9" * 5000, '"""', "lambda", "    ", "exec", "1e999", "grid", "asm(", "#include", "__device__ int", "<<<1, 1>>>",
]  # fmt: skip
_BLOWS = [
    "    while tl.load(x) == tl.load(x):\n        tl.atomic_add(out, 0.0)\n",
    "    for step in range(1 << 40):\n        tl.atomic_add(out, 0.0)\n",
    "    kept = (0, 0)\n    for step in range(400):\n        kept = (kept, tl.full((1024, 1024), 1.0, tl.float32))\n",
    "    tl.store(out - 99999999, 1.0)\n",
    "    tl.store(out + 70368744177664, 1.0)\n",
    "    big = tl.zeros((1 << 30,), tl.float32)\n",
    "    y = ((((((1 << 99) << 99) << 99) << 99) << 99) << 99)\n",
    "    for a in tl.static_range(1000000):\n        tl.atomic_add(out, 0.0)\n",
]
_GIANTS = ["#" * 70_000, "\n" * 60_000, "(" * 3000, "    x = 1\n" * 5000, "-" * 30_000 + "1"]


def mutants(count: int, seed: int = 20261128) -> list[Text]:
    """`count` broken candidates, the same for the same seed."""
    source = random.Random(seed)
    texts = [one.start for one in TASKS.values()] + [one.hack for one in FIXTURES if one.hack]
    texts += [one.naive_cuda for one in TASKS.values()]
    ways: tuple[Callable[[str], Text], ...] = (
        lambda text: text[: source.randrange(len(text))],
        lambda text: source.randbytes(source.randrange(1, 4000)),
        lambda text: _sprinkled(text, source),
        lambda text: _shuffled(text, source),
        lambda text: _flipped(text, source),
        lambda text: text + source.choice(_GIANTS),
        lambda text: text.rstrip("\n") + "\n" + source.choice(_BLOWS),
    )
    return [source.choice(ways)(source.choice(texts)) for _ in range(count)]


def _sprinkled(text: str, source: random.Random) -> str:
    for _ in range(source.randrange(1, 8)):
        at = source.randrange(len(text))
        text = text[:at] + source.choice(_WORDS) + text[at:]
    return text


def _shuffled(text: str, source: random.Random) -> str:
    lines = text.splitlines(True)
    source.shuffle(lines)
    return "".join(lines)


def _flipped(text: str, source: random.Random) -> bytes:
    data = bytearray(text.encode())
    for _ in range(source.randrange(1, 30)):
        data[source.randrange(len(data))] = source.randrange(256)
    return bytes(data)


@dataclass
class Fuzzed:
    """What became of them."""

    counts: dict[str, int] = field(default_factory=dict)
    untyped: list[str] = field(default_factory=list)  # what no candidate should bring about: exceptions of ours
    healthy: int = 0  # honest kernels accepted in between
    sick: int = 0
    restarts: int = 0  # of workers

    @property
    def ok(self) -> bool:
        return not self.untyped and not self.sick

    def as_dict(self) -> dict[str, object]:
        return {"counts": dict(sorted(self.counts.items())), "untyped": self.untyped, "healthy": self.healthy,
                "sick": self.sick, "worker_restarts": self.restarts, "ok": self.ok}  # fmt: skip


def fuzz(
    count: int, *, pool: Pool, task: Task | str = "matrix_copy", seed: int = 20261128,
    tell: Callable[[int, Judgement], None] | None = None,
) -> Fuzzed:  # fmt: skip
    """Judge `count` mutants as candidates for a task, and an honest kernel after every `HEALTH` of them."""
    chosen = TASKS[task] if isinstance(task, str) else task
    found = Fuzzed()

    def one(sandbox: Sandbox, text: Text) -> Judgement:
        return check(text, chosen, sandbox=sandbox, seed=seed, seconds=SECONDS + (SECONDS if sandbox.gpu else 0))

    def honest(sandbox: Sandbox) -> Judgement:
        return check(chosen.candidate, chosen, sandbox=sandbox, seed=seed)

    waiting = []
    for number, text in enumerate(mutants(count, seed)):
        waiting.append((number, pool.submit(lambda sandbox, text=text: one(sandbox, text))))  # type: ignore[misc]
        if number % HEALTH == HEALTH - 1 or number == count - 1:
            waiting.append((-1, pool.submit(honest)))
    for number, future in waiting:
        try:
            judged = future.result()
        except Exception as error:
            found.untyped.append(f"mutant {number}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if number < 0:
            found.healthy += judged.ok
            found.sick += not judged.ok
            continue
        if not isinstance(judged.verdict, Verdict) or not judged.detail:
            found.untyped.append(f"mutant {number}: {shown(judged, 200)}")
        found.counts[judged.name] = found.counts.get(judged.name, 0) + 1
        if tell:
            tell(number, judged)
    found.restarts = pool.restarts
    return found
