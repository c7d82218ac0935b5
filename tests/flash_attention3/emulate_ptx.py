"""Run the PTX of a kernel on a CPU: what is tested is what the compiler made, layouts, addresses and order included.

A warp is 32 numbers in numpy; lanes that have come least far go first, so that branches join again. Warps take turns at
barriers and at volatile loads, so programs may wait for each other. Only instructions that the kernels here consist of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import ml_dtypes
import numpy as np

U32, U64, I64, F32 = np.uint32, np.uint64, np.int64, np.float32
LANES = np.arange(32)
HALF = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
NOTHING = ("createpolicy", "fence", "membar")


class Memory:
    """Byte arrays at addresses; anything else is an error."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, np.ndarray]] = []
        self._next = 0x10000000

    def add(self, array: np.ndarray, at: int | None = None) -> int:
        base = self._next if at is None else at
        self.parts.append((base, array))
        self._next += len(array) // 4096 * 4096 + 8192
        return base

    def at(self, address: int, size: int) -> np.ndarray:
        for base, array in self.parts:
            if base <= address and address + size <= base + len(array):
                return array[address - base : address - base + size]
        raise IndexError(f"{size} bytes at {address:#x}")


def parse(ptx: str) -> tuple[list[tuple[str, bool, str, list[str]]], dict[str, int]]:
    """Instructions (predicate, negated, name, operands), and labels."""
    body = ptx[ptx.index("{", ptx.index(".entry")) + 1 :].split("\t.section")[0]
    body = re.sub(r"\n\s*\.(loc|file)[^\n]*|//[^\n]*|/\*.*?\*/", "", body, flags=re.S)
    code, labels = [], {}
    for piece in re.split(r"(;|\n\s*\$[\w$]+:)", body):
        text = " ".join(piece.split()).lstrip("{} ")
        if text.endswith(":"):
            labels[text[:-1]] = len(code)
        elif text and text != ";" and not text.startswith("."):
            negated, predicate, name, rest = re.match(r"(?:@(!?)(%\w+) )?(\S+) ?(.*)", text).groups()
            operands = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", rest)
            code.append((predicate, bool(negated), name, [x.strip() for x in operands]))
    return code, labels


def _names(operand: str) -> list[str]:
    return [x.strip() for x in operand.strip("{} ").split(",")]


