"""Landlock, Linux' sandbox for whoever asks to be held: no privilege is needed, and what is given up never comes back.

`restrict(folder)` leaves a process that may write beneath one folder only, may open no TCP connection, and can neither
signal nor reach by abstract sockets what lies outside; each as far as the kernel goes (5.13, 6.7, 6.12). Files that
everybody may read stay readable: an interpreter needs too many of them to list.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

# The same numbers on every architecture, as for all system calls since 5.0.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ABI_VERSION, _PATH_BENEATH = 1, 1

# Rights over files: writing (1), removing and making (4 to 12), moving between folders (13), cutting short (14).
_WRITE = 1 << 1
_CHANGE = _WRITE | sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract Unix sockets, signals


def abi() -> int:
    """Which version of Landlock the kernel has; 0 where it has none or has switched it off."""
    return max(0, ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_ABI_VERSION)))


def restrict(folder: Path, *, also: Sequence[str] = (), connections: bool = False) -> str:
    """Hold this process, and all that it starts, to writing beneath `folder`; `no_new_privs` must be set before.

    Args:
        also: files and folders in which it may write, and cut files short, but neither make nor remove anything.
        connections: leave TCP alone, for programs that speak with each other through the loopback device.
    Returns:
        What was reached, in words.
    """
    version = abi()
    if version == 0:
        return "not held to its folder: the kernel has no Landlock"
    libc = ctypes.CDLL(None, use_errno=True)
    rights = _CHANGE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    fields = [rights, *([0 if connections else _TCP] if version >= 4 else []), *([_SCOPES] if version >= 6 else [])]
    wanted = struct.pack(f"{len(fields)}Q", *fields)
    there = _WRITE | (_TRUNCATE & rights)
    places = [(str(folder), rights), *((one, there) for one in also if os.path.exists(one))]
    try:
        ruleset = _call(libc, _CREATE_RULESET, wanted, ctypes.c_size_t(len(wanted)), ctypes.c_uint(0))
        try:
            for path, allowed in places:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    rule = struct.pack("=Qi", allowed, place)
                    _call(libc, _ADD_RULE, ruleset, ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0))
                finally:
                    os.close(place)
            _call(libc, _RESTRICT_SELF, ruleset, ctypes.c_uint(0))
        finally:
            os.close(ruleset)
    except OSError as error:
        return f"not held to its folder: {error.strerror}"
    words = ["writes in its folder alone", *(["opens no TCP connection"] if version >= 4 and not connections else [])]
    words += ["signals nobody outside"] if version >= 6 else []
    return f"{', '.join(words)} (Landlock {version})"


def _call(libc: ctypes.CDLL, number: int, *arguments: object) -> int:
    found: int = libc.syscall(number, *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
