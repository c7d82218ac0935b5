"""Results for machines: `--json` on stdout, and `-o FILE` in the format of its suffix."""

from __future__ import annotations

import contextlib
import csv
import html
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_accel.errors import InvalidInputError

SUFFIXES = (".json", ".jsonl", ".csv", ".md", ".html")
Row = dict[str, Any]


def check_suffix(path: Path | None) -> None:
    """Refuse an unknown suffix, or a file that cannot be written, before any work is done.

    Raises:
        InvalidInputError: the suffix names no format, or the file cannot be opened for writing.
    """
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise InvalidInputError(f"cannot write {path}: its suffix must be one of {', '.join(SUFFIXES)}")
    if not os.path.isdir(path.absolute().parent):
        raise InvalidInputError(f"cannot write {path}: there is no folder {path.parent}")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Open the file for writing, changing nothing.

    Raises:
        InvalidInputError: it is a folder, or the system does not let it be written.
    """
    try:
        if path.is_dir():
            raise InvalidInputError(f"cannot write {path}: it is a folder")
        new = not os.path.lexists(path)
        if new or path.is_file():
            path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror or error}") from error


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written into.

    Raises:
        InvalidInputError: names what stands in the way.
    """
    try:
        place = next(one for one in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(one))
        if not place.is_dir():
            raise InvalidInputError(f"cannot write into {folder}: {place} is no folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise InvalidInputError(f"cannot write into {folder}: {place} is not writable")
        os.rmdir(tempfile.mkdtemp(dir=place))  # root may write everywhere, and yet not into /proc
    except OSError as error:
        raise InvalidInputError(f"cannot write into {folder}: {error.strerror or error}") from error


printed = False  # whether this command has put its JSON on stdout, where a second document would spoil it


def print_json(payload: Any) -> None:
    """The payload as indented JSON on stdout, and nothing else."""
    global printed
    text = dumps(payload, indent=2) + "\n"
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(json.loads(text), indent=2, allow_nan=False) + "\n"
    printed = True
    sys.stdout.write(text)


def dumps(payload: Any, *, indent: int | None = None) -> str:
    """Strict JSON: what is not finite becomes null, since JSON has no word for it."""
    text = json.dumps(_finite(payload), indent=indent, ensure_ascii=False, default=str, allow_nan=False)
    if any("\ud800" <= one <= "\udfff" for one in text):  # of a path that is no text, as Python holds it
        return json.dumps(json.loads(text), indent=indent, allow_nan=False)
    return text


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What a paper's code prints is no result: while it runs, stdout is stderr, also for what it starts."""
    sys.stdout.flush()
    try:
        descriptor = sys.stdout.fileno()
        target = sys.stderr.fileno()
        kept = os.dup(descriptor) if descriptor != target else None
    except (OSError, ValueError, AttributeError):  # no file, as under a test
        kept = None
    if kept is not None:
        os.dup2(target, descriptor)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, descriptor)
            os.close(kept)


def write(path: Path, rows: Sequence[Row], *, payload: Any = None, title: str = "") -> None:
    """Write rows to a file in the format of its suffix.

    Args:
        path: the file; replaced when it exists.
        rows: one dictionary a row. In .csv, .md and .html nested values are flattened to `outer.inner` columns.
        payload: what .json holds instead of the rows (that which `--json` prints).
        title: heading of .md and .html.
    """
    check_suffix(path)
    match path.suffix:
        case ".json":
            text = dumps(rows if payload is None else payload, indent=2) + "\n"
        case ".jsonl":
            text = "".join(dumps(row) + "\n" for row in rows)
        case ".csv":
            text = _csv(rows)
        case ".md":
            text = _markdown(rows, title)
        case _:
            text = _html(rows, title)
    replace(path, text)


def replace(path: Path, text: str) -> None:
    """Write a file whole or, if that fails, leave what was there: by a new one beside it that takes its name."""
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():  # a pipe with a name, say
        path.write_text(text, encoding="utf-8")
        return
    try:
        handle, name = tempfile.mkstemp(prefix=f".{place.name}-", dir=place.parent)
    except OSError:  # the file may be written, its folder not
        path.write_text(text, encoding="utf-8")
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, _mode(place))
        os.replace(name, place)
    except BaseException as error:
        os.unlink(name)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise


def _mode(place: Path) -> int:
    """The permissions of a file, or those that a new one gets."""
    if place.exists():
        return place.stat().st_mode & 0o7777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def flatten(row: Row) -> Row:
    """Nested dictionaries as dotted keys, lists joined by spaces."""
    flat: Row = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{inner}": item for inner, item in flatten(value).items()})
        elif isinstance(value, list | tuple):
            flat[key] = " ".join(str(item) for item in value)
        else:
            flat[key] = value
    return flat


def _grid(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    flat = [flatten(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    return columns, [["" if row.get(column) is None else str(row[column]) for column in columns] for row in flat]


def _csv(rows: Sequence[Row]) -> str:
    columns, cells = _grid(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([columns, *cells])
    return text.getvalue()


def _markdown(rows: Sequence[Row], title: str) -> str:
    columns, cells = _grid(rows)
    lines = [f"# {title}", ""] if title else []
    for line in (columns, ["---"] * len(columns), *cells):
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |")
    return "\n".join(lines) + "\n"


def _html(rows: Sequence[Row], title: str) -> str:
    columns, cells = _grid(rows)

    def line(tag: str, values: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values) + "</tr>"

    body = "\n".join(line("td", cell) for cell in cells)
    style = (
        "body{font:14px system-ui;margin:2rem}table{border-collapse:collapse}"
        "td,th{padding:.3rem .6rem;border-bottom:1px solid #ddd;text-align:left}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style>\n<h1>{html.escape(title)}</h1>\n"
        f"<table>\n{line('th', columns)}\n{body}\n</table></html>\n"
    )
