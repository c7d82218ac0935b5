"""What the assembler made of a kernel: instructions, loops, and the control word that each instruction carries.

Reads the text of `nvdisasm -c -hex`. An instruction of Volta and later is 128 bits; the 21 bits from 105 on steer the
issue of the instruction (see `Control`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpu_accel.errors import IncorrectResultError, InvalidInputError

_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_LABEL = re.compile(r"^(\.L_x_\d+):$")
_LINE = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,6})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);"
    r"\s*/\* 0x(?P<low>[0-9a-f]{16}) \*/"
)
_HIGH = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/\s*$")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
BRANCHES = ("BRA",)
# What a loop needs besides the work in it: a counter, its test, the way back, and moves between register files.
LOOP_KEEPING = frozenset(
    {"BRA", "IADD3", "VIADD", "UIADD3", "ISETP", "UISETP", "MOV", "UMOV", "NOP", "PLOP3", "UPLOP3"}
)


@dataclass(frozen=True)
class Control:
    """How an instruction is issued; the fields of bits 105 to 125 (2503.20481, section 4; maxas named them first).

    Args:
        stall: cycles until the same warp may issue again, 0 to 15.
        yields: the bit that lets the scheduler prefer another warp, as it stands in the encoding.
        write_barrier: dependence counter (0 to 5) that is released when the result is written; None is 7, no counter.
        read_barrier: the same for when the sources have been read.
        wait: the counters that must be free before the instruction issues.
        reuse: operand slots (0 to 3) whose register is kept in the register file cache.
    """

    stall: int
    yields: bool
    write_barrier: int | None
    read_barrier: int | None
    wait: frozenset[int]
    reuse: frozenset[int]

    @classmethod
    def decode(cls, encoding: int) -> Control:
        """From the 128 bits of an instruction."""
        word = encoding >> 105
        write, read = word >> 5 & 7, word >> 8 & 7
        return cls(
            stall=word & 15,
            yields=bool(word >> 4 & 1),
            write_barrier=None if write == 7 else write,
            read_barrier=None if read == 7 else read,
            wait=_bits(word >> 11 & 63),
            reuse=_bits(word >> 17 & 15),
        )

    def encode(self, encoding: int) -> int:
        """The same instruction with this control word in it."""
        write = 7 if self.write_barrier is None else self.write_barrier
        read = 7 if self.read_barrier is None else self.read_barrier
        word = self.stall | self.yields << 4 | write << 5 | read << 8
        word |= sum(1 << bit for bit in self.wait) << 11 | sum(1 << bit for bit in self.reuse) << 17
        return encoding & ~(((1 << 21) - 1) << 105) | word << 105


def _bits(mask: int) -> frozenset[int]:
    return frozenset(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


@dataclass(frozen=True)
class Instruction:
    """One instruction; `encoding` is its 128 bits as a number."""

    address: int
    opcode: str  # with suffixes: "HGMMA.64x256x16.F32.BF16"
    operands: str
    guard: str
    encoding: int

    @property
    def name(self) -> str:
        """The opcode without suffixes."""
        return self.opcode.partition(".")[0]

    @property
    def control(self) -> Control:
        return Control.decode(self.encoding)

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{self.address:04x} {guard}{self.opcode} {self.operands}"


@dataclass(frozen=True)
class Loop:
    """The instructions from the target of a backward branch to the branch."""

    body: tuple[Instruction, ...]

    def count(self, opcode: str) -> int:
        return sum(is_opcode(one, opcode) for one in self.body)

    @property
    def opcodes(self) -> Counter[str]:
        return Counter(one.opcode for one in self.body)


@dataclass(frozen=True)
class Function:
    """One kernel's instructions in order; `labels` are addresses by name."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int] = field(repr=False)

    def count(self, opcode: str) -> int:
        return sum(is_opcode(one, opcode) for one in self.instructions)

    def loops(self) -> list[Loop]:
        """Every loop, innermost and outer ones alike, by ascending length."""
        found = []
        for one in self.instructions:
            if one.name not in BRANCHES or not (target := _TARGET.search(one.operands)):
                continue
            start = self.labels.get(target[1])
            # The last instruction of every function jumps to itself: padding, no loop.
            if start is not None and start < one.address:
                found.append(Loop(tuple(i for i in self.instructions if start <= i.address <= one.address)))
        return sorted(found, key=lambda loop: len(loop.body))


def is_opcode(instruction: Instruction, opcode: str) -> bool:
    """Whether the instruction is `opcode`, which may leave out suffixes at the end: "HGMMA" or "HGMMA.64x8x16"."""
    return instruction.opcode == opcode or instruction.opcode.startswith(opcode + ".")


def parse(text: str) -> dict[str, Function]:
    """Every function in the output of `nvdisasm -c -hex`.

    Raises:
        InvalidInputError: there is no function in it, or an encoding is cut off.
    """
    functions: dict[str, Function] = {}
    name = ""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    pending: re.Match[str] | None = None

    def finish() -> None:
        if name:
            functions[name] = Function(name, tuple(instructions), dict(labels))

    for line in text.splitlines():
        if found := _FUNCTION.match(line):
            finish()
            name, instructions, labels, waiting = found[1], [], {}, []
        elif found := _LABEL.match(line):
            waiting.append(found[1])
        elif found := _LINE.match(line):
            if pending is not None:
                raise InvalidInputError(f"the encoding at {pending['address']} has no second half: use nvdisasm -hex")
            pending = found
        elif (found := _HIGH.match(line)) and pending is not None:
            address = int(pending["address"], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting = []
            encoding = int(found[1], 16) << 64 | int(pending["low"], 16)
            instructions.append(
                Instruction(address, pending["opcode"], pending["operands"].strip(), pending["guard"] or "", encoding)
            )
            pending = None
    finish()
    if not functions:
        raise InvalidInputError("no function in the disassembly")
    return functions


def loop_holds(
    function: Function, opcode: str, at_least: int, *, also: Iterable[str] = (), purity: float = 0.0
) -> Loop:
    """The shortest loop with at least so many of an instruction, and little else.

    Args:
        function: the kernel.
        opcode: what is measured, such as "FFMA" or "HGMMA.64x256x16.F32.BF16".
        at_least: how many of it one pass of the loop holds.
        also: opcodes that belong to the work too.
        purity: the least share of `opcode` and `also` among the instructions that do not only keep the loop going.
    Raises:
        IncorrectResultError: no loop holds it; the message lists what the loops hold instead.
    """
    also = tuple(also)
    seen = []
    for loop in function.loops():
        if loop.count(opcode) < at_least:
            seen.append(loop)
            continue
        work = [one for one in loop.body if any(is_opcode(one, known) for known in (opcode, *also))]
        rest = [one for one in loop.body if one not in work and one.name not in LOOP_KEEPING]
        share = len(work) / (len(work) + len(rest))
        if share < purity:
            strange = ", ".join(f"{n} {name}" for name, n in Counter(one.opcode for one in rest).most_common(6))
            raise IncorrectResultError(
                f"{function.name}: only {share:.0%} of the timed loop is {opcode}, less than {purity:.0%}: {strange}"
            )
        return loop
    held = "; ".join(", ".join(f"{n} {name}" for name, n in loop.opcodes.most_common(6)) for loop in seen) or "no loop"
    raise IncorrectResultError(f"{function.name}: no loop holds {at_least} {opcode}, but {held}")
