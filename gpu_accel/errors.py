"""Errors that every public function of gpu-accel raises, each also a standard Python error.

Messages say what was given, what is allowed and what to do about it.
"""

from __future__ import annotations


class GpuAccelError(Exception):
    """Base of every error raised on purpose by this library."""


class InvalidInputError(GpuAccelError, ValueError):
    """An argument has a wrong shape, dtype, device, stride or value."""


class UnsupportedError(GpuAccelError, NotImplementedError):
    """The arguments are valid, but this combination is not implemented by the backend asked for."""


class HardwareError(GpuAccelError, RuntimeError):
    """The machine lacks what the call needs (a GPU, a compute capability, memory, a driver)."""


class IncorrectResultError(GpuAccelError, AssertionError):
    """A result differs from the truth by more than its bound, so it may be neither used nor timed."""


def shown(value: object, most: int = 80) -> str:
    """A value as messages quote it: its `repr`, cut, and whatever it is: Python prints no integers beyond 4,300 digits.

    Args:
        most: characters.
    """
    try:
        text = repr(value)
    except Exception:  # of whatever the object's own code raises
        if isinstance(value, int):
            return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} or beyond"
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= most else f"{text[:most]}..."
