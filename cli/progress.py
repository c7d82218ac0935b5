"""How far a run is: a bar on a terminal, plain lines in a log. All of it on stderr."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from .console import err


class Progress:
    """A context manager that shows steps out of a total; `message` says what is being done."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = err()
        self._total, self._done, self._quiet = 0, 0, quiet
        self._bar: Any = None

    def __enter__(self) -> Self:
        if not self._quiet and self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def expect(self, total: int, message: str) -> None:
        """How many steps there will be, and of what."""
        self._total = total
        self.remark(message, style="dim")
        if self._bar:
            self._bar.update(self._task, total=total)

    def begin(self, message: str) -> None:
        """A step begins: a log gets a line, so that one that takes long does not look like nothing."""
        if self._bar:
            self._bar.update(self._task, description=message)
        elif not self._quiet:
            self._console.print(f"[{self._done + 1}/{self._total}] {message}", markup=False, soft_wrap=True)

    def doing(self, message: str) -> None:
        """What is being done now; shown on a terminal only."""
        if self._bar:
            self._bar.update(self._task, description=message)

    def step(self, message: str) -> None:
        """One more is done: the bar moves on, a log gets a line."""
        self._done += 1
        if self._bar:
            self._bar.advance(self._task)
        elif not self._quiet:
            self._console.print(f"[{self._done}/{self._total}] {message}", markup=False, soft_wrap=True)

    def pass_over(self) -> None:
        """One step less to go, of which nothing is to be told."""
        self._done += 1
        if self._bar:
            self._bar.advance(self._task)

    def remark(self, message: str, *, style: str) -> None:
        """Something that needs attention at once; stays on the terminal above the bar."""
        if not self._quiet:
            (self._bar.console if self._bar else self._console).print(
                message, style=style, markup=False, soft_wrap=True
            )
