"""The `decode` experiment: one query a head over a KV cache, which is as fast as the cache is read.

    hopper               our Gluon kernel, contiguous (page 0) or paged, splits chosen by shape
    portable             the same of our plain-Triton kernel
    portable-invariant   the same with splits at fixed keys: a sequence's bits do not depend on its neighbours
    sdpa-..., flex       torch's attention, contiguous caches in 16 bits; none of them takes pages or an FP8 cache here
    ...-bf16             with an FP8 cache: our kernels on the same keys and values in 16 bits
    read                 a kernel that reads the keys and values and does nothing with them: the ceiling
    copy                 a device-to-device copy that moves as many bytes, which is no ceiling: see `reading.py`

32 query heads, 8 key heads, head_dim 128 unless shapes are given; every sequence fills its cache. Rates count keys,
values, queries, outputs and page numbers once. `--precision fp8` has an e4m3 cache with one scale for a head.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gpu_accel.errors import GpuAccelError, IncorrectResultError, UnsupportedError
from gpu_accel.flash_attention3 import flash_attn_with_kvcache, reference_kvcache
from gpu_accel.flash_attention3.kvcache import choose, make_call
from gpu_accel.testing import generator, random_values
from gpu_accel.testing.kvcache import yardstick
from gpu_accel.workbench.experiment import Case, Check, Implementation, Scalar, Settings, Timed, Workload

from .attention import refuse_changes, worse
from .cases import DTYPES
from .inputs import TORCH_DTYPES
from .judging import judge_output, poison_free_memory
from .peers import Contender, contenders, refusals
from .reading import programs, read_both, words_of

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
SIZES = ((1, 4096), (1, 32768), (16, 4096), (16, 32768), (128, 4096), (128, 32768))  # (sequences, keys of each)
SIZES_QUICK = ((1, 4096), (16, 4096))
PAGES = (0, 16)
MORE_PAGES = (1, 64, 256)  # at one size
PAGED_SIZE = FLEX_SIZE = (16, 4096)
PEERS = ("sdpa-flash", "sdpa-cudnn", "flex")

_CPU = (
    {"batch": 1, "seqlen_k": 40, "page": 0},
    {"batch": 2, "seqlen_k": 35, "page": 16},
    {"batch": 1, "seqlen_k": 17, "page": 1},
)


def list_cases(settings: Settings) -> list[Case]:
    """Batch x cache length x page size; on a CPU a few small ones; `settings.shapes` takes their place."""
    if settings.shapes:
        grid = [_complete(given) | {"page": page} for given in settings.shapes for page in PAGES]
    elif settings.on_gpu:
        sizes = SIZES_QUICK if settings.quick else SIZES
        grid = [{"batch": b, "seqlen_k": n, "page": page} for b, n in sizes for page in PAGES]
        if not settings.quick:
            b, n = PAGED_SIZE
            grid += [{"batch": b, "seqlen_k": n, "page": page} for page in MORE_PAGES]
    else:
        small = {"heads": 4, "heads_kv": 1, "head_dim": 32}
        grid = [small | shape for shape in (_CPU[:2] if settings.quick else _CPU)]
    return [_case(shape, settings) for shape in grid]


def _complete(given: Case) -> dict[str, Scalar]:
    shape = dict(given)
    both = shape.pop("seqlen", None)
    if both is not None:  # of the cache; queries are few
        shape["seqlen_k"] = both
    shape.setdefault("seqlen_k", 4096)
    if "heads" in shape:
        shape.setdefault("heads_kv", shape["heads"])
    return shape


def _case(shape: dict[str, Scalar], settings: Settings) -> Case:
    return {
        "pass": "decode",
        "batch": shape.get("batch", 1),
        "seqlen_q": shape.get("seqlen_q", 1),
        "seqlen_k": shape["seqlen_k"],
        "heads": shape.get("heads", HEADS),
        "heads_kv": shape.get("heads_kv", HEADS_KV),
        "head_dim": shape.get("head_dim", HEAD_DIM),
        "causal": shape.get("causal", False),
        "page": shape["page"],
        "dtype": DTYPES[settings.precision],
        "input": settings.input,
    }


class Arguments(dict):
    """A dictionary that weak references can point at."""


class Decoding:
    """Inputs, truth and judgement of one case."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self._kept: tuple[int, Tensor, Tensor] | None = None
        self._shared: weakref.WeakValueDictionary[int, Arguments] = weakref.WeakValueDictionary()

    def size(self, *names: str) -> tuple[int, ...]:
        return tuple(int(self.case[name]) for name in names)

    def arguments(self, seed: int) -> dict:
        """What `flash_attn_with_kvcache` is called with, in fresh memory: pages in random order, full sequences."""
        batch, queries, keys, page = self.size("batch", "seqlen_q", "seqlen_k", "page")
        heads, heads_kv, dim = self.size("heads", "heads_kv", "head_dim")
        source = generator(seed, self.device)
        dtype = TORCH_DTYPES[str(self.case["dtype"])]
        made: dict = {"causal": bool(self.case["causal"])}
        lead = (batch, keys)
        if page:
            each = -(-keys // page)
            order = torch.randperm(batch * each, generator=source, device=self.device)
            made["page_table"] = order.view(batch, each).int()
            lead = (batch * each, page)

        def draw(*shape: int) -> Tensor:
            kind = str(self.case["input"])
            return random_values(shape, kind=kind, dtype=dtype, device=self.device, generator=source)

        made["q"] = draw(batch, queries, heads, dim)
        for name in "kv":
            # a row at a time: random numbers are drawn in float32
            cache = torch.empty(*lead, heads_kv, dim, dtype=dtype, device=self.device)
            step = max(1, (1 << 26) // max(1, cache[0].numel()))
            for first in range(0, lead[0], step):
                part = cache[first : first + step]
                part.copy_(draw(*part.shape))
            if self.case["dtype"] == "e4m3":
                cache, made[f"{name}_descale"] = _quantize(cache)
            made[f"{name}_cache"] = cache
        made["cache_seqlens"] = torch.full((batch,), keys, dtype=torch.int32, device=self.device)
        return made

    def shared(self, seed: int) -> Arguments:
        """One set of arguments for all implementations: 128 caches of 32k keys take 17 GB, and nobody writes to it."""
        made = self._shared.get(seed)
        if made is None:
            made = self._shared[seed] = Arguments(self.arguments(seed))
        return made

    def expected(self, seed: int, arguments: dict) -> tuple[Tensor, Tensor]:
        """Truth and yardstick of o, kept for the last seed. One sequence at a time, so that none is too long."""
        if self._kept is None or self._kept[0] != seed:
            self._kept = None
            truths, rulers = [], []
            for b in range(arguments["q"].shape[0]):
                call = make_call(**_sequence(arguments, b))
                truths.append(reference_kvcache.forward(call.q, call, torch.float64)[0])
                rulers.append(yardstick(call)[0])
            self._kept = seed, torch.cat(truths), torch.cat(rulers)
        return self._kept[1:]

    def judge(self, seed: int, arguments: dict, call: Callable[[], Tensor], sign: float = 1.0) -> Check:
        """Run once with poison in free memory and judge o; `sign` is -1 where v was negated meanwhile."""
        truth, ruler = self.expected(seed, arguments)
        poison_free_memory([ruler])
        return judge_output(sign * call(), truth, ruler)


def _quantize(cache: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with a scale for each head, a part at a time: `quantize_cache` works in float32."""
    step = max(1, (1 << 27) // max(1, cache[0].numel()))
    parts = [cache[i : i + step] for i in range(0, len(cache), step)]
    largest = torch.stack([part.abs().amax((0, 1, 3)).float() for part in parts]).amax(0)
    scales = reference_kvcache.scale_of(largest, "e4m3")
    out = torch.empty(cache.shape, dtype=torch.float8_e4m3fn, device=cache.device)
    for i, part in enumerate(parts):
        codes = reference_kvcache.encode(part.float() / scales[:, None], "e4m3")
        out.view(torch.uint8)[i * step : i * step + len(part)] = codes.view(torch.uint8)
    return out, scales


def _sequence(arguments: dict, b: int) -> dict:
    """The arguments of sequence b alone."""
    one = {name: arguments[name][b : b + 1] for name in ("q", "cache_seqlens")}
    if "page_table" in arguments:
        one["page_table"] = arguments["page_table"][b : b + 1]
    else:
        one |= {name: arguments[name][b : b + 1] for name in ("k_cache", "v_cache")}
    return arguments | one


def _negate(cache: Tensor) -> None:
    if cache.dtype.itemsize == 1:
        cache.view(torch.uint8).bitwise_xor_(0x80)
    else:
        cache.neg_()


def build(case: Case, settings: Settings) -> Workload:
    """Ours, torch's and a copy of as many bytes."""
    if settings.input == "smollm2":
        raise UnsupportedError("decode draws its caches: what bounds it is their size, not what is in them")
    decoding = Decoding(case, settings.device)
    moved = bytes_moved(case)
    wide = Decoding({**case, "dtype": "bf16"}, settings.device) if case["dtype"] == "e4m3" else None
    found = [
        _ours("hopper", decoding, settings, {}, backend="hopper"),
        _ours("portable", decoding, settings, {}),
        _ours("portable-invariant", decoding, settings, {"batch_invariant": True}),
        *([_ours(f"{one}-bf16", wide, settings, {}, backend=one) for one in ("hopper", "portable")] if wide else []),
        *(_peer(one, decoding, settings) for one in _rivals(case, settings)),
        _read(decoding, settings),
        copying(settings.device, moved),
    ]
    names = tuple(one.name for one in found)
    return Workload(implementations=found, baselines=names, bytes_moved=moved, l2="clean")


def bytes_moved(case: Case) -> float:
    """Keys, values, queries, outputs and page numbers, once each."""
    b, sq, n, h, hk, d, page = (
        int(case[x]) for x in ("batch", "seqlen_q", "seqlen_k", "heads", "heads_kv", "head_dim", "page")
    )
    cached = 1 if case["dtype"] == "e4m3" else 2
    return float(2 * b * n * hk * d * cached + 2 * 2 * b * sq * h * d + (4 * b * -(-n // page) if page else 0))


def _ours(
    name: str, decoding: Decoding, settings: Settings, options: dict, backend: str = "portable"
) -> Implementation:
    def prepare(seed: int) -> tuple[dict, Callable[[], Tensor]]:
        made = decoding.shared(seed)
        return made, lambda: flash_attn_with_kvcache(**made, **options, backend=backend)

    def check(seed: int) -> Check:
        made, call = prepare(seed)
        return decoding.judge(seed, made, call)

    def make(seed: int) -> Callable[[], object]:
        made, call = prepare(seed)

        def verify() -> Check:
            fresh = decoding.arguments(seed)
            names = [n for n, x in made.items() if isinstance(x, Tensor)]
            refuse_changes([fresh[n] for n in names], [made[n] for n in names])
            first = decoding.judge(seed, fresh, call)
            _negate(made["v_cache"])
            try:
                return worse(first, decoding.judge(seed, fresh, call, -1.0))
            finally:
                _negate(made["v_cache"])  # the others read it too

        return Timed(call, verify)

    how = f"pages of {decoding.case['page']}" if decoding.case["page"] else "contiguous"
    note = f"{how}, lengths on the device" + (", splits at fixed keys" if options else "")
    why = _refusal(settings, decoding, backend)
    return Implementation(name=name, role="ours", unavailable=why, check=check, make=make, note=note)


def _refusal(settings: Settings, decoding: Decoding, backend: str = "portable") -> str:
    """Why a kernel of ours does not run here; empty when it does."""
    queries, heads, heads_kv, dim = decoding.size("seqlen_q", "heads", "heads_kv", "head_dim")
    device, kind = settings.device if settings.on_gpu else "cpu", str(decoding.case["dtype"])
    q = torch.zeros(1, queries, heads, dim, dtype=TORCH_DTYPES[kind], device=device)
    cache = torch.zeros(1, queries, heads_kv, dim, dtype=q.dtype, device=device)
    if kind == "e4m3":
        cache = cache.to(torch.float8_e4m3fn)
    try:
        choose(make_call(q, cache, cache, causal=bool(decoding.case["causal"])), backend)
    except GpuAccelError as error:
        return str(error)
    return ""


def _rivals(case: Case, settings: Settings) -> list[Contender]:
    """torch's attention on the case, with the reason where it cannot do the same thing."""
    why = ""
    if case["page"]:
        why = "torch's attention takes no page table"
    elif case["dtype"] == "e4m3":
        why = "torch's attention takes no FP8 cache"
    found = []
    for one in contenders({**case, "pass": "forward"}, settings):
        if one.name not in PEERS:
            continue
        unavailable = one.unavailable
        if one.name == "flex" and settings.on_gpu:
            here = (case["batch"], case["seqlen_k"]) == FLEX_SIZE or settings.shapes or "flex" in settings.only
            unavailable = "" if here else f"compiled for one size, batch x keys {FLEX_SIZE}, or with --only flex"
        found.append(replace(one, unavailable=why or unavailable))
    return found


def _peer(one: Contender, decoding: Decoding, settings: Settings) -> Implementation:
    def prepare(seed: int) -> tuple[dict, tuple[Tensor, ...], Callable[[], Tensor]]:
        made = decoding.shared(seed)
        placed = one.place(made["q"], made["k_cache"], made["v_cache"])
        return made, placed, lambda: one.attend(*placed)

    def check(seed: int) -> Check:
        made, _, call = prepare(seed)
        with refusals(one):
            return decoding.judge(seed, made, lambda: one.to_bshd(call()))

    def make(seed: int) -> Callable[[], object]:
        made, placed, call = prepare(seed)

        def verify() -> Check:
            fresh = decoding.arguments(seed)
            refuse_changes(one.place(fresh["q"], fresh["k_cache"], fresh["v_cache"]), placed)
            first = decoding.judge(seed, fresh, lambda: one.to_bshd(call()))
            placed[2].neg_()
            try:
                return worse(first, decoding.judge(seed, fresh, lambda: one.to_bshd(call()), -1.0))
            finally:
                placed[2].neg_()

        verify.keeps = made  # for the implementations that come after: what is placed may be views of it
        return Timed(call, verify)

    return Implementation(
        name=one.name, role=one.role, unavailable=one.unavailable, check=check, make=make,
        note=f"contiguous cache, {one.note}",
    )  # fmt: skip


def _read(decoding: Decoding, settings: Settings) -> Implementation:
    def prepare(seed: int) -> tuple[dict, Tensor]:
        made = decoding.shared(seed)
        device = made["k_cache"].device
        return made, torch.zeros(programs(device), dtype=torch.int64, device=device)

    def judge(made: dict, out: Tensor) -> Check:
        expected = sum(int(words_of(made[name]).sum(dtype=torch.int64)) for name in ("k_cache", "v_cache"))
        if int(out.sum()) != expected:
            raise IncorrectResultError("not every word of the cache was read once")
        return Check(0.0, 0.0, "words not read")

    def check(seed: int) -> Check:
        made, out = prepare(seed)
        read_both(made["k_cache"], made["v_cache"], out)
        return judge(made, out)

    def make(seed: int) -> Callable[[], object]:
        made, out = prepare(seed)

        def verify() -> Check:
            out.zero_()
            read_both(made["k_cache"], made["v_cache"], out)
            return judge(made, out)

        return Timed(lambda: read_both(made["k_cache"], made["v_cache"], out), verify)

    note = "keys and values read once and added up; 8 bytes written by each of 4 programs an SM"
    return Implementation(
        name="read", role="reference", unavailable=_refusal(settings, decoding), check=check, make=make, note=note
    )


def copying(device: str, moved: float) -> Implementation:
    """A copy on the device that moves as many bytes as a case, half of them read."""
    half = max(1, int(moved) // 2)

    def prepare(seed: int) -> tuple[Tensor, Tensor]:
        source = generator(seed, device)
        a = torch.randint(0, 256, (half,), dtype=torch.uint8, device=device, generator=source)
        return a, torch.zeros_like(a)

    def judge(a: Tensor, b: Tensor) -> Check:
        if not torch.equal(a, b):
            raise IncorrectResultError("the copy differs from what was copied")
        return Check(0.0, 0.0, "bytes that differ")

    def check(seed: int) -> Check:
        a, b = prepare(seed)
        b.copy_(a)
        return judge(a, b)

    def make(seed: int) -> Callable[[], object]:
        a, b = prepare(seed)
        return Timed(lambda: b.copy_(a), lambda: judge(a, b))

    note = "tensor.copy_ on the device: half of the bytes of the case read, as many written"
    return Implementation(name="copy", role="reference", check=check, make=make, note=note)
