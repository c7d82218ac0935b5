"""Finds wgmma operands that ptxas has lost: `overwritten_operands` in registers, `lost_descriptors` in shared memory.

**Left operands in registers**, overwritten before the loop that reads them turns again:

ptxas 12.8, 12.9 and 13.0, for sm_90a: a left operand in registers that was made before a loop and is read in every turn
of it (widened keys beside a float32 state, in the delta rule) shared its registers with values of the loop. The first
turn was right and every later one wrong, with the PTX as it should be. It happened with all 255 registers taken.

Products are in the same order in PTX and SASS, which tells which register is which. Where their numbers differ (a loop
was unrolled) nothing is said.

**Descriptors of tiles in shared memory** (ptxas 12.8 for sm_90a; 12.9 does it right): a descriptor is a constant of 64
bits added to an address of 32 that was widened. Where the constant's upper half is negative, as of tiles of 32 and
16 columns of 16 bits are, and nothing is loaded ahead, the sum was made from one register for both halves of the
address, which held something else or nothing: an illegal access, or wrong numbers with the PTX as it should be. Seen in
the gradients of gated linear attention. Said of such sums, and of uniform registers that are read and never written.
In packed attention, with tiles of 16 columns loaded by TMA, the sum was made from two registers that held something
else: the address of a TMA descriptor, or the halves of a barrier. So it is also said of the sum of a descriptor's
constant and a register that some way to it does not make zero.
"""

from __future__ import annotations

import re

_WGMMA = re.compile(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*(?:\{([^}]*)\}|%rd\d+)")
_PTX_LABEL = re.compile(r"\s*(\$L\w+):")
_PTX_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L\w+)")
_PTX_DEFINITION = re.compile(r"\s*(?:@!?%p\d+\s+)?([a-z]\w*)[\w.:]*\s+(\{[^}]*\}|%\w+)\s*,")
_PTX_WITHOUT_RESULT = {"st", "red", "bar", "cp", "fence", "bra", "mbarrier", "setp", "wgmma"}
_SASS_LABEL = re.compile(r"\s*(\.L\w+):")
_SASS_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,6}\*/\s+(.*?)\s*;")
_SASS_BRANCH = re.compile(r"BRA\b.*`\((\.L\w+)\)")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_UNIFORM_RESULT = re.compile(r"(\S+) (?:!?U?P\w+, )*UR(\d+)\b")
_LOWER_HALF = re.compile(r"UIADD3 UR(\d+), (UP\d), UR(\d+), -?0x[0-9a-f]+, URZ$")
_UPPER_HALF = re.compile(r"UIADD3\.X UR\d+, UR(\d+), (-?0x[0-9a-f]+), URZ, (UP\d), !UPT$")
_SWIZZLED, _NO_DESCRIPTOR = 3 << 30, 0x3FFFC000  # bits in the upper half of a descriptor: one is set, none can be
_ZERO = re.compile(r"UMOV UR\d+, URZ$")
_NO_WAY_ON = re.compile(r"(?:BRA|EXIT|RET)\b")
# What makes descriptors. Copies are left out: paths of a division (Triton 3.8) copy what they make again later.
_UNIFORM_READERS = ("UIADD", "ULEA", "ULOP")
_PRODUCT = re.compile(r"(?:@!?U?P\d+ )?[HIQ]GMMA")
_SASS_WITHOUT_RESULT = (
    "ST", "RED", "BAR", "BRA", "EXIT", "LDGSTS", "LDGDEPBAR", "DEPBAR", "WARP", "MEMBAR", "FENCE", "BS", "NOP", "UT",
    "SYNCS", "R2UR", "ISETP", "FSETP", "HSETP", "DSETP", "PLOP3", "CCTL", "ERRBAR", "BREAK",
)  # fmt: skip
Loop = tuple[int, int]


