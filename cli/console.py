"""Where text goes: results to stdout, everything else to stderr.

Rich is imported inside, so that `--help` and completion do not pay for it.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 160  # of a pipe or a log, where Rich would otherwise wrap tables at 80 columns


class Trimmed:
    """A stream without the blanks that fill a table's last column, which pipes and logs have no use for."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(re.sub(r"[ \t]+(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _console(stream: TextIO) -> Console:
    import rich.console

    class Console(rich.console.Console):
        def on_broken_pipe(self) -> None:  # Rich would leave with exit code 1, which means a gate here
            raise BrokenPipeError

    # A terminal knows its width, and COLUMNS overrides it; a pipe gets a width at which tables stay tables.
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PLAIN_WIDTH
    file = stream if stream.isatty() else cast("TextIO", Trimmed(stream))
    return Console(file=file, width=width, highlight=False, soft_wrap=False)


def out() -> Console:
    """The console for results."""
    return _console(sys.stdout)


def err() -> Console:
    """The console for progress, remarks and errors."""
    return _console(sys.stderr)


last_note = ""  # what `--json` repeats when a command ends without a result


def note(message: str, *, style: str = "dim") -> None:
    """One line to stderr, never wrapped, its square brackets shown as they are."""
    global last_note
    last_note = message
    err().print(message, style=style, markup=False, soft_wrap=True)


def plain(value: object) -> str:
    """Text for a cell as it is: its square brackets are no markup."""
    from rich.markup import escape

    return escape(str(value))


def table(*columns: str, title: str = "", right: tuple[str, ...] = (), caption: str = "") -> Any:
    """A table in the house style: no frame but a rule under the head, numbers to the right."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=title or None, caption=caption or None, box=box.SIMPLE_HEAD, title_justify="left",
        caption_justify="left", title_style="bold", caption_style="dim", header_style="bold", pad_edge=False,
    )  # fmt: skip
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made
