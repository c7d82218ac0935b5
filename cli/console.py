"""Where text goes: results to stdout, everything else to stderr.

Rich is imported inside, so that `--help` and completion do not pay for it.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
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
    err().print(visible(message), style=style, markup=False, soft_wrap=True)


def visible(text: str) -> str:
    """Text with its control characters spelled out: what a file of somebody else holds must not steer a terminal."""
    return text.translate(_CONTROLS)


def plain(value: object) -> str:
    """Text for a cell as it is: its square brackets are no markup."""
    from rich.markup import escape

    return escape(visible(str(value)))


def table(
    *columns: str, title: str = "", right: tuple[str, ...] = (), caption: str = "", spare: tuple[str, ...] = ()
) -> Any:
    """A table in the house style: no frame but a rule under the head, numbers to the right.

    Where it does not fit, prose gives way: words and what stands to the right stay whole as long as they can. Columns
    in `spare` are left out one by one, the first ones first, and a line says so.
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

        def _sizes(self, console: Any, limit: int) -> tuple[list[list[int]], list[int], int]:
            """Least widths of columns, from texts, numbers and words whole to words alone; most; and what is theirs."""
            wide = console.options.update(width=100_000)
            heads = [Measurement.get(console, wide, one.header) for one in self.columns]
            cells = [[Measurement.get(console, wide, cell) for cell in one.cells] for one in self.columns]
            words = [max(x.minimum for x in (head, *rest)) for head, rest in zip(heads, cells, strict=True)]
            most = [max(x.maximum for x in (head, *rest)) for head, rest in zip(heads, cells, strict=True)]
            numbers = [
                max(word, *(x.maximum for x in rest)) if one.justify == "right" and rest else word
                for one, word, rest in zip(self.columns, words, cells, strict=True)
            ]
            texts = [
                max([width, *(cell.longest for cell in one.cells if isinstance(cell, Items))])
                for one, width in zip(self.columns, numbers, strict=True)
            ]
            return [texts, numbers, words], most, limit - (Measurement.get(console, wide, self).maximum - sum(most))

        def fits(self, console: Any, limit: int) -> bool:
            """Whether so many columns of text hold it: texts, numbers and words whole, what it can spare left out."""
            (whole, *_), _, room = self._sizes(console, limit)
            kept = [width for one, width in zip(self.columns, whole, strict=True) if one.header not in self._spare]
            return sum(kept) <= room

        def __rich_console__(self, console: Any, options: Any) -> Any:
            missing: list[Any] = []
            least, most, room = self._sizes(console, options.max_width)
            while sum(least[-1]) > room and self._spare:
                missing.append(self._spare.pop(0))
                self.columns = [one for one in self.columns if one.header != missing[-1]]
                for at, one in enumerate(self.columns):
                    one._index = at  # by which rich tells the last column, which has no padding
                least, most, room = self._sizes(console, options.max_width)
            if sum(most) > room and sum(least[-1][:1]) + len(most) <= room:
                chosen = next((one for one in least if sum(one) <= room), least[-1])
                for one, width in zip(self.columns, _widths(chosen, most, room), strict=True):
                    one.width = width
            yield from super().__rich_console__(console, options)
            if missing:
                yield console.render_str(f"too narrow for: {', '.join(missing)}", style="dim")

    return Fitted


class Fittest:
    """Of tables that say the same, the first one if it fits, or else the shortest of those that do; or the last."""

    def __init__(self, *tables: Any) -> None:
        self._tables = tables

    def __rich_console__(self, console: Any, options: Any) -> Any:
        fitting = [one for one in self._tables if one.fits(console, options.max_width)]
        if len(fitting) > 1 and fitting[0] is not self._tables[0]:
            fitting = [min(fitting, key=lambda one: len(console.render_lines(one, options, pad=False)))]
        yield (fitting or self._tables[-1:])[0]


class Items:
    """A cell of several short texts with markup, `a; b; c`, of which none is broken while one fits into a line."""

    def __init__(self, texts: Sequence[str]) -> None:
        from rich.text import Text

        last = len(texts) - 1
        self._texts = [Text.from_markup(one) + Text("" if at == last else ";") for at, one in enumerate(texts)]

    @property
    def longest(self) -> int:
        """The width of the longest text."""
        return max((one.cell_len for one in self._texts), default=0)

    def __rich_measure__(self, console: Any, options: Any) -> Any:
        from rich.measure import Measurement

        lengths = [one.cell_len for one in self._texts]
        words = [len(word) for one in self._texts for word in one.plain.split()]
        return Measurement(max(words, default=0), sum(lengths) + max(len(lengths) - 1, 0))

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        lines: list[Any] = []
        for one in self._texts:
            if lines and lines[-1].cell_len + 1 + one.cell_len <= options.max_width:
                lines[-1] = lines[-1] + Text(" ") + one
            else:
                lines.append(one.copy())
        yield from lines


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
