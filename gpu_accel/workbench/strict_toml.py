"""Reading TOML tables strictly: an unknown key, a missing key or a wrong type is an error that says where.

A misspelt key that is silently ignored turns a condition into no condition, so nothing is ignored here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from gpu_accel.errors import InvalidInputError, shown

_MISSING = object()


def read_toml(path: Path) -> Table:
    """The whole file as a Table; raises InvalidInputError naming the file when it cannot be read or is no TOML."""
    try:
        with open(path, "rb") as file:
            return Table(tomllib.load(file), str(path))
    except FileNotFoundError as error:
        raise InvalidInputError(f"no file at {path}") from error
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror or error}") from error
    except RecursionError as error:
        raise InvalidInputError(f"{path}: nested too deeply") from error
    except ValueError as error:  # no TOML, not UTF-8, or a number of more digits than Python reads
        raise InvalidInputError(f"{path}: {error}") from error


class Table:
    """One TOML table; every key must be taken before ``end()``, which refuses what is left."""

    def __init__(self, data: Any, where: str) -> None:
        self.where = where
        if not isinstance(data, dict):
            self.fail(f"must be a table, not {shown(data)}")
        self._left: dict[str, Any] = dict(data)
        self._known: list[str] = []

    def fail(self, message: str) -> NoReturn:
        """Raise InvalidInputError with the place in front."""
        raise InvalidInputError(f"{self.where}: {message}")

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def names(self) -> list[str]:
        """The keys that nothing has taken yet."""
        return list(self._left)

    def take(self, key: str, default: Any = _MISSING) -> Any:
        """The raw value of a key."""
        self._known.append(key)
        if key not in self._left and default is _MISSING:
            self.fail(f"key {key!r} is missing")
        return self._left.pop(key, default)

    def text(self, key: str, default: Any = _MISSING, *, choices: Sequence[str] = ()) -> str:
        """A string; without a default it must not be empty."""
        value = self.take(key, default)
        if not isinstance(value, str) or (not value and default is _MISSING):
            self.fail(f"{key!r} must be a {'non-empty ' if default is _MISSING else ''}string, not {shown(value)}")
        if choices and value not in choices:
            self.fail(f"{key!r} must be one of {', '.join(choices)}; not {shown(value)}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        """An integer or a float (no boolean)."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"{key!r} must be a number, not {shown(value)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            self.fail(f"{key!r} must be true or false, not {shown(value)}")
        return value

    def texts(self, key: str, default: Any = ()) -> tuple[str, ...]:
        """A list of non-empty strings."""
        value = self.take(key, default)
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) and v for v in value):
            self.fail(f"{key!r} must be a list of non-empty strings, not {shown(value)}")
        return tuple(value)

    def scalars(self, key: str) -> dict[str, Any]:
        """A table of strings, numbers and booleans; empty when absent."""
        value = self.take(key, {})
        if not isinstance(value, dict) or not all(isinstance(v, str | int | float | bool) for v in value.values()):
            self.fail(f"{key!r} must be a table of strings, numbers and booleans, not {shown(value)}")
        return dict(value)

    def table(self, key: str, default: Any = _MISSING) -> Table:
        """A table inside this one."""
        return Table(self.take(key, default), f"{self.where}: {key}")

    def tables(self, key: str) -> list[Table]:
        """A list of tables; empty when absent."""
        value = self.take(key, [])
        if not isinstance(value, list):
            self.fail(f"{key!r} must be a list of tables ([[{key}]]), not {shown(value)}")
        return [Table(entry, f"{self.where}: {key} {number}") for number, entry in enumerate(value, 1)]

    def items(self) -> list[tuple[str, Table]]:
        """Every key that is left, each a table."""
        return [(key, self.table(key)) for key in self.names()]

    def end(self) -> None:
        """Refuse keys that nothing asked for."""
        if self._left:
            known = ", ".join(sorted(set(self._known)))
            self.fail(f"unknown key {sorted(self._left)[0]!r}; known here: {known}")