def _written(text: str) -> range:
    """The registers that a SASS instruction writes."""
    opcode, _, rest = re.sub(r"^@!?U?P\d+\s+", "", text).partition(" ")
    if opcode.startswith(_SASS_WITHOUT_RESULT):
        return range(0)
    first = None
    for operand in rest.split(",")[:2]:  # a shuffle names a predicate first
        if found := re.match(r"R(\d+)\b", operand.strip()):
            first = int(found[1])
            break
        if not re.fullmatch(r"U?P\w+", operand.strip()):
            break
    if first is None:
        return range(0)
    count = 1
    if found := re.match(r"[HIQ]GMMA\.64x(\d+)x", opcode):
        count = int(found[1]) // 2
        if ".F16" in opcode and ".F32" not in opcode:
            count //= 2
    elif opcode.startswith("LDSM"):
        count = int(opcode[-1]) if opcode[-1] in "24" else 1
    elif opcode.startswith(("LD", "ATOM")):
        count = 4 if ".128" in opcode else 2 if ".64" in opcode else 1
    elif opcode.startswith("HMMA"):
        count = 4 if ".F32" in opcode else 2
    elif opcode.startswith(("CS2R", "IMAD.WIDE", "DADD", "DMUL", "DFMA")):
        count = 1 if ".32" in opcode else 2
    return range(first, first + count)


def _innermost(loops: list[Loop], at: int) -> Loop | None:
    return min((loop for loop in loops if loop[0] <= at <= loop[1]), key=lambda loop: loop[1] - loop[0], default=None)


def _invariant_operands(ptx: str) -> list[int]:
    """For each wgmma: how many registers its left operand has if they were all made before its loop, else 0."""
    lines, labels = ptx.splitlines(), {}
    loops: list[Loop] = []
    made: dict[str, list[int]] = {}
    products: list[tuple[int, list[str]]] = []
    for i, line in enumerate(lines):
        if found := _PTX_LABEL.match(line):
            labels[found[1]] = i
        elif found := _PTX_BRANCH.search(line):
            if found[1] in labels:
                loops.append((labels[found[1]], i))
        elif found := _WGMMA.search(line):
            products.append((i, re.findall(r"%\w+", found[1] or "")))
        else:
            for statement in line.split(";"):  # inline assembly has several in a line, in braces of their own
                found = _PTX_DEFINITION.match(statement.lstrip(" \t{"))
                if found and found[1] not in _PTX_WITHOUT_RESULT:
                    for name in re.findall(r"%\w+", found[2]):
                        made.setdefault(name, []).append(i)
    counts = []
    for at, names in products:
        loop = _innermost(loops, at)
        inside = loop and any(loop[0] <= i <= loop[1] for name in names for i in made.get(name, ()))
        counts.append(len(names) if loop and not inside else 0)
    return counts


