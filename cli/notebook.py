"""`gpu-accel notebook`: open a paper's notebook, or run it headless, with parameters that are checked first."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_accel.errors import GpuAccelError, HardwareError, IncorrectResultError, InvalidInputError, UnsupportedError

from .console import note
from .options import DEFAULT_RESULTS, PaperArgument
from .output import check_folder, check_writable

if TYPE_CHECKING:
    from gpu_accel.workbench.registry import Paper

# What an exception of a cell means here, by the name that the notebook's own process reports; others are a result that
# is not there as it should be.
ERRORS: dict[str, type[GpuAccelError]] = {
    "InvalidInputError": InvalidInputError,
    "UnsupportedError": UnsupportedError,
    "MissingModuleError": UnsupportedError,
    "ModuleNotFoundError": UnsupportedError,
    "HardwareError": HardwareError,
    "OutOfMemoryError": HardwareError,
}
INSTALL = "pip install 'gpu-accel[notebook]'"


def notebook(
    paper: PaperArgument,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="Set a parameter of the notebook. Repeatable."),
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Run it headless, and write it with its outputs.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The notebook to write; never the original.")
    ] = None,
    timeout: Annotated[int, typer.Option(min=1, help="With --execute: seconds that one cell may take.")] = 600,
) -> None:
    """Open a paper's notebook, or run it headless."""
    from gpu_accel.workbench import registry

    one = registry.paper(paper)
    source = locate(one)
    nbformat = _need("nbformat")
    book = nbformat.read(source, as_version=4)
    values = parse(parameters or [], defaults(book, source))
    if output and (output.suffix != ".ipynb" or output.resolve() == source.resolve()):
        raise InvalidInputError(f"cannot write {output}: name another .ipynb file than {source}")
    if not execute and not values and not output:
        raise typer.Exit(_lab(source))
    inject(book, values)
    target = output or DEFAULT_RESULTS / "notebooks" / source.name
    check_folder(target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    check_writable(target)
    if not execute:
        nbformat.write(book, target)
        raise typer.Exit(_lab(target))
    run_headless(book, folder=source.parent, timeout=timeout, target=target)
    note(f"wrote {target}")


def locate(paper: Paper) -> Path:
    """The paper's notebook: `notebooks/` beside the folder of papers, or the paper's own folder.

    Raises:
        UnsupportedError: the paper has none, or only a checkout has it and this is an installed package.
    """
    if not paper.notebook:
        raise UnsupportedError(f"paper {paper.id} has no notebook")
    places = [paper.path.parent.parent / "notebooks" / paper.notebook, paper.path / paper.notebook]
    for place in places:
        if place.is_file():
            return place
    raise UnsupportedError(f"no {paper.notebook} at {places[0]}; notebooks come with a checkout, not with the package")


def defaults(book: Any, source: Path) -> dict[str, Any]:
    """Names and default values in the cell tagged `parameters`."""
    for cell in book.cells:
        if cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", []):
            found = {}
            for statement in ast.parse(cell.source).body:
                if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    found[statement.targets[0].id] = _literal(statement.value)
                elif (
                    isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value
                ):
                    found[statement.target.id] = _literal(statement.value)
            return found
    raise InvalidInputError(f"{source} has no cell tagged 'parameters', so it takes none")


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:  # computed: a value of any type may replace it
        return None


def parse(given: list[str], known: dict[str, Any]) -> dict[str, Any]:
    """`["precision=fp8", "seqlen=512"]` as values of the types that the notebook's own have.

    Raises:
        InvalidInputError: not NAME=VALUE, a name the notebook does not have, or a value of another type.
    """
    values = {}
    for item in given:
        name, equals, text = item.partition("=")
        if not equals:
            raise InvalidInputError(f"--parameter {item!r} is not NAME=VALUE")
        if name not in known:
            raise InvalidInputError(f"the notebook has no parameter {name!r}; it has {', '.join(known) or 'none'}")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text  # precision=fp8 needs no quotes
        default = known[name]
        if isinstance(default, str):
            value = text if not isinstance(value, str) else value
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if default is not None and type(value) is not type(default):
            kind = type(default).__name__
            raise InvalidInputError(f"parameter {name} is {kind} ({default!r} by default), not {text!r}")
        values[name] = value
    return values


def inject(book: Any, values: dict[str, Any]) -> None:
    """Put a cell with the values behind the parameter cell, as papermill does."""
    if not values:
        return
    nbformat = _need("nbformat")
    text = "# given on the command line\n" + "\n".join(f"{name} = {value!r}" for name, value in values.items())
    cell = nbformat.v4.new_code_cell(text, metadata={"tags": ["injected-parameters"]})
    at = next(i for i, c in enumerate(book.cells) if "parameters" in c.metadata.get("tags", []))
    book.cells.insert(at + 1, cell)


def run_headless(book: Any, *, folder: Path, timeout: int, target: Path) -> None:
    """Run every cell and write the notebook, with what it printed so far when a cell fails.

    Raises:
        GpuAccelError: a cell failed, of the kind that `ERRORS` names for its exception, else IncorrectResultError.
        HardwareError: a cell took too long for this machine, or its process died.
    """
    nbclient, nbformat = _need("nbclient"), _need("nbformat")
    _let_kernels_import_this()
    exceptions = sys.modules["nbclient.exceptions"]
    client = nbclient.NotebookClient(
        book,
        timeout=timeout,
        resources={"metadata": {"path": str(folder)}},
        # Below an error its process has nothing to say that concerns a reader, such as how the two are connected.
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
    )
    cells = sum(cell.cell_type == "code" for cell in book.cells)
    note(f"running {target.name}, {cells} cell{'' if cells == 1 else 's'} of code ...")  # silent for half a minute else
    try:
        client.execute()
    except exceptions.CellExecutionError as error:
        raise ERRORS.get(error.ename, IncorrectResultError)(
            f"a cell failed with {error.ename}: {error.evalue}. Its output is in {target}"
        ) from error
    except exceptions.CellTimeoutError as error:
        raise HardwareError(f"a cell took longer than {timeout} s (--timeout). See {target}") from error
    except exceptions.DeadKernelError as error:
        raise HardwareError(f"the notebook's process died, perhaps for lack of memory. See {target}") from error
    finally:
        nbformat.write(book, target)


def _need(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(f"notebooks need {module}: {INSTALL}") from error


def _lab(path: Path) -> int:
    """Start JupyterLab on a notebook and wait for it; the exit code is Jupyter's own."""
    _need("jupyterlab")
    _let_kernels_import_this()
    return subprocess.run([sys.executable, "-m", "jupyterlab", str(path)], check=False).returncode


def _let_kernels_import_this() -> None:
    """In a checkout that is not installed, the notebook's own process finds the library too."""
    root = Path(__file__).resolve().parents[1]
    if (root / "pyproject.toml").is_file():
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
