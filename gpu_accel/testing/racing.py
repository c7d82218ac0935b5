"""Finds shared memory that a loop fills for its next turn while products of this turn are still reading it.

Triton 3.6 gives a loaded tile a second buffer where a product reads it from shared memory asynchronously. A tile that
is also read into registers (float16 to be widened beside a float32 state) gets one, as the state does; and that other
product is cut into slices whose waits leave a whole turn of products on their way. Copies for the next turn then race
with them, and where there is no next turn, zeros are written at once.

The intermediate code (TTGIR) says which buffers there are, what reads them and what is waited for.
"""

from __future__ import annotations

import re

_LOOP = re.compile(r"(\s*).*\bscf\.for\b")
_DERIVED = re.compile(r"(%\w+)(?::\d+)? = ttg\.memdesc_\w+ (%\w+)")
_ONE_BUFFER = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<1x")
_COPY = re.compile(r"ttg\.async_copy_global_to_local %\w+, (%\w+)")
_PRODUCT = re.compile(r"ttng\.warp_group_dot (%\w+), (%\w+),.*isAsync = true")
_WAIT = re.compile(r"ttng\.warp_group_dot_wait .*pendings = (\d+)")


def racing_copies(ttgir: str) -> list[str]:
    """One line for each buffer of a loop that is overwritten while products that read it are on their way."""
    lines = ttgir.splitlines()
    owner = {found[1]: found[1] for line in lines if (found := _ONE_BUFFER.search(line))}
    if not owner:
        return []
    for line in lines:
        if (found := _DERIVED.search(line)) and found[2] in owner:
            owner[found[1]] = owner[found[2]]
    faults: dict[str, str] = {}
    for start, line in enumerate(lines):
        if not (loop := _LOOP.match(line)):
            continue
        stop = next((i for i in range(start + 1, len(lines)) if lines[i].startswith(loop[1] + "}")), len(lines))
        flying: list[set[str]] = []  # what each product that may still be running reads
        for text in lines[start + 1 : stop] * 2:  # two turns: what the first leaves running
            if found := _PRODUCT.search(text):
                flying.append({owner[name] for name in found.groups() if name in owner})
            elif found := _WAIT.search(text):
                flying = flying[max(0, len(flying) - int(found[1])) :]
            elif (found := _COPY.search(text)) and (late := sum(owner.get(found[1]) in reads for reads in flying)):
                buffer = owner[found[1]]
                faults[buffer] = f"{buffer} is overwritten by a copy while {late} products that read it may run"
    return list(faults.values())
