"""Files of a search's folder, which may have come from somebody else: read with care, written whole, by one at a time.

Nothing here follows a link that stands where a file is written, so that a folder cannot lead a search out of itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from gpu_accel.errors import InvalidInputError

LOCK = ".lock"


def read_plain(path: Path, most: int = -1) -> bytes:
    """The bytes of a plain file, or of one that a link leads to; at most `most` of them.

    Raises:
        OSError: there is none; a pipe, which may wait for ever, and a device, which may never end, are none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no plain file", str(path))
        return file.read(most)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or, if that fails, leave what was there.

    Raises:
        OSError: it cannot be written, on a full disk for instance.
    """
    beside = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def append_line(path: Path, line: str) -> None:
    """Add a line; if whoever wrote before died inside a line, that is completed where it is whole, or dropped.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    with os.fdopen(descriptor, "ab+") as file:
        data = line.encode() + b"\n"
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                head, newline, torn = file.read().rpartition(b"\n")
                if _whole(torn):
                    data = b"\n" + data
                else:
                    file.truncate(len(head) + len(newline))
        file.write(data)


@contextlib.contextmanager
def held(folder: Path | None) -> Iterator[None]:
    """Keep a folder to oneself; the system lets go of it when the process ends, however that comes about.

    Raises:
        InvalidInputError: a search, perhaps of another process, has it; or it cannot be written.
    """
    if folder is None:
        yield
        return
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise InvalidInputError(f"cannot write into the folder {folder}: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise InvalidInputError(f"{folder} cannot be locked ({error.strerror}), and two searches there would spoil "
                                    "it: name a folder on a local disk") from error  # fmt: skip
        raise InvalidInputError(f"another search is at work in {folder}: wait for its end, or name another "
                                "folder") from error  # fmt: skip
    try:
        yield
    finally:
        os.close(descriptor)


def _whole(line: bytes) -> bool:
    try:
        json.loads(line.decode())
    except (ValueError, RecursionError):
        return False
    return True