def _instructions(sass: str) -> tuple[list[str], dict[str, int]]:
    """Instructions, and where labels are."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if found := _SASS_LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := _SASS_INSTRUCTION.match(line):
            instructions.append(re.sub(r"\s+", " ", found[1]))
    return instructions, labels


def sums_with_no_address(sass: str) -> list[str]:
    """One line for each descriptor whose upper half is added to a register that is something else than zero."""
    instructions, labels = _instructions(sass)
    before: list[list[int]] = [[] for _ in instructions]
    for at, text in enumerate(instructions):
        branch = _SASS_BRANCH.search(text)
        ways = [labels[branch[1]]] if branch and branch[1] in labels else []
        if not _NO_WAY_ON.match(text):
            ways.append(at + 1)
        for to in ways:
            if to < len(instructions):
                before[to].append(at)
    faults = []
    for at, text in enumerate(instructions):
        found = _UPPER_HALF.match(re.sub(r"^@!?U?P\w+ ", "", text))
        if not found or not int(found[2], 16) & _SWIZZLED or int(found[2], 16) & _NO_DESCRIPTOR:
            continue
        seen: set[int] = set()
        work = list(before[at])
        while work:
            i = work.pop()
            if i in seen:
                continue
            seen.add(i)
            if int(found[1]) in _uniform_written(instructions[i]):
                if not _ZERO.search(instructions[i]):
                    faults.append(f"{text}: UR{found[1]} is no address's upper half but {instructions[i]}")
                    break
                if not instructions[i].startswith("@"):
                    continue
            work += before[i]
    return faults


def unwritten_registers(sass: str) -> list[str]:
    """One line for each instruction that reads a uniform register which nothing writes on any way to it."""
    instructions, labels = _instructions(sass)
    before: dict[int, frozenset[int]] = {0: frozenset()}
    work = [0] if instructions else []
    while work:
        at = work.pop()
        after = before[at] | set(_uniform_written(instructions[at]))
        branch = _SASS_BRANCH.search(instructions[at])
        for to in (at + 1, labels.get(branch[1], at + 1) if branch else at + 1):
            known = before.get(to)
            if to < len(instructions) and (known is None or not after <= known):
                before[to] = after if known is None else known | after
                work.append(to)
    faults = []
    for at, text in enumerate(instructions):
        bare = re.sub(r"^@!?U?P\w+ ", "", text)
        if bare.startswith(_UNIFORM_READERS):
            made = _UNIFORM_RESULT.match(bare)
            read = {int(n) for n in _UNIFORM.findall(bare[made.end() :] if made else bare)}
            faults += [f"{bare}: nothing was ever written to UR{n}" for n in sorted(read - before.get(at, read))]
    return faults


def lost_descriptors(sass: str) -> list[str]:
    """The two above, and one line for each sum of 64 bits that has one register for both halves of a number."""
    lower: dict[str, tuple[int, str]] = {}  # by the predicate that carries: the register added to, the sum
    faults = unwritten_registers(sass)
    for line in sass.splitlines():
        if _SASS_LABEL.match(line):
            lower.clear()
        if not (found := _SASS_INSTRUCTION.match(line)):
            continue
        text = re.sub(r"\s+", " ", found[1])
        upper = _UPPER_HALF.match(text)
        if upper and upper[3] in lower and lower[upper[3]][0] == int(upper[1]):
            faults.append(f"{lower[upper[3]][1]}; {text}: UR{upper[1]} is overwritten, or never was an address")
        written = _uniform_written(text)
        lower = {carry: sum_ for carry, sum_ in lower.items() if sum_[0] not in written}
        if first := _LOWER_HALF.match(text):
            lower[first[2]] = (int(first[3]), text)
            if first[1] == first[3]:
                del lower[first[2]]
    faults += [one for one in sums_with_no_address(sass) if not any(one.partition(":")[0] in known for known in faults)]
    return faults


def _uniform_written(text: str) -> range:
    made = _UNIFORM_RESULT.match(re.sub(r"^@!?U?P\w+ ", "", text))
    if not made:
        return range(0)
    count = 4 if ".128" in made[1] else 2 if ".64" in made[1] or ".WIDE" in made[1] else 1
    return range(int(made[2]), int(made[2]) + count)


def overwritten_operands(ptx: str, sass: str) -> list[str]:
    """One line for each product of a loop that from the second turn on reads registers with other values in them."""
    counts = _invariant_operands(ptx)
    if not any(counts):
        return []
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops: list[Loop] = []
    for line in sass.splitlines():
        if found := _SASS_LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := _SASS_INSTRUCTION.match(line):
            instructions.append(re.sub(r"\s+", " ", found[1]))
            if (branch := _SASS_BRANCH.search(instructions[-1])) and branch[1] in labels:
                loops.append((labels[branch[1]], len(instructions) - 1))
    places = [i for i, text in enumerate(instructions) if _PRODUCT.match(text)]
    if len(places) != len(counts):
        return []
    faults = []
    for at, count in zip(places, counts, strict=True):
        operand = re.search(r"GMMA\S* R\d+, R(\d+)\b", instructions[at])
        loop = _innermost(loops, at)
        if not count or operand is None or loop is None:
            continue
        kept = range(int(operand[1]), int(operand[1]) + count)
        writers: dict[int, list[int]] = {register: [] for register in kept}
        for i in range(loop[0], loop[1] + 1):
            for register in _written(instructions[i]):
                if register in writers:
                    writers[register].append(i)
        # a register that is written between the start of the loop and the product has been made again
        lost = [r for r, by in writers.items() if by and min(by) > at]
        if lost:
            by = instructions[writers[lost[0]][0]]
            faults.append(f"{instructions[at]}: R{lost[0]} is overwritten in the loop by {by}")
    return faults
