"""Pairs of programs that load for each other (thread block clusters of two), which Gluon of Triton 3.6 cannot say.

A kernel is compiled as for single programs, its PTX is changed in two places, and it is launched in clusters of two:

    TMA loads of the second tensor map   (in the order of the text) write to both programs, at the same place: multicast
    mbarrier.arrive with count = 2       arrives once on the barrier of each program

So the kernel has to give barriers that both programs count up twice the arrivals, have its threads meet before they
touch each other's memory (`barrier.cluster`), and end only when nobody writes to it any more. Program numbers 2i and
2i + 1 are a pair.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from gpu_accel.flash_attention3 import launch

_LOAD = re.compile(
    r"(?P<guard>@%p\d+ )?"
    r"(?P<op>cp\.async\.bulk\.tensor\.\dd\.shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes) "
    r"(?P<to>\[[^\]]+\]), \[(?P<map>%\w+), (?P<at>\{[^}]+\})\], (?P<barrier>\[[^\]]+\]);"
)
_ARRIVE = re.compile(r"(?P<guard>@%p\d+ )?mbarrier\.arrive\.shared::cta\.b64 _, \[(?P<at>[^\]]+)\], 2;")


class NotUnderstood(RuntimeError):
    """The PTX is not what this Triton version was seen to write."""


def paired(ptx: str) -> str:
    """PTX of a kernel for single programs -> for pairs of them.

    Raises NotUnderstood unless there are loads of two tensor maps or more, and arrivals with a count of two.
    """
    maps: list[str] = []
    for found in _LOAD.finditer(ptx):
        if found["map"] not in maps:
            maps.append(found["map"])
    if len(maps) < 2 or len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared::", ptx)) != len(_LOAD.findall(ptx)):
        raise NotUnderstood(f"loads of {len(maps)} tensor maps, or others")

    def to_both(found: re.Match) -> str:
        if found["map"] != maps[1]:
            return found[0]
        load = f"{found['guard'] or ''}{found['op'].replace('::cta', '::cluster')}.multicast::cluster"
        where = f"{found['to']}, [{found['map']}, {found['at']}], {found['barrier']}"
        return f"{{ .reg .b16 both; mov.b16 both, 3; {load} {where}, both; }}"

    def at_both(found: re.Match) -> str:
        one = f"{found['guard'] or ''}mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];"
        reach = (f"mapa.shared::cluster.u32 there, {found['at']}, {rank}; {one}" for rank in range(2))
        return f"{{ .reg .b32 there; {' '.join(reach)} }}"

    text, arrivals = _ARRIVE.subn(at_both, _LOAD.sub(to_both, ptx))
    if not arrivals:
        raise NotUnderstood("no mbarrier.arrive with a count of 2")
    return text


def assemble(ptx: str, capability: int) -> bytes:
    """The cubin, by the ptxas that Triton brings; kept in Triton's cache."""
    from triton.backends.nvidia import compiler
    from triton.runtime.cache import get_cache_manager

    tool = compiler.get_ptxas(capability)
    cache = get_cache_manager(hashlib.sha256(f"{tool.version} {capability} {ptx}".encode()).hexdigest())
    known = cache.get_file("pairs.cubin")
    if known is not None:
        return Path(known).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [tool.path, f"-arch=sm_{capability}a", str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NotUnderstood(f"ptxas: {done.stderr[-2000:]}")
        made = cubin.read_bytes()
    cache.put(made, "pairs.cubin", binary=True)
    return made


class PairLaunch:
    """One Gluon kernel in pairs of programs, and its compiled variants; called as `gluon_launch.QuickLaunch`."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self._compiled: dict[tuple, Any] = {}

    def __call__(self, key: tuple, programs: int, arguments: tuple, constants: dict, options: dict) -> None:
        if launch._hook is not None:
            launch.launch(self.kernel, programs, arguments, {**constants, **options})
            return
        values = tuple(constants.values())
        variant = (torch.cuda.current_device(), key, values)
        compiled = self._compiled.get(variant)
        if compiled is None:
            compiled = self.kernel.warmup(*arguments, grid=(programs,), **constants, **options)
            compiled.kernel = assemble(paired(compiled.asm["ptx"]), 90)
            warps, _, shared = compiled.packed_metadata
            compiled.packed_metadata = (warps, 2, shared)
            self._compiled[variant] = compiled
        compiled[(programs // 2, 1, 1)](*arguments, *values)
