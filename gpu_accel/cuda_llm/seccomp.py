"""System calls that no candidate needs, refused by the kernel: those that look into other processes or enlarge rights.

`restrict()` is for a process that gives them up for itself and all that it starts; `no_new_privs` must be set before.
It is a short list of what is refused, no list of what is allowed: Python and torch make too many calls to name, and
other walls stand behind it. A refused call fails with EPERM.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SET_SECCOMP, _FILTER = 22, 2  # of prctl
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
_LOAD, _EQUAL, _ABOVE, _RETURN = 0x20, 0x15, 0x35, 0x06  # of BPF: a word, jump if equal, if not less, return
_NUMBER_AT, _MACHINE_AT = 0, 4  # in what the kernel shows the filter
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # numbers of another interface to the same kernel

# name: number on x86-64, on arm64; the newer ones are the same everywhere
REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "perf_event_open": (298, 241), "bpf": (321, 280),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "fsopen": (430, 430), "move_mount": (429, 429), "open_tree": (428, 428), "setns": (308, 268),
    "unshare": (272, 97), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "open_by_handle_at": (304, 265), "acct": (163, 89), "reboot": (169, 142),
    "swapon": (167, 224), "quotactl": (179, 60),
}  # fmt: skip


def program(machine: str) -> bytes:
    """The filter for one architecture.

    Raises:
        KeyError: numbers of that architecture are not known here.
    """
    known, column = _MACHINES[machine], list(_MACHINES).index(machine)
    numbers = sorted(pair[column] for pair in REFUSED.values())
    count = len(numbers)
    steps = [
        (_LOAD, 0, 0, _MACHINE_AT), (_EQUAL, 0, count + 3, known),  # of another machine's interface: refuse
        (_LOAD, 0, 0, _NUMBER_AT), (_ABOVE, count + 1, 0, _X32),
        *((_EQUAL, count - at, 0, number) for at, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE),
    ]  # fmt: skip
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def restrict() -> str:
    """Refuse the calls of REFUSED to this process from now on; returns what was reached, in words."""
    try:
        code = program(platform.machine())
    except KeyError:
        return f"none refused: their numbers on {platform.machine()} are not known here"
    held = ctypes.create_string_buffer(code, len(code))
    given = struct.pack("HxxxxxxP" if ctypes.sizeof(ctypes.c_void_p) == 8 else "HxxP", len(code) // 8,
                        ctypes.addressof(held))  # fmt: skip
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_SECCOMP, _FILTER, ctypes.c_char_p(given), 0, 0) != 0:
        return f"none refused: {os.strerror(ctypes.get_errno())}"
    return f"{len(REFUSED)} refused (seccomp)"
