"""Shared memory tiles on paper: which swizzle a width takes, and how many-way the bank conflicts of a layout are.

Shared memory has 32 banks of 4 bytes. A tensor core reads 8 rows of 16 bytes at a time (ldmatrix), which touch every
bank once when the layout is right, and one group of 4 banks 8 times when rows lie 128 bytes apart. A swizzle exchanges
the 16-byte pieces of a row, by its number: address ^ (row bits << 4). Arithmetic only; the compiler does the same when
it makes a shared tile for an operand.
"""

from __future__ import annotations

from gpu_accel.errors import InvalidInputError

SWIZZLES = (0, 32, 64, 128)
_PIECE = 16  # bytes of a row that ldmatrix reads
_ROWS = 8
_LINE = 128  # bytes of all banks


def swizzle_bytes(cols: int, itemsize: int) -> int:
    """The widest swizzle, of 32, 64 and 128 bytes, that divides a row; 0 where a row is no multiple of 32 bytes."""
    width = cols * itemsize
    return next((s for s in (128, 64, 32) if width and width % s == 0), 0)


def place(row: int, col: int, cols: int, itemsize: int, swizzle: int) -> int:
    """Byte address of an element of a tile with `cols` columns."""
    if swizzle not in SWIZZLES:
        raise InvalidInputError(f"swizzle is {swizzle} bytes; choose one of {SWIZZLES}")
    address = (row * cols + col) * itemsize
    bits = max(0, swizzle // _PIECE - 1)
    return address ^ (((address // _LINE) & bits) * _PIECE)


def bank_conflicts(rows: int, cols: int, itemsize: int, swizzle: int) -> int:
    """The most accesses to one bank when 8 rows of 16 bytes are read, over all such places; 1 is no conflict."""
    if rows % _ROWS or cols * itemsize % _PIECE:
        raise InvalidInputError(f"{rows} x {cols} of {itemsize} bytes is not made of 8 rows of 16 bytes")
    worst = 0
    for row in range(0, rows, _ROWS):
        for col in range(0, cols, _PIECE // itemsize):
            banks = [place(row + r, col, cols, itemsize, swizzle) % _LINE // 4 for r in range(_ROWS)]
            worst = max(worst, max(banks.count(bank) for bank in banks))
    return worst
