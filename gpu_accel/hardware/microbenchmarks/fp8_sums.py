"""How exactly the tensor cores add products of 8-bit floats.

"wgmma" adds all of K in the accumulators of QGMMA, as a fast FP8 product does; "wgmma-promoted" takes them out every 128
elements and adds them in float32 on the ordinary units (DeepSeek-V3, 2412.19437, section 3.3.2). torch's own product
is there with and without fast accumulation. `powers` finds how many bits survive: 2^16 plus a product that is ever
smaller, in one instruction and from one instruction to the next.
"""

# ruff: noqa: E501 - the long lines are CUDA
from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gpu_accel.workbench.experiment import Case, Check

from .launch import launch
from .probe import PRELUDE, Kernel, Outcome, Probe, Sampled
from .tensor import tiled

if TYPE_CHECKING:
    import torch

SIZE = 512  # rows and columns of the product
TILE = 64
PROMOTE = 128  # elements of K between promotions
LENGTHS = (128, 512, 1024, 4096, 16384)
_BITS = 13  # the accumulator's, for the bound: every product and every sum may lose this much of the largest
_POWERS = 18  # rows of the test of bits

_KERNEL = """
extern "C" __global__ void __launch_bounds__(128) sums_{name}(u64* stamps, float* out, const uint4* a, const uint4* b, int steps) {{
    __shared__ __align__(1024) uint4 tiles[2][128];
    u32 base = shared_address(tiles);
    u64 left = {left}, right = {right};
    const uint4* mine = a + (u64)blockIdx.x * steps * 128;
    const uint4* theirs = b + (u64)blockIdx.y * steps * 128;
    float d[32], total[32];
    #pragma unroll
    for (int i = 0; i < 32; i++) d[i] = total[i] = 0.0f;
    u64 begin = now();
    #pragma unroll 1
    for (int step = 0; step < steps; step++) {{
        __syncthreads();
        tiles[0][threadIdx.x] = mine[step * 128 + threadIdx.x];
        tiles[1][threadIdx.x] = theirs[step * 128 + threadIdx.x];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {{{listed}}}, %32, %33, 1, 1, 1;" : {outputs} : "l"(left), "l"(right));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        {promote}
    }}
    u64 end = now();
    int row = blockIdx.x * 64 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    int column = blockIdx.y * 64 + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < 32; i++)
        out[(row + (i / 2 % 2) * 8) * {size} + column + i / 4 * 8 + i % 2] = total[i] + d[i];
    if (blockIdx.y == 0) stamp(stamps, begin, end);
}}
"""
_ADD_UP = """
        if (step % {every} == {every} - 1) {{
            #pragma unroll
            for (int i = 0; i < 32; i++) {{ total[i] += d[i]; d[i] = 0.0f; }}
        }}
"""


