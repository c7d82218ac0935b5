"""Finds descriptors of wgmma that depend on the way on which a product was reached: `descriptors_of_two_origins`.

ptxas 12.8 and 12.9, for sm_90a: a descriptor of a tile in shared memory was made before a branch and used in a loop on
either side of it. Its uniform registers were set in front of the first loop only, so when that loop was left out, the
second read a tile from wherever they happened to point: an illegal access, or other numbers in every run (FP8 attention
with a loop of its own for masked steps, on an H200). In the machine code such a register has two definitions that reach
the product. A kernel whose products choose between tiles would have that too; ours compute addresses instead.
"""

from __future__ import annotations

import re

_LABEL = re.compile(r"\s*(\.L\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(.*?)\s*;")
_BRANCH = re.compile(r"\bBRA\b[^`]*`\((\.L\w+)\)")
_PRODUCT = re.compile(r"[HIQ]GMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]")
_RESULT = re.compile(r"(?:@!?U?P\w+ )?(U\w[\w.]*|R2UR\S*|S2UR\S*|REDUX\S*) (?:U?P\w+, )*UR(\d+)\b")
_PAIRS = (".WIDE", ".64")


def _written(text: str) -> set[int]:
    """The uniform registers that an instruction writes."""
    found = _RESULT.match(text)
    if not found:
        return set()
    first = int(found[2])
    return {first, first + 1} if any(x in found[1] for x in _PAIRS) else {first}


def _predecessors(texts: list[str], labels: dict[str, int]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in texts]
    for i, text in enumerate(texts):
        branch = _BRANCH.search(text)
        guarded = text.startswith("@")
        if branch:
            before[labels[branch[1]]].append(i)
            guarded = guarded or bool(re.search(r"BRA\S* !?U?P", text)) or "DIV" in text
        ends = (branch or "EXIT" in text) and not guarded
        if i + 1 < len(texts) and not ends:
            before[i + 1].append(i)
    return before


def descriptors_of_two_origins(sass: str) -> list[str]:
    """Products whose descriptor registers have several definitions that reach them, with the register's number."""
    texts: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(texts)
        elif found := _INSTRUCTION.search(line):
            texts.append(found[1])
    written = [_written(text) for text in texts]
    before = _predecessors(texts, labels)

    def definitions(at: int, register: int) -> set[int]:
        found, seen, waiting = set(), set(), list(before[at])
        while waiting:
            i = waiting.pop()
            if i in seen:
                continue
            seen.add(i)
            if register in written[i]:
                found.add(i)
                if not texts[i].startswith("@"):
                    continue
            waiting += before[i]
        return found

    out = []
    for i, text in enumerate(texts):
        product = _PRODUCT.match(text)
        if product:
            first = int(product[2])  # of the left operand, where it is not in registers, and of the right one
            for register in range(first + 2 if product[1] else first, first + 4):
                if len(definitions(i, register)) > 1:
                    out.append(f"UR{register} of {text}")
    return out
