"""The experiment `ceilings`: what this card gives at best, which rooflines are drawn from.

    case       what     copy, read, write (device memory), matmul (dense), launch (of a kernel that does nothing)
               dtype    fp32 for memory; bf16, fp16, tf32, e4m3 for matmul
               size     elements of a tensor; rows and columns of the operands for matmul
    metric     time [ms], and what follows from it: gbps (a copy counts what it reads and what it writes), tflops

"portable" are plain Triton kernels, "torch" is torch (cuBLAS for products; "torch-fast" with FP8's fast accumulation).
The best of them is the ceiling. The time of `launch` is that between two events around one empty kernel, with the host
well ahead: what the device needs for a launch. What the host needs is more, and is not in it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_accel.errors import UnsupportedError
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, SimpleExperiment, Workload

from . import matmul, streams

ELEMENTS = 2**29  # 2 GiB of float32: forty times the second-level cache of an H100
PRODUCTS = (("bf16", 8192), ("fp16", 8192), ("tf32", 8192), ("e4m3", 8192), ("e4m3", 2048), ("e4m3", 1024))
MEMORY = ("copy", "read", "write")


def list_cases(settings: Settings) -> list[Case]:
    """Memory, products and a launch; small ones where nothing is timed. Shapes and precisions are not asked for."""
    elements = ELEMENTS if settings.on_gpu else 3 * 4096 + 17
    if settings.on_gpu and settings.quick:
        elements //= 4
    found: list[Case] = [{"what": what, "dtype": "fp32", "size": elements} for what in MEMORY]
    for dtype, size in PRODUCTS if settings.on_gpu else [(dtype, 64) for dtype in dict(PRODUCTS)]:
        found.append({"what": "matmul", "dtype": dtype, "size": size})
    return [*found, {"what": "launch", "dtype": "fp32", "size": 1}]


def build(case: Case, settings: Settings) -> Workload:
    """Ours (plain Triton) and torch's; for products only torch's."""
    what, size = str(case["what"]), int(case["size"])
    if what == "matmul":
        return _products(str(case["dtype"]), size, settings)
    moved = {"copy": 8.0 * size, "read": 4.0 * size, "write": 4.0 * size}.get(what)
    pair = {"copy": _copies, "read": _reads, "write": _writes, "launch": _launches}[what](size, settings.device)
    return Workload(implementations=pair, bytes_moved=moved)


def _products(dtype: str, size: int, settings: Settings) -> Workload:
    def one(name: str, fast: bool) -> Implementation:
        return Implementation(
            name=name,
            role="ours",  # the probe of this experiment: the card is what is measured, so a wrong product fails the run
            check=_refusable(lambda seed: matmul.check(dtype, size, seed, device=settings.device, fast=fast), dtype),
            make=lambda seed: matmul.prepared(
                dtype, size, seed, data="random", device=settings.device, fast=fast
            ),
            note="fast accumulation" if fast else "",
        )  # fmt: skip

    flops, moved = matmul.work(dtype, size)
    kinds = [one("torch", False), *([one("torch-fast", True)] if dtype == "e4m3" else [])]
    return Workload(implementations=kinds, flops=flops, bytes_moved=moved)


def _refusable(check: Callable[[int], Check], dtype: str) -> Callable[[int], Check]:
    """A card or a build without FP8 products says so in its own words; that is no wrong result."""

    def checked(seed: int) -> Check:
        try:
            return check(seed)
        except (RuntimeError, NotImplementedError) as error:
            if dtype != "e4m3" or isinstance(error, torch.OutOfMemoryError):
                raise
            raise UnsupportedError(f"torch has no FP8 product here: {str(error).splitlines()[0]}") from error

    return checked


def _copies(size: int, device: str) -> list[Implementation]:
    def run(copy: Callable) -> tuple[Callable, Callable]:
        def make(seed: int) -> Callable[[], object]:
            src = _random(size, seed, device)
            dst = torch.empty_like(src)
            return lambda: copy(src, dst)

        def check(seed: int) -> Check:
            src = _random(size, seed, device)
            dst = torch.full_like(src, float("nan"))
            copy(src, dst)
            return _wrong(dst != src)

        return make, check

    return _pair(run(streams.copy), run(lambda src, dst: dst.copy_(src)))


def _reads(size: int, device: str) -> list[Implementation]:
    def run(read: Callable, block: int) -> tuple[Callable, Callable]:
        def make(seed: int) -> Callable[[], object]:
            src = _random(size, seed, device)
            return lambda: read(src)

        def check(seed: int) -> Check:
            src = _random(size, seed, device)
            found, parts = read(src).double(), src.split(block)
            truth = torch.stack([part.double().sum() for part in parts]) if len(parts) < 64 else _block_sums(src, block)
            scale = block**0.5 if block < size else size**0.5
            return Check(((found - truth).abs().max() / scale).item(), 1e-4, "max_abs / rms")

        return make, check

    return _pair(run(streams.sum_blocks, streams.BLOCK), run(lambda src: src.sum().reshape(1), size))


def _block_sums(src: torch.Tensor, block: int) -> torch.Tensor:
    """Float64 sums of blocks, a part of the tensor at a time; only the last block may be short."""
    whole = src.numel() // block * block
    rows = src[:whole].view(-1, block)
    sums = [part.double().sum(1) for part in rows.split(2**14)]
    return torch.cat([*sums, *([src[whole:].double().sum().reshape(1)] if whole < src.numel() else [])])


def _writes(size: int, device: str) -> list[Implementation]:
    def run(fill: Callable) -> tuple[Callable, Callable]:
        def make(seed: int) -> Callable[[], object]:
            dst = torch.empty(size, device=device)
            return lambda: fill(dst, 0.5 + seed)

        def check(seed: int) -> Check:
            dst = torch.full((size,), float("nan"), device=device)
            fill(dst, 0.5 + seed)
            return _wrong(dst != 0.5 + seed)

        return make, check

    return _pair(run(streams.fill), run(lambda dst, value: dst.fill_(value)))


def _launches(size: int, device: str) -> list[Implementation]:
    def launched(seed: int) -> Check:
        streams.launch_nothing()
        return Check(0.0, 0.0, "wrong elements")

    def add(seed: int) -> Callable[[], object]:
        x = torch.zeros(size, device=device)
        return lambda: x.add_(1)

    def added(seed: int) -> Check:
        x = torch.full((size,), float(seed % 1000), device=device)
        return _wrong(x.add_(1) != seed % 1000 + 1)

    return _pair((lambda seed: streams.launch_nothing, launched), (add, added))


def _pair(ours: tuple[Callable, Callable], theirs: tuple[Callable, Callable]) -> list[Implementation]:
    return [
        Implementation(name="portable", role="ours", make=ours[0], check=ours[1]),
        Implementation(name="torch", role="peer", make=theirs[0], check=theirs[1]),
    ]


def _wrong(where: torch.Tensor) -> Check:
    return Check(float(where.sum().item()), 0.0, "wrong elements")


def _random(size: int, seed: int, device: str) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator(device=device).manual_seed(seed), device=device)


EXPERIMENT = SimpleExperiment(
    name="ceilings",
    title="Measured ceilings: copy, read, write, dense products, a launch",
    list_cases=list_cases,
    build_case=build,
)
