"""How a kernel is launched, as data: grid, constants, warps, buffers to fill first. No code of the candidate runs.

Sizes are written as arithmetic over the names of the task's dimensions and the launch's own constants:
`cdiv(n, BLOCK)`, `next_power_of_2(cols)`, `rows * 2`. `evaluate` computes such text and nothing else.
"""

from __future__ import annotations

import ast
import keyword
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_accel.errors import shown

from .verdict import Rejected, Verdict

Scalar = int | float | bool | str
LARGEST = 2**40
LONGEST_TEXT = 200
MOST_THREADS, MOST_SHARED = 1024, 227 * 1024
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8")
MOST_PASSES = 4  # kernels that one candidate may launch, one after the other
_PASS = {"grid", "num_warps", "num_stages", "entry", "args", "block", "shared"}  # what differs from kernel to kernel
_FIELDS = _PASS | {"task", "constants", "fill", "workspace", "space", "then"}


def malformed(why: str) -> Rejected:
    return Rejected(Verdict.MALFORMED, None, why)


def evaluate(text: int | str, names: Mapping[str, int]) -> int:
    """The integer that an expression of sizes means.

    Allowed: integers, names, + - * // %, and cdiv, min, max, next_power_of_2.

    Raises:
        Rejected: malformed, for anything else, an unknown name, division by zero, or a value beyond 2**40.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise malformed(f"a size is {shown(text, 60)}; it must be an integer or an expression")
    if isinstance(text, int):
        return _limited(text)
    if len(text) > LONGEST_TEXT:
        raise malformed(f"an expression of {len(text)} characters; at most {LONGEST_TEXT}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _value(tree.body, names)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise malformed(f"cannot read the expression {shown(text, 60)}: {error}") from error


def _limited(value: int) -> int:
    if abs(value) > LARGEST:
        raise malformed("a size beyond 2**40")
    return value


def _value(node: ast.expr, names: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        return _limited(node.value)
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise malformed(f"unknown name {shown(node.id, 40)} in a size; known are {', '.join(names) or 'none'}")
        return names[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, names), _value(node.right, names)
        if isinstance(node.op, ast.FloorDiv | ast.Mod) and right == 0:
            raise malformed("a size divides by zero")
        operations: dict[type, Any] = {
            ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__,
            ast.FloorDiv: int.__floordiv__, ast.Mod: int.__mod__,
        }  # fmt: skip
        if type(node.op) in operations:
            return _limited(operations[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        values = [_value(one, names) for one in node.args]
        if node.func.id in ("min", "max") and values:
            return min(values) if node.func.id == "min" else max(values)
        if node.func.id == "cdiv" and len(values) == 2:
            if values[1] <= 0:
                raise malformed("cdiv by a number that is not positive")
            return -(-values[0] // values[1])
        if node.func.id == "next_power_of_2" and len(values) == 1:
            return 1 << max(values[0] - 1, 0).bit_length()
    raise malformed(f"sizes are +, -, *, //, %, cdiv, min, max and next_power_of_2, not {shown(ast.unparse(node), 60)}")


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Scratch memory that the harness allocates for each launch, full of NaN unless `fill` says otherwise."""

    shape: tuple[int | str, ...]
    dtype: str = "float32"
    fill: float | None = None


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A further kernel of the same source: it runs when those before it have ended, on the same buffers.

    Args:
        entry: its name.
        grid, num_warps, num_stages, args, block, shared: as of `Launch`, whose constants it shares.
    """

    entry: str
    grid: tuple[int | str, ...]
    num_warps: int = 4
    num_stages: int = 2
    args: tuple[str, ...] = ()
    block: tuple[int | str, ...] = (256,)
    shared: int | str = 0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The launch spec of a candidate.

    Args:
        grid: one to three sizes.
        constants: constexpr arguments: numbers, or text that is an expression of sizes.
        fill: outputs that the harness sets to a value before each launch (0 for sums by atomics); part of the time.
        workspace: scratch buffers by name.
        space: for the grammar: values that a constant, num_warps or num_stages may take.
        entry, args, block, shared: CUDA only: kernel name, names of its arguments in order, threads, dynamic bytes. Its
            constants are `#define`d in front of the source.
        task: the task that the file says it solves.
        then: kernels that follow.
    """

    grid: tuple[int | str, ...]
    num_warps: int = 4
    num_stages: int = 2
    constants: Mapping[str, Scalar] = field(default_factory=dict)
    fill: Mapping[str, float] = field(default_factory=dict)
    workspace: Mapping[str, Workspace] = field(default_factory=dict)
    space: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)
    entry: str = ""
    args: tuple[str, ...] = ()
    block: tuple[int | str, ...] = (256,)
    shared: int | str = 0
    task: str = ""
    then: tuple[Pass, ...] = ()

    @property
    def passes(self) -> list[Launch]:
        """The launches of all kernels, in order."""
        return [self, *(replace(self, then=(), **vars(one)) for one in self.then)]

    def resolve(self, dims: Mapping[str, int]) -> tuple[tuple[int, ...], dict[str, Any]]:
        """(grid, constants) for one shape.

        Raises:
            Rejected: malformed, for a grid that no GPU takes.
        """
        names = dict(dims)
        constants: dict[str, Any] = {}
        for name, value in self.constants.items():
            constants[name] = evaluate(value, names) if isinstance(value, str) else value
            if isinstance(constants[name], int) and not isinstance(value, bool):
                names[name] = constants[name]
        grid = tuple(evaluate(size, names) for size in self.grid)
        for axis, size in enumerate(grid):
            if not 0 <= size < (2**31 if axis == 0 else 2**16):
                raise malformed(f"the grid is {grid}")
        return grid, constants

    def threads(self, dims: Mapping[str, int], constants: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
        """(block, dynamic bytes of shared memory) of a CUDA kernel for one shape.

        Raises:
            Rejected: malformed, for a block that no GPU takes.
        """
        names = {**dims, **{k: v for k, v in constants.items() if isinstance(v, int) and not isinstance(v, bool)}}
        block = tuple(evaluate(size, names) for size in self.block)
        if any(size < 1 for size in block) or math.prod(block) > MOST_THREADS:
            raise malformed(f"the block is {block}; at most {MOST_THREADS} threads")
        shared = evaluate(self.shared, names)
        if not 0 <= shared <= MOST_SHARED:
            raise malformed(f"shared is {shared}; bytes, at most {MOST_SHARED}")
        return block, shared


def read_launch(table: Mapping[str, Any]) -> Launch:
    """A launch spec from the table of a header.

    Raises:
        Rejected: malformed, naming the field.
    """
    if unknown := sorted(set(table) - _FIELDS):
        raise malformed(f"the launch spec has no {shown(unknown[0], 40)}; it has {', '.join(sorted(_FIELDS))}")
    task = table.get("task", "")
    if not isinstance(task, str):
        raise malformed(f"task is {shown(task, 40)}, not the name of a task")
    constants = _table(table, "constants")
    for name, value in constants.items():
        if not isinstance(value, int | float | str):
            raise malformed(f"the constant {name} is {shown(value, 40)}")
    fill = _table(table, "fill")
    for name, value in fill.items():
        if type(value) not in (int, float):
            raise malformed(f"fill of {name} is {shown(value, 40)}, not a number")
    workspace = {name: _workspace(name, value) for name, value in _table(table, "workspace").items()}
    space = _table(table, "space")
    for name, values in space.items():
        if not isinstance(values, list) or not 1 <= len(values) <= 64:
            raise malformed(f"the space of {name} must be a list of 1 to 64 values")
        if not all(isinstance(value, int | float | str) for value in values):
            raise malformed(f"the space of {name} has values that are no scalars")
        if name not in constants and name not in ("num_warps", "num_stages"):
            raise malformed(f"the space has {shown(name, 40)}, which is no constant of the launch")
    return Launch(
        **_pass(table), constants=constants, fill=fill, workspace=workspace, task=task, then=_then(table),
        space={name: tuple(values) for name, values in space.items()},
    )  # fmt: skip


def _then(table: Mapping[str, Any]) -> tuple[Pass, ...]:
    found = table.get("then", [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found) or len(found) >= MOST_PASSES:
        raise malformed(f"[[then]] are tables, at most {MOST_PASSES - 1}")
    for one in found:
        if unknown := sorted(set(one) - _PASS):
            raise malformed(f"[[then]] has no {shown(unknown[0], 40)}; it has {', '.join(sorted(_PASS))}")
        if not one.get("entry"):
            raise malformed('[[then]] needs entry = "name", the kernel that follows')
    return tuple(Pass(**_pass(one)) for one in found)


def _pass(table: Mapping[str, Any]) -> dict[str, Any]:
    """How one kernel is launched."""
    grid = table.get("grid")
    if not isinstance(grid, list) or not 1 <= len(grid) <= 3:
        raise malformed("the launch spec needs grid = [...] of one to three sizes")
    warps, stages = table.get("num_warps", 4), table.get("num_stages", 2)
    if type(warps) is not int or warps not in (1, 2, 4, 8, 16, 32):
        raise malformed(f"num_warps is {shown(warps, 20)}; it must be 1, 2, 4, 8, 16 or 32")
    if type(stages) is not int or not 1 <= stages <= 8:
        raise malformed(f"num_stages is {shown(stages, 20)}; it must be 1 to 8")
    block = table.get("block", [256])
    sizes_ = isinstance(block, list) and all(isinstance(n, str) or (type(n) is int and n >= 1) for n in block)
    if not sizes_ or not 1 <= len(block) <= 3:
        raise malformed("block must be one to three positive integers, or expressions of constants")
    shared, entry = table.get("shared", 0), table.get("entry", "")
    if type(shared) not in (int, str) or (type(shared) is int and not 0 <= shared <= MOST_SHARED):
        raise malformed(f"shared is {shown(shared, 20)}; bytes, at most {MOST_SHARED}, or an expression of constants")
    args = table.get("args", [])
    if not isinstance(args, list) or not all(isinstance(one, str) for one in (*args, entry)):
        raise malformed("args must be a list of names, entry a name")
    return {"grid": tuple(grid), "num_warps": warps, "num_stages": stages, "entry": entry, "args": tuple(args),
            "block": tuple(block), "shared": shared}  # fmt: skip


def _table(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = table.get(name, {})
    if not isinstance(found, dict) or len(found) > 32:
        raise malformed(f"{name} must be a table of at most 32 entries")
    for key in found:
        if not key.isidentifier() or keyword.iskeyword(key) or key.startswith("_"):
            raise malformed(f"{name} has {shown(key, 40)}, which is no plain name")
    return found


def _workspace(name: str, value: Any) -> Workspace:
    if not isinstance(value, dict) or set(value) - {"shape", "dtype", "fill"} or "shape" not in value:
        raise malformed(f"workspace {name} needs shape, and may have dtype and fill")
    shape, dtype, fill = value["shape"], value.get("dtype", "float32"), value.get("fill")
    if not isinstance(shape, list) or not 1 <= len(shape) <= 4:
        raise malformed(f"the shape of workspace {name} must be a list of one to four sizes")
    if dtype not in DTYPES or not (fill is None or type(fill) in (int, float)):
        raise malformed(f"workspace {name}: dtype is one of {', '.join(DTYPES)}, fill a number")
    return Workspace(shape=tuple(shape), dtype=dtype, fill=fill)
