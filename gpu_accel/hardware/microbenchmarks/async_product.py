"""What asynchronous copies give a product of matrices: tiles that arrive by cp.async in two stages, or by load and store.

Blocks of `block` x `block` threads compute a tile of the same size, an element a thread, from tiles that each thread fills
with one word of either matrix at a time. The asynchronous kernel asks for the next two tiles before it computes with the
last two. Nothing else is done for speed: it is the product of 2402.13499, not one that anybody would use.
"""

# ruff: noqa: E501 - the long lines are CUDA
from __future__ import annotations

from functools import partial

from gpu_accel.workbench.experiment import Case

from .probe import PRELUDE, Kernel, Outcome, Probe, close, run

SIZE = 2048  # rows and columns
BLOCKS = (8, 16, 32)
ENGINES = {"load": "LDG", "cp.async": "LDGSTS"}

_SOURCE = """
#define B {block}
__device__ __forceinline__ void copy(float* to, const float* from) {{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(shared_address(to)), "l"(from) : "memory");
}}
__device__ __forceinline__ float products(const float left[B][B], const float right[B][B], int y, int x, float sum) {{
    #pragma unroll
    for (int k = 0; k < B; k++) sum = fmaf(left[y][k], right[k][x], sum);
    return sum;
}}
extern "C" __global__ void __launch_bounds__(B * B) load(u64* stamps, float* c, const float* a, const float* b, int n) {{
    __shared__ float left[B][B], right[B][B];
    int x = threadIdx.x % B, y = threadIdx.x / B, row = blockIdx.x / (n / B) * B + y, column = blockIdx.x % (n / B) * B + x;
    float sum = 0;
    u64 begin = now();
    #pragma unroll 1
    for (int k = 0; k < n; k += B) {{
        left[y][x] = a[row * n + k + x];
        right[y][x] = b[(k + y) * n + column];
        __syncthreads();
        sum = products(left, right, y, x, sum);
        __syncthreads();
    }}
    u64 end = now();
    c[row * n + column] = sum;
    stamp(stamps, begin, end);
}}
extern "C" __global__ void __launch_bounds__(B * B) cp_async(u64* stamps, float* c, const float* a, const float* b, int n) {{
    __shared__ float left[2][B][B], right[2][B][B];
    int x = threadIdx.x % B, y = threadIdx.x / B, row = blockIdx.x / (n / B) * B + y, column = blockIdx.x % (n / B) * B + x;
    float sum = 0;
    u64 begin = now();
    copy(&left[0][y][x], a + row * n + x);
    copy(&right[0][y][x], b + y * n + column);
    asm volatile("cp.async.commit_group;" ::: "memory");
    #pragma unroll 1
    for (int k = 0; k < n; k += B) {{
        int stage = k / B & 1;
        if (k + B < n) {{
            copy(&left[stage ^ 1][y][x], a + row * n + k + B + x);
            copy(&right[stage ^ 1][y][x], b + (k + B + y) * n + column);
        }}
        asm volatile("cp.async.commit_group;" ::: "memory");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        sum = products(left[stage], right[stage], y, x, sum);
        __syncthreads();
    }}
    u64 end = now();
    c[row * n + column] = sum;
    stamp(stamps, begin, end);
}}
"""


def kernels(engine: str, block: int) -> tuple[Kernel, Kernel]:
    """One kernel with two promises: its loop holds the two copies of a step, and the products with what they brought."""
    source, name = PRELUDE + _SOURCE.format(block=block), engine.replace(".", "_")
    copies = Kernel(source=source, name=name, holds=ENGINES[engine], at_least=2, purity=0.0)
    return copies, Kernel(source=source, name=name, holds="FFMA", at_least=block, purity=0.0)


def product(engine: str, block: int, seed: int) -> Outcome:
    """The time of the whole product."""
    import torch

    code, arithmetic = kernels(engine, block)
    code.loop()
    arithmetic.loop()
    generator = torch.Generator(device="cuda").manual_seed(seed)
    a, b = (torch.randn(SIZE, SIZE, device="cuda", generator=generator) for _ in range(2))
    out = torch.empty_like(a)
    grid = (SIZE // block) ** 2
    taken = run(code, [out, a, b, SIZE], grid=grid, block=block**2, before=lambda: out.fill_(float("nan")))
    check = close(out, a.double() @ b.double(), 1e-5, "max relative error")
    return Outcome(check=check, metrics={"time": taken.time(l2="warm", flops=2.0 * SIZE**3)})


def probes(quick: bool = False) -> list[Probe]:
    """Both ways of copying, by size of the blocks."""
    found = []
    for block in BLOCKS[1:2] if quick else BLOCKS:
        for engine in ENGINES:
            case: Case = {"engine": engine, "block": block, "size": SIZE}
            found.append(Probe(case=case, kernels=kernels(engine, block), measure=partial(product, engine, block)))
    return found
