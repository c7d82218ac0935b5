"""The application: commands in one place, and every error turned into an exit code that scripts can rely on.

    0  fine                                      4    not supported on this machine
    1  a regression, or a claim that failed      5    nothing ran, or nothing fits
       (only where a gate was asked for)         130  interrupted; finished rows are kept
    2  usage                                     141  the reader of a pipe has left
    3  a result of ours was incorrect

Nothing here imports torch. Commands import what they need when they run.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gpu_accel.errors import GpuAccelError, HardwareError, IncorrectResultError, InvalidInputError, UnsupportedError

from . import codes
from .console import note

EXIT_OF_ERROR = (
    (InvalidInputError, codes.USAGE),
    (IncorrectResultError, codes.INCORRECT),
    (UnsupportedError, codes.UNSUPPORTED),
    (HardwareError, codes.UNSUPPORTED),
)


def exit_code(error: GpuAccelError) -> int:
    """The exit code for an error of this library."""
    return next((code for kind, code in EXIT_OF_ERROR if isinstance(error, kind)), codes.UNSUPPORTED)


class Commands(TyperGroup):
    """The top of the application; errors raised on purpose become one line and an exit code, others a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GpuAccelError as error:
            note(f"error: {error}", style="bold red")
            raise typer.Exit(exit_code(error)) from error
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "triton", "numpy", "rich"):
                raise
            # Without note(), which needs rich.
            print(f"error: {error.name} is not installed; `gpu-accel doctor` says what is missing", file=sys.stderr)
            raise typer.Exit(codes.UNSUPPORTED) from error
        except KeyboardInterrupt:
            note("interrupted", style="yellow")
            raise typer.Exit(codes.INTERRUPTED) from None
        except BrokenPipeError:  # `gpu-accel list | head`
            _drop_stdout()
            raise typer.Exit(codes.BROKEN_PIPE) from None


app = typer.Typer(
    name="gpu-accel",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Papers about GPU acceleration turned into kernels you can import and claims you can check.",
    epilog="Exit codes: 0 ok, 1 gate failed, 2 usage, 3 incorrect result of ours, 4 not supported here, 5 nothing ran, "
    "130 interrupted, 141 broken pipe.",
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
) -> None:
    pass


def _register() -> None:
    from . import compare, doctor, hardware, ledger, notebook, papers, report, run

    app.command("list")(papers.list_papers)
    app.command("show")(papers.show)
    app.command("run")(run.run)
    app.command("claims")(ledger.claims)
    app.command("compare")(compare.compare)
    app.command("report")(report.report)
    app.command("notebook")(notebook.notebook)
    app.command("doctor")(doctor.doctor)
    app.add_typer(hardware.app, name="hardware")


_register()


def main() -> None:
    """The console script `gpu-accel`."""
    try:
        app(prog_name="gpu-accel")
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # what was written last and is still in the buffer
            _drop_stdout()
            sys.exit(codes.BROKEN_PIPE)


def _drop_stdout() -> None:
    """Nobody reads any more: Python's own flush at the end must not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