class Warp:
    def __init__(self, program, parameters: list[int], memory: Memory, shared: Memory, number: int, block: int) -> None:
        self.code, self.labels = program
        self.parameters, self.memory, self.shared = parameters, memory, shared
        self.special = {"%tid.x": LANES + 32 * number, "%ctaid.x": np.full(32, block), "global_smem": 0 * LANES}
        self.registers: dict[str, np.ndarray] = {}

    def value(self, x: str) -> np.ndarray:
        if x in self.special:
            return self.special[x].astype(U64)
        if re.match(r"0[fF]", x):
            return np.full(32, int(x[2:], 16), U64)
        if re.match(r"-?\d", x):
            return np.full(32, int(x.rstrip("U"), 0) & (1 << 64) - 1, U64)
        return self.registers.get(x, np.zeros(32, U64))

    def real(self, x: str) -> np.ndarray:
        return self.value(x).astype(U32).view(F32)

    def whole(self, x: str, bits: int, signed: bool) -> np.ndarray:
        unsigned = self.value(x).astype(f"u{max(1, bits // 8)}")
        return unsigned.view(f"i{bits // 8}") if signed else unsigned

    def put(self, name: str, value: np.ndarray, lanes: np.ndarray) -> None:
        if value.dtype != bool:
            value = value.view(f"u{value.dtype.itemsize}")
        before = self.registers.get(name, np.zeros(32, U64))
        self.registers[name] = np.where(lanes, value.astype(U64), before)

    def run(self) -> Iterator[str]:
        at, done = np.zeros(32, int), np.zeros(32, bool)
        while not done.all():
            now = at[~done].min()
            here = ~done & (at == now)
            predicate, negated, name, operands = self.code[now]
            on = here & (self.value(predicate).astype(bool) ^ negated) if predicate else here
            at[here] = now + 1
            kind = name.split(".")[0]
            if kind == "bra":
                at[on] = self.labels[operands[0]]
            elif kind in ("ret", "exit"):
                done |= on
            elif kind in ("bar", "barrier"):
                yield "barrier"
            elif on.any() and kind not in NOTHING:
                try:
                    with np.errstate(all="ignore"):
                        self.step(name.split("."), operands, on)
                except Exception as error:
                    raise RuntimeError(f"{name} {operands}: {error!r}") from error
                if "volatile" in name:
                    yield "poll"

    def step(self, words: list[str], a: list[str], on: np.ndarray) -> None:
        kind, last = words[0], words[-1]
        bits = int(last[1:]) if re.fullmatch(r"[subf]\d+", last) else 64
        signed = last.startswith("s")
        if kind == "mma":
            return self.product(words, [_names(x) for x in a], on)
        if kind in ("ld", "st") and "param" not in words:
            return self.move(kind, words, bits // 8, a, on)
        if kind == "mov" and "{" in a[0]:
            for i, name in enumerate(_names(a[0])):
                width = bits // len(_names(a[0]))
                self.put(name, self.value(a[1]) >> U64(i * width) & U64((1 << width) - 1), on)
            return None
        if kind == "atom":
            found, values = np.zeros(32, U32), self.value(a[2])
            for lane, place in self.places(a[1], on):
                word = self.memory.at(place, 4).view(U32)
                found[lane] = word[0]
                word += U32(values[lane])
            return self.put(a[0], found, on)
        if kind == "ld":
            value = np.full(32, self.parameters[int(re.search(r"_(\d+)\]", a[1]).group(1))], U64)
        elif kind == "mov":
            value = self.packed(a[1], bits) if "{" in a[1] else self.value(a[1])
        elif kind == "shfl":
            value = self.value(a[1])[LANES ^ int(a[2], 0) if "bfly" in words else self.value(a[2]).astype(int) & 31]
            return self.put(a[0].split("|")[0], value, on)
        elif kind == "cvt":
            value = self.converted(words, a)
        elif kind == "selp":
            value = np.where(self.value(a[3]).astype(bool), self.value(a[1]), self.value(a[2]))
        elif kind == "setp":
            value = self.compared(words, a, bits, signed)
        elif last == "f32":
            x = [self.real(name) for name in a[1:]]
            value = {
                "add": lambda: x[0] + x[1], "sub": lambda: x[0] - x[1], "mul": lambda: x[0] * x[1],
                "div": lambda: x[0] / x[1], "min": lambda: np.fmin(*x), "max": lambda: np.fmax(*x),
                "fma": lambda: x[0].astype(float) * x[1] + x[2], "rcp": lambda: 1 / x[0], "abs": lambda: np.abs(x[0]),
                "neg": lambda: -x[0], "ex2": lambda: np.exp2(x[0]), "lg2": lambda: np.log2(x[0]),
            }[kind]().astype(F32)  # fmt: skip
        else:
            value = self.integer(kind, words, a, bits, signed)
        self.put(a[0], value, on)
        return None

    def packed(self, operand: str, bits: int) -> np.ndarray:
        names = _names(operand)
        width = bits // len(names)
        return sum((self.value(x) & U64((1 << width) - 1)) << U64(i * width) for i, x in enumerate(names))

    def integer(self, kind: str, words: list[str], a: list[str], bits: int, signed: bool) -> np.ndarray:
        if kind == "prmt":
            both = self.value(a[1]) & U64(0xFFFFFFFF) | self.value(a[2]) << U64(32)
            which = [self.value(a[3]) >> U64(4 * i) & U64(7) for i in range(4)]
            return sum((both >> (8 * n) & U64(255)) << U64(8 * i) for i, n in enumerate(which)).astype(U32)
        if kind == "bfe":
            x, count = self.whole(a[1], 32, False) >> self.value(a[2]).astype(U32), int(a[3], 0)
            x &= U32((1 << count) - 1)
            return (x ^ U32(1 << count - 1)) - U32(1 << count - 1) if signed else x
        if "hi" in words:
            assert kind == "mul" and bits == 32, words
            x, y = (self.whole(name, 32, signed).astype(I64) for name in a[1:3])
            return (x * y >> 32).astype(U32)
        if "wide" in words:
            x = self.whole(a[1], bits, signed).astype(I64) * self.whole(a[2], bits, signed).astype(I64)
            return x + self.whole(a[3], 64, True) if kind == "mad" else x
        x = [self.whole(name, bits, signed) for name in a[1:]]
        if kind in ("div", "rem"):
            number, by = x[0].astype(I64), np.where(x[1] == 0, 1, x[1]).astype(I64)
            quotient = np.trunc(number / by).astype(I64)
            return (quotient if kind == "div" else number - quotient * by).astype(x[0].dtype)
        return {
            "add": lambda: x[0] + x[1], "sub": lambda: x[0] - x[1], "mul": lambda: x[0] * x[1],
            "mad": lambda: x[0] * x[1] + x[2], "min": lambda: np.minimum(*x), "max": lambda: np.maximum(*x),
            "and": lambda: x[0] & x[1], "or": lambda: x[0] | x[1], "xor": lambda: x[0] ^ x[1], "not": lambda: ~x[0],
            "shl": lambda: x[0] << x[1], "shr": lambda: x[0] >> x[1],
        }[kind]()  # fmt: skip

    def compared(self, words: list[str], a: list[str], bits: int, signed: bool) -> np.ndarray:
        real, how = words[-1] == "f32", words[1]
        x, y = (self.real(n) if real else self.whole(n, bits, signed) for n in a[1:3])
        unordered = real and how.endswith("u")
        how = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(how, how[:2])
        found = {"lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y, "eq": x == y, "ne": x != y}[how]
        if not real:
            return found
        nan = np.isnan(x) | np.isnan(y)
        return found | nan if unordered else found & ~nan

    def converted(self, words: list[str], a: list[str]) -> np.ndarray:
        to, source = words[-2:]
        if source == "e4m3x2":
            x = self.value(a[1])
            codes = [(x >> U64(8 * i) & U64(255)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn) for i in range(2)]
            low, high = (c.astype(np.float16).view(np.uint16).astype(U32) for c in codes)
            return low | high << U32(16)
        if to in ("bf16x2", "f16x2"):
            high, low = (self.real(n).astype(HALF[to[:-2]]).view(np.uint16).astype(U32) for n in a[1:3])
            return low | high << U32(16)
        if to in HALF:
            return self.real(a[1]).astype(HALF[to])
        if source in HALF:
            return self.value(a[1]).astype(np.uint16).view(HALF[source]).astype(F32)
        if source == "f32":
            assert to == "f32" and words[1] == "rmi", words
            return np.floor(self.real(a[1]))
        x = self.whole(a[1], int(source[1:]), source[0] == "s")
        return x.astype(F32 if to == "f32" else f"{'i' if to[0] == 's' else 'u'}{int(to[1:]) // 8}")

    def places(self, operand: str, on: np.ndarray) -> Iterator[tuple[int, int]]:
        name, offset = re.match(r"\[ ?(\w+|%\w+) ?(?:\+ ?(-?\d+))? ?\]", operand).groups()
        addresses = self.value(name)
        for lane in np.nonzero(on)[0]:
            yield lane, int(addresses[lane]) + int(offset or 0)

    def move(self, kind: str, words: list[str], size: int, a: list[str], on: np.ndarray) -> None:
        memory = self.shared if "shared" in words else self.memory
        names, where = (_names(a[0]), a[1]) if kind == "ld" else (_names(a[1]), a[0])
        values = [self.value(name).astype(f"u{size}") if kind == "st" else np.zeros(32, f"u{size}") for name in names]
        for lane, place in self.places(where, on):
            there = memory.at(place, size * len(names)).view(f"u{size}")
            for i, value in enumerate(values):
                if kind == "st":
                    there[i] = value[lane]
                else:
                    value[lane] = there[i]
        if kind == "ld":
            for name, value in zip(names, values, strict=True):
                self.put(name, value, on)

    def product(self, words: list[str], operands: list[list[str]], on: np.ndarray) -> None:
        assert "m16n8k16" in words and on.all(), words
        group, place = LANES // 4, LANES % 4
        a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))

        def pair(name: str) -> list[np.ndarray]:
            x = self.value(name)
            halves = ((x >> U64(16 * i) & U64(0xFFFF)).astype(np.uint16) for i in range(2))
            return [half.view(HALF["bf16" if "bf16" in words else "f16"]).astype(float) for half in halves]

        for i, name in enumerate(operands[1]):
            for j, half in enumerate(pair(name)):
                a[group + 8 * (i % 2), 2 * place + 8 * (i // 2) + j] = half
        for i, name in enumerate(operands[2]):
            for j, half in enumerate(pair(name)):
                b[2 * place + 8 * i + j, group] = half
        for i, name in enumerate(operands[3]):
            c[group + 8 * (i // 2), 2 * place + i % 2] = self.real(name)
        d = (a @ b + c).astype(F32)
        for i, name in enumerate(operands[0]):
            self.put(name, d[group + 8 * (i // 2), 2 * place + i % 2], on)


def launch(ptx: str, parameters: list[int], memory: Memory, *, shared: int, blocks: int, num_warps: int) -> None:
    """Run all programs, until each has ended; they take turns, in the order in which a GPU launches them."""
    program = parse(ptx)
    running = {}
    for block in range(blocks):
        own = Memory()
        own.add(np.zeros(shared, np.uint8), at=0)
        warps = [Warp(program, parameters, memory, own, i, block).run() for i in range(num_warps)]
        running[block] = [[warp, "ready"] for warp in warps]
    for _ in range(10_000):
        for block, warps in list(running.items()):
            for one in warps:
                if one[1] not in ("barrier", "done"):
                    one[1] = next(one[0], "done")
            if all(state == "done" for _, state in warps):
                del running[block]
            elif all(state in ("barrier", "done") for _, state in warps):
                for one in warps:
                    one[1] = "ready" if one[1] == "barrier" else one[1]
        if not running:
            return
    raise RuntimeError(f"programs {sorted(running)} wait for ever")
