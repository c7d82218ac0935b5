"""The application: commands in one place, and every error turned into an exit code that scripts can rely on.

    0  fine                                      4    not supported on this machine
    1  a regression, or a claim that failed      5    nothing ran, or nothing fits
       (only where a gate was asked for)         130  interrupted; finished rows are kept
    2  usage                                     141  the reader of a pipe has left
    3  a result of ours was incorrect            70   an error nobody foresaw, of ours or of a paper's code, or a
                                                      disk that is full

Nothing here imports torch. Commands import what they need when they run.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

import gpu_accel
from gpu_accel.errors import GpuAccelError, HardwareError, IncorrectResultError, InvalidInputError, UnsupportedError

from . import codes, console, output
from .console import note

# What the parser raises; typer has its own copy of click, or uses click, depending on its version.
ClickException: Any = typer.BadParameter.__mro__[2]

EXIT_OF_ERROR = (
    (InvalidInputError, codes.USAGE),
    (IncorrectResultError, codes.INCORRECT),
    (UnsupportedError, codes.UNSUPPORTED),
    (HardwareError, codes.UNSUPPORTED),
)


# Of disks that are full, over their quota, read-only or broken, and of files that are too large for them.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


def exit_code(error: GpuAccelError) -> int:
    """The exit code for an error of this library."""
    return next((code for kind, code in EXIT_OF_ERROR if isinstance(error, kind)), codes.UNSUPPORTED)


class Commands(TyperGroup):
    """The top of the application: every error becomes one line, an exit code, and with --json an object on stdout."""

    json = False
    debug = False

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        self.json = "--json" in args
        self.debug = os.environ.get("GPU_ACCEL_DEBUG", "0") not in ("", "0")
        output.printed, console.last_note = False, ""
        try:
            return super().make_context(info_name, args, *rest, **extra)
        except ClickException as error:
            self.tell(type(error).__name__, error.format_message(), error.exit_code)
            raise
        except (BrokenPipeError, SystemExit) as error:  # `gpu-accel --help | head`
            if not _reader_left(error):
                raise
            _drop_stdout()
            raise typer.Exit(codes.BROKEN_PIPE) from None
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            raise typer.Exit(self.unwritable(error)) from error

    def tell(self, kind: str, message: str, code: int) -> None:
        """The error as JSON, where JSON was asked for and nothing has been printed."""
        if self.json and not output.printed:
            output.print_json({"error": {"type": kind, "message": message, "exit_code": code}})

    def invoke(self, ctx: Any) -> Any:
        self.debug = self.debug or bool(ctx.params.get("debug"))
        try:
            return self._invoke(ctx)
        except (BrokenPipeError, SystemExit) as error:  # `gpu-accel list | head`
            if not _reader_left(error):
                raise
            _drop_stdout()
            raise typer.Exit(codes.BROKEN_PIPE) from None

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.Exit as stop:
            if stop.exit_code:
                kind = codes.NAMES.get(stop.exit_code, "Exit")
                self.tell(kind, console.last_note or f"exit code {stop.exit_code}", stop.exit_code)
            raise
        except typer.Abort:
            self.tell("Interrupted", "interrupted", codes.GATE)
            raise
        except ClickException as error:
            self.tell(type(error).__name__, error.format_message(), error.exit_code)
            raise
        except GpuAccelError as error:
            self.trace()
            note(f"error: {error}", style="bold red")
            self.tell(type(error).__name__, str(error), exit_code(error))
            raise typer.Exit(exit_code(error)) from error
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "triton", "numpy", "rich"):
                raise typer.Exit(self.unforeseen(error)) from error
            # Without note(), which needs rich.
            message = f"{error.name} is not installed; `gpu-accel doctor` says what is missing"
            print(f"error: {message}", file=sys.stderr)
            self.tell(type(error).__name__, message, codes.UNSUPPORTED)
            raise typer.Exit(codes.UNSUPPORTED) from error
        except KeyboardInterrupt:
            note("interrupted", style="yellow")
            self.tell("Interrupted", "interrupted", codes.INTERRUPTED)
            raise typer.Exit(codes.INTERRUPTED) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise typer.Exit(self.unforeseen(error)) from error
            raise typer.Exit(self.unwritable(error)) from error
        except (Exception, SystemExit) as error:
            if _reader_left(error):
                raise
            # a SystemExit: a paper's code must not choose the exit code
            raise typer.Exit(self.unforeseen(error)) from error

    def unforeseen(self, error: BaseException) -> int:
        """One line of an error that is a mistake, or a traceback with --debug. Without rich, which may be the cause."""
        self.trace()
        message = " ".join(str(error).split())
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        hint = "" if self.debug else "; GPU_ACCEL_DEBUG=1 or `gpu-accel --debug ...` shows where it comes from"
        print(f"error: {type(error).__name__}{': ' if message else ''}{message}{place}{hint}", file=sys.stderr)
        self.tell(type(error).__name__, message, codes.INTERNAL)
        return codes.INTERNAL

    def unwritable(self, error: OSError) -> int:
        """One line of a disk that is full or fails, perhaps the one behind stdout."""
        self.trace()
        message = f"cannot write{f' {error.filename}' if error.filename else ''}: {error.strerror}"
        print(f"error: {message}", file=sys.stderr)
        try:
            self.tell(type(error).__name__, message, codes.INTERNAL)
            sys.stdout.flush()
        except OSError:
            _drop_stdout()
        return codes.INTERNAL

    def trace(self) -> None:
        if self.debug:
            traceback.print_exc()


app = typer.Typer(
    name="gpu-accel",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Papers about GPU acceleration turned into kernels you can import and claims you can check.",
    epilog="Exit codes: 0 ok, 1 gate failed, 2 usage, 3 incorrect result of ours, 4 not supported here, 5 nothing ran, "
    "70 an unforeseen error, 130 interrupted, 141 broken pipe.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from gpu_accel import __version__

        print(f"gpu-accel {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


def _register() -> None:
    from . import compare, conformance, doctor, hardware, ledger, notebook, optimize, papers, report, ring, run

    app.command("list")(papers.list_papers)
    app.command("show")(papers.show)
    app.command("run")(run.run)
    app.command("claims")(ledger.claims)
    app.command("compare")(compare.compare)
    app.command("report")(report.report)
    app.command("notebook")(notebook.notebook)
    app.command("conformance")(conformance.conformance)
    app.command("doctor")(doctor.doctor)
    groups = {"hardware": hardware.app, "ring": ring.app, "optimize": optimize.app}
    for name, group in groups.items():
        app.add_typer(group, name=name)
    for command in (one for group in (app, *groups.values()) for one in group.registered_commands):
        command.help = console.joined(command.callback.__doc__)  # Typer keeps the line breaks of a docstring


_register()


def main() -> None:
    """What `gpu-accel` runs."""
    _open_streams()
    warnings.showwarning = _remark
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # what a terminal that is not UTF-8 cannot show is a question mark
    try:
        app(prog_name="gpu-accel")
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # what was written last and is still in the buffer
            _drop_stdout()
            sys.exit(codes.BROKEN_PIPE)
        except OSError as error:  # a disk that is full
            _drop_stdout()
            print(f"error: cannot write to stdout: {error.strerror}", file=sys.stderr)
            sys.exit(codes.INTERNAL)


def _remark(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
    line: str | None = None,
) -> None:  # fmt: skip
    """A warning of this package is a remark of one line; with others it is said where they come from."""
    ours = (Path(__file__).parent, Path(gpu_accel.__file__).parent)
    if any(Path(filename).is_relative_to(folder) for folder in ours):
        print(f"warning: {console.visible(str(message))}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.stderr)


def _open_streams() -> None:
    """Where a standard stream is closed, as some services start programs, nobody reads: a file that is opened later
    must not take its number, and with it what others print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _reader_left(error: BaseException) -> bool:
    """Whether nobody reads stdout any more, of which rich makes a SystemExit."""
    return isinstance(error, BrokenPipeError) or (
        isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
    )


def _drop_stdout() -> None:
    """Nobody reads any more: Python's own flush at the end must not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
