"""What a CUDA C++ candidate may contain. Text, so these rules are hints that name a fault early, and no boundary.

The boundary is elsewhere: only device code is compiled (NVRTC has no host side), in a process of its own; a module is
loaded anew before it is timed, inputs change with every launch, and outputs are compared.
"""

from __future__ import annotations

import re

from .candidate import Candidate
from .verdict import Kind, Rejected, Verdict

# Headers of CUDA itself, which NVRTC finds only where a toolkit is installed: refused, but no sign of cheating.
HEADERS = frozenset({
    "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cooperative_groups.h", "mma.h", "cuda_pipeline.h", "cuda/barrier",
    "cuda/pipeline", "cuda/std/limits", "cuda/std/cstdint",
})  # fmt: skip

_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
_INCLUDE = re.compile(r'^[ \t]*(?:#|%:|\?\?=)[ \t]*include\w*[ \t]*(?:<([^>\n]*)>|"([^"\n]*)"|(.*))', re.M)

_RULES: tuple[tuple[Kind, str], ...] = (
    (Kind.HOST_CODE, r"<<<|\bcuda(?:Malloc|Memcpy|Launch|Stream|Event|Graph|Device)\w*|\bcu(?:Launch|Ctx)\w*"),
    (Kind.CLOCK, r"\bclock(?:64)?\s*\(|\b__nanosleep\b|globaltimer|%clock"),
    (Kind.FORGED_VERDICT, r"\bprintf\s*\(|\b__trap\s*\(|\bassert\s*\("),
    (Kind.CACHE_POLICY, r"evict_last|createpolicy|L2::cache_hint|__ldlu|persisting|\bprefetch\.global\.L2"),
    (Kind.INLINE_CODE, r"\.incbin|#\s*pragma\s+nv_|\b__asm__\b.*\.(?:global|extern)"),
)
_GLOBAL = re.compile(r"\b(?:static\s+)?__(?:device__|managed__)\s+(?!.*\()[^;{}()]*[;=\[]")


def check(candidate: Candidate) -> None:
    """Refuse what no kernel needs.

    Raises:
        Rejected: cheating or malformed, with the lines.
    """
    source = candidate.source
    entries = [one.entry for one in candidate.launch.passes]
    if not all(one.isidentifier() for one in entries):
        raise Rejected(Verdict.MALFORMED, None, 'the launch spec of a CUDA kernel needs entry = "name"')
    for found in _INCLUDE.finditer(source):
        header = found[1] or found[2] or ""
        shown = (header or found[3] or "").strip()[:60]
        known = header in HEADERS
        raise Rejected(
            Verdict.MALFORMED if known else Verdict.CHEATING, None if known else Kind.INPUT_OUTPUT,
            f"includes {shown!r}; candidates include nothing", (found[0].strip()[:80],),
        )  # fmt: skip
    bare = _COMMENT_OR_STRING.sub(lambda m: m[0] if m[0].startswith('"') else " ", source)
    for kind, rule in _RULES:
        if found_ := re.search(rule, bare):
            line = bare.count("\n", 0, found_.start()) + 1
            raise Rejected(Verdict.CHEATING, kind, f"has {found_[0]!r:.60}", (f"line {line}: {found_[0][:60]}",))
    if kept := _GLOBAL.search(bare) or re.search(r"\bstatic\s+(?!__device__|inline|constexpr|__forceinline__)", bare):
        line = bare.count("\n", 0, kept.start()) + 1
        raise Rejected(
            Verdict.CHEATING, Kind.STATE, "keeps values between launches in a variable of the module",
            (f"line {line}: {' '.join(kept[0].split())[:60]}",),
        )  # fmt: skip
    for entry in entries:
        if not re.search(rf"__global__[^;{{]*\b{entry}\s*\(", bare):
            raise Rejected(Verdict.MALFORMED, None, f"there is no __global__ function {entry}")