def source() -> str:
    """Both kernels."""
    from .tensor import _descriptor

    text = PRELUDE
    for name, promote in (("fast", ""), ("promoted", _ADD_UP.format(every=PROMOTE // 32))):
        text += _KERNEL.format(
            name=name, left=_descriptor("base", 256), right=_descriptor("base + 2048", 256),
            listed=", ".join(f"%{i}" for i in range(32)), outputs=", ".join(f'"+f"(d[{i}])' for i in range(32)),
            promote=promote, size=SIZE,
        )  # fmt: skip
    return text


def kernel(name: str) -> Kernel:
    return Kernel(source=source(), name=f"sums_{name}", holds="QGMMA.64x64x32.F32.E4M3.E4M3", at_least=1, purity=0.0)


def multiply(a: torch.Tensor, b: torch.Tensor, *, promoted: bool) -> torch.Tensor:
    """A @ B^T of two (SIZE, K) tensors of float8_e4m3fn on the GPU, K a multiple of 32; float32."""
    import torch

    code = kernel("promoted" if promoted else "fast")
    code.loop()
    steps = a.shape[1] // 32
    packed = []
    for one in (a, b):
        raw = one.view(torch.uint8).cpu().view(SIZE // TILE, TILE, steps, 32).permute(0, 2, 1, 3).contiguous()
        packed.append(tiled(raw.view(-1, TILE, 32)).cuda())
    blocks = SIZE // TILE
    out = torch.full((SIZE, SIZE), float("nan"), device="cuda")
    stamps = torch.empty(blocks, 4, 2, dtype=torch.int64, device="cuda")
    launch(code.source, code.name, [stamps, out, *packed, steps], grid=(blocks, blocks, 1), block=128)
    return out


def _inputs(k: int, data: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    draw = torch.rand if data == "uniform" else torch.randn
    made = [draw(SIZE, k, device="cuda", generator=generator).to(torch.float8_e4m3fn) for _ in range(2)]
    return made[0], made[1]


def error(how: str, k: int, data: str, seed: int) -> Outcome:
    """The largest error of a product: relative to each element where all are positive, else to the largest."""
    import torch

    a, b = _inputs(k, data, seed)
    truth = a.float().double() @ b.float().double().t()
    if how.startswith("torch"):
        one = torch.ones((), device="cuda")
        found = torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=how == "torch-fast"
        )
    else:
        found = multiply(a, b, promoted=how == "wgmma-promoted")
    scale = truth.abs() if data == "uniform" else truth.abs().max()
    largest = float(((found.double() - truth).abs() / scale).max())
    # At worst every one of the sums that stay in the accumulator is cut at its last bit, always downwards.
    chained = k if how in ("wgmma", "torch-fast") else PROMOTE
    bound = min(0.5, chained * 2.0**-_BITS) + 1e-6
    return Outcome(
        check=Check(largest, bound, f"max relative error, K {k}"),
        metrics={"max_rel_error": Sampled(samples=(largest,), unit="1", timing={"method": "float64 product"})},
    )


def bits(seed: int) -> Outcome:
    """Bits of the larger of two products that still see the smaller one."""
    import torch

    survived = {}
    wrong = 0
    for metric, place in (("product_bits", 1), ("accumulator_bits", 32)):
        a, b = torch.zeros(SIZE, 64), torch.zeros(SIZE, 64)
        a[:, 0], b[:, 0], b[:, place] = 2.0**8, 2.0**8, 2.0**8
        for row in range(_POWERS):
            a[row, place] = 2.0 ** (8 - row)
        a8, b8 = (one.cuda().to(torch.float8_e4m3fn) for one in (a, b))
        column = multiply(a8, b8, promoted=False)[:_POWERS, 0].double().cpu()
        exact = 2.0**16 + 2.0 ** (16 - torch.arange(_POWERS, dtype=torch.float64))
        seen = column != 2.0**16
        # What is lost may only be the small product, and once one is lost all smaller ones are.
        wrong += int((seen & (column != exact)).sum()) + int((seen[1:] & ~seen[:-1]).sum())
        survived[metric] = int(seen.sum()) - 1
    check = Check(float(wrong), 0.0, "sums that are neither exact nor the larger product")
    method = {"method": "2^16 + 2^(16 - n)", "rows": _POWERS}
    metrics = {name: Sampled(samples=(float(n),), unit="bits", timing=method) for name, n in survived.items()}
    return Outcome(check=check, metrics=metrics)


def probes(quick: bool = False) -> list[Probe]:
    """Errors over K for four ways, and the bits."""
    found = []
    grid = [("uniform", k) for k in LENGTHS] + [("normal", 4096)]
    for data, k in grid[:2] if quick else grid:
        case: Case = {"k": k, "dtype": "e4m3", "data": data}
        for how in ("wgmma", "wgmma-promoted", "torch-fast", "torch-precise"):
            ours = how.startswith("wgmma")
            kernels: Any = (kernel("promoted" if "promoted" in how else "fast"),) if ours else ()
            found.append(
                Probe(
                    case=dict(case), name=how, role="ours" if ours else "peer", kernels=kernels,
                    measure=partial(error, how, k, data),
                    note="" if ours else f"torch._scaled_mm, use_fast_accum={how == 'torch-fast'}",
                )
            )  # fmt: skip
    bits_case: Case = {"k": 64, "dtype": "e4m3", "data": "powers"}
    found.append(Probe(case=bits_case, name="wgmma", kernels=(kernel("fast"),), measure=bits))
    return found
