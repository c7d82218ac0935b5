"""Where text goes: results to stdout, everything else to stderr.

Rich is imported inside, so that `--help` and completion do not pay for it.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
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
    # Some containers say that there are none, and Rich would show nothing.
    given = os.environ.get("COLUMNS", "").strip("0")
    width = None if given else shutil.get_terminal_size().columns if stream.isatty() else PLAIN_WIDTH
    file = stream if stream.isatty() else cast("TextIO", Trimmed(stream))
    return Console(file=file, width=width, highlight=False, soft_wrap=False, emoji=False)  # :x: is a colon and an x


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


def table(
    *columns: str, title: str = "", right: tuple[str, ...] = (), caption: str = "", spare: tuple[str, ...] = ()
) -> Any:
    """A table in the house style: no frame but a rule under the head, numbers to the right.

    Where it does not fit, words stay whole as long as they can: the columns in `spare` are left out one by one, the
    first ones first, and a line says so.
    """
    from rich import box

    made = _fitted()(
        spare,
        title=title or None, caption=caption or None, box=box.SIMPLE_HEAD, title_justify="left",
        caption_justify="left", title_style="bold", caption_style="dim", header_style="bold", pad_edge=False,
    )  # fmt: skip
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


@functools.cache
def _fitted() -> Any:
    """Rich's table with columns as wide as their longest words: by itself it cuts names in pieces to save prose."""
    from rich.measure import Measurement
    from rich.table import Table

    class Fitted(Table):
        def __init__(self, spare: tuple[str, ...], **options: Any) -> None:
            super().__init__(**options)
            self._spare = list(spare)

        def __rich_console__(self, console: Any, options: Any) -> Any:
            wide, missing = options.update(width=100_000), []
            while True:
                cells = [
                    [Measurement.get(console, wide, cell) for cell in (one.header, *one.cells)] for one in self.columns
                ]
                least = [max(cell.minimum for cell in column) for column in cells]
                most = [max(cell.maximum for cell in column) for column in cells]
                room = options.max_width - (Measurement.get(console, wide, self).maximum - sum(most))
                if sum(least) <= room or not self._spare:
                    break
                missing.append(self._spare.pop(0))
                self.columns = [one for one in self.columns if one.header != missing[-1]]
            if sum(most) > room and sum(least[:1]) + len(least) <= room:
                for one, width in zip(self.columns, _widths(least, most, room), strict=True):
                    one.width = width
            yield from super().__rich_console__(console, options)
            if missing:
                yield console.render_str(f"too narrow for: {', '.join(missing)}", style="dim")

    return Fitted


def _widths(least: list[int], most: list[int], room: int) -> list[int]:
    """Widths that add up to `room`: the widest columns are cut back first, down to their longest word.

    Where longest words do not fit either, those beside the first column, which holds names, are cut too.
    """
    shortest = least
    while sum(shortest) > room:
        longest = max(shortest[1:])
        shortest = [shortest[0], *(min(one, longest - 1) for one in shortest[1:])]
    cap = max(most)
    while sum(widths := [max(low, min(high, cap)) for low, high in zip(shortest, most, strict=True)]) > room:
        cap -= 1
    return widths


def joined(text: str | None) -> str:
    """A docstring for a terminal of any width: the lines of a paragraph are one."""
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))
