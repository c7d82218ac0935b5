"""A candidate: the source of a kernel, or of a few that follow each other, and in its first comment how to launch it.

    # /// launch
    # grid = ["cdiv(n, BLOCK)"]
    # num_warps = 4
    # [constants]
    # BLOCK = 1024
    # ///
    @triton.jit
    def copy(x, out, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)

The header is TOML. Triton kernels get their arguments by name: the task's buffers, its sizes, the launch's workspaces
and constants. CUDA kernels (`// /// launch`) list theirs in `args` and name the kernel in `entry`; constants become
`#define`s in front of the source. Tables `[[then]]`, with an entry, grid and warps (or args and block) of their own,
launch further kernels of the file after it, on the same buffers: what one leaves in a workspace the next one finds.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from gpu_accel.errors import shown

from .launch import Launch, Pass, Scalar, malformed, read_launch

Language = Literal["triton", "cuda"]
LARGEST_SOURCE = 64 * 1024
_HEADER = re.compile(r"^(?P<mark>#|//) /// launch\n(?P<body>(?:(?P=mark)[^\n]*\n)*?)(?P=mark) ///[ \t]*$", re.M)


@dataclass(frozen=True)
class Candidate:
    """Source and launch of one kernel. Immutable: edits give a new one."""

    source: str  # without the header
    launch: Launch
    language: Language

    @classmethod
    def parse(cls, text: str | bytes) -> Candidate:
        """Read a candidate file.

        Raises:
            Rejected: malformed.
        """
        if isinstance(text, bytes):
            if len(text) > LARGEST_SOURCE:
                raise malformed(f"{len(text)} bytes; at most {LARGEST_SOURCE}")
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise malformed(f"not UTF-8: {error}") from error
        if not isinstance(text, str):
            raise malformed(f"{shown(text, 40)} is no text")
        if len(text) > LARGEST_SOURCE:
            raise malformed(f"{len(text)} characters; at most {LARGEST_SOURCE}")
        if "\0" in text:
            raise malformed("a zero byte in the source")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise malformed("half a surrogate pair in the source, which no file can hold")
        text = text.replace("\r\n", "\n")
        found = list(_HEADER.finditer(text))
        if len(found) != 1:
            raise malformed(f"{len(found)} launch headers; a candidate has one, from `# /// launch` to `# ///`")
        mark = found[0]["mark"]
        lines = [line[len(mark) :].removeprefix(" ") for line in found[0]["body"].splitlines()]
        try:
            table = tomllib.loads("\n".join(lines))
        except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
            raise malformed(f"the launch header is no TOML: {error}") from error
        source = text[: found[0].start()] + text[found[0].end() :].removeprefix("\n")
        return cls(source, read_launch(table), "triton" if mark == "#" else "cuda")

    @cached_property
    def digest(self) -> str:
        """Identifies source and launch; equal for candidates that differ in nothing that runs."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @cached_property
    def text(self) -> str:
        """The file that `parse` reads back."""
        mark = "#" if self.language == "triton" else "//"
        lines = [f"{mark} {line}".rstrip() for line in ("/// launch", *_toml(self.launch), "///")]
        return "\n".join(lines) + "\n" + self.source

    def with_(self, **changes: Scalar) -> Candidate:
        """Another candidate with constants, num_warps or num_stages changed."""
        constants = dict(self.launch.constants)
        fields: dict[str, Any] = {}
        for name, value in changes.items():
            if name in ("num_warps", "num_stages"):
                fields[name] = value
            elif name in constants:
                constants[name] = value
            else:
                raise malformed(f"{name!r} is no constant of this kernel; it has {', '.join(constants) or 'none'}")
        return replace(self, launch=replace(self.launch, constants=constants, **fields))


def _toml(launch: Launch) -> list[str]:
    lines = [f"task = {json.dumps(launch.task)}"] if launch.task else []
    lines += _pass(launch, cuda=bool(launch.entry))
    tables: dict[str, Mapping[str, Any]] = {"constants": launch.constants, "fill": launch.fill, "space": launch.space}
    for name, table in tables.items():
        if table:
            lines += [f"[{name}]", *(f"{key} = {_text(value)}" for key, value in table.items())]
    for name, buffer in launch.workspace.items():
        lines += [f"[workspace.{name}]", f"shape = {_text(buffer.shape)}", f"dtype = {_text(buffer.dtype)}"]
        lines += [f"fill = {_text(buffer.fill)}"] if buffer.fill is not None else []
    for one in launch.then:
        lines += ["[[then]]", *_pass(one, cuda=bool(launch.entry))]
    return lines


def _pass(one: Launch | Pass, *, cuda: bool) -> list[str]:
    lines = [f"grid = {_text(one.grid)}", *([f"entry = {_text(one.entry)}"] if one.entry else [])]
    if cuda:
        lines += [f"args = {_text(one.args)}", f"block = {_text(one.block)}"]
        return lines + ([f"shared = {_text(one.shared)}"] if one.shared else [])
    return [*lines, f"num_warps = {one.num_warps}", f"num_stages = {one.num_stages}"]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_text(one) for one in value) + "]"
    if isinstance(value, float):
        return repr(value)  # TOML writes inf and nan as Python does
    return json.dumps(value)
