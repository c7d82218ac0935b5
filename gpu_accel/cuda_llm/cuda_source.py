"""What a CUDA C++ candidate may contain: rules for its text, which name a fault early, and for the PTX made of it.

Text can be written so that no rule of text sees what it means (`__dev##ice__`, `"createpol" "icy"`). In PTX macros are
expanded and strings joined, so `check_ptx` sees each variable of the module and each instruction. What only text shows
is what it includes; therefore `check` reads tokens as a compiler does and refuses what it would read differently.

None of it is the boundary: only device code is compiled (NVRTC has no host side), in a process of its own; a module is
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

# Tokens that tell comments from what looks like one. A raw string begins with R, and numbers have quotes in them.
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<raw>(?:u8|[uUL])?R")|(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"
    |(?:u8|[uUL])?'(?:\\.|[^'\\\n])*'|\.?\d(?:[eEpP][+-]|'\w|[\w.])*|\w+|(?P<open>["']|/\*)""", re.S | re.X,
)  # fmt: skip
_INCLUDE = re.compile(
    r'^[ \t]*(?:#|%:|\?\?=)[ \t]*(?:include\w*|import|embed)[ \t]*(?:<([^>\n]*)>|"([^"\n]*)"|(.*))', re.M
)
_HAS = re.compile(r"\b__has_(?:include\w*|embed)\b")

_RULES: tuple[tuple[Kind, str], ...] = (
    (Kind.HOST_CODE, r"<<<|\bcuda(?:Malloc|Memcpy|Launch|Stream|Event|Graph|Device)\w*|\bcu(?:Launch|Ctx)\w*"),
    (Kind.CLOCK, r"\bclock(?:64)?\s*\(|\b__nanosleep\b|globaltimer|%clock"),
    (Kind.FORGED_VERDICT, r"\bprintf\s*\(|\b__trap\s*\(|\bassert\s*\("),
    (Kind.CACHE_POLICY, r"evict_last|createpolicy|L2::cache_hint|__ldlu|persisting|\bprefetch\.global\.L2"),
    (Kind.INLINE_CODE, r"\.incbin|#\s*pragma\s+nv_|\b__asm__\b.{0,200}\.(?:global|extern)"),
)
# Of PTX. The first that is found names the verdict; what comes from printf also has a variable, its text.
_PTX: tuple[tuple[Kind, str], ...] = (
    (Kind.FORGED_VERDICT, r"\bvprintf\b|\b__assertfail\b|^\s*(?:@!?%p\d+ )?(?:trap|brkpt);"),
    (Kind.CLOCK, r"%clock\w*|%globaltimer\w*|\bnanosleep\b|%pm\d"),
    (Kind.CACHE_POLICY, r"\bcreatepolicy\b|evict_last|L2::cache_hint|\bapplypriority\b|\bprefetch\S*\.L2|\bdiscard\."),
    (Kind.HOST_CODE, r"\bcuda(?:Launch|Get|Device|Graph|Stream)\w*|\.extern\s+\.func"),
    (Kind.STATE, r"(?<!\.ptr )\.global\s+(?:\.(?:align|attribute)\b|\.[a-z]\d+\s+[\w$%]+\s*[;=\[])[^\n]*"),
)
PTX_KINDS = frozenset(kind for kind, _ in _PTX)
_GLOBAL = re.compile(r"\b(?:static\s+)?__(?:device__|managed__)\s+(?!.{0,200}\()[^;{}()]{0,200}[;=\[]")


def check(candidate: Candidate) -> None:
    """Refuse what no kernel needs.

    Raises:
        Rejected: cheating or malformed, with the lines.
    """
    source = candidate.source
    entries = [one.entry for one in candidate.launch.passes]
    if not all(one.isidentifier() for one in entries):
        raise Rejected(Verdict.MALFORMED, None, 'the launch spec of a CUDA kernel needs entry = "name"')
    bare = without_comments(source)
    if found_ := _HAS.search(bare):
        raise Rejected(Verdict.CHEATING, Kind.INPUT_OUTPUT, f"asks for files by {found_[0]}", (found_[0],))
    for found in _INCLUDE.finditer(bare):
        header = found[1] or found[2] or ""
        shown = (header or found[3] or "").strip()[:60]
        known = header in HEADERS
        raise Rejected(
            Verdict.MALFORMED if known else Verdict.CHEATING, None if known else Kind.INPUT_OUTPUT,
            f"includes {shown!r}; candidates include nothing", (found[0].strip()[:80],),
        )  # fmt: skip
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
        if not re.search(rf"__global__[^;{{]{{0,500}}\b{entry}\s*\(", bare):
            raise Rejected(Verdict.MALFORMED, None, f"there is no __global__ function {entry}")


def without_comments(source: str) -> str:
    """The text with joined lines joined and a space, or its line ends, for each comment.

    Raises:
        Rejected: malformed, for raw strings and quotes that are not closed, in which comments cannot be told.
    """
    joined = re.sub(r"(?:\\|\?\?/)[ \t]*\n", "", source)

    def read(found: re.Match[str]) -> str:
        if found["raw"] or found["open"]:
            line = joined.count("\n", 0, found.start()) + 1
            what = "a raw string" if found["raw"] else f"{found[0]} that is not closed"
            raise Rejected(Verdict.MALFORMED, None, f"has {what}", (f"line {line}",))
        return found[0] if not found["comment"] else " " + "\n" * found[0].count("\n")

    return _TOKEN.sub(read, joined)


def check_ptx(ptx: str) -> None:
    """Refuse what no kernel needs, in what a compiler made of it.

    Raises:
        Rejected: cheating, of PTX_KINDS.
    """
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", " ", ptx, flags=re.S)  # which strings may mislead: the rest counts too
    for kind, rule in _PTX:
        if found := re.search(rule, bare, re.M) or re.search(rule, ptx, re.M):
            line = " ".join(found[0].split())[:80]
            why = "keeps values between launches in a variable of the module" if kind is Kind.STATE else f"has {line!r}"
            raise Rejected(Verdict.CHEATING, kind, why, (f"PTX: {line}",))
