"""ThunderKittens' load-compute-finish template for Hopper (sm_90a) in Gluon, and a matrix product written with it.

A kernel allocates the stages of its ring, and gives `pipeline` four functions (arXiv 2410.20399, section 4):

    load(arguments, bufs, full, stage, row, col, step)   expects bytes on the barrier `full`, asks for a slice by TMA
    start(arguments, WG)                                 accumulator of a tile
    compute(acc, bufs, stage, WG)                        acc with one slice more, whose product may be on its way
    finish(acc, arguments, row, col, WG)                 writes a tile

`pipeline` has the rest: a warp that loads beside two warpgroups that compute, with registers moved from one to the
others; a ring of STAGES slices, each with a barrier for its arrival and one for its release; programs that stay and
take one tile after the other, down GROUP rows of tiles at a time. Slices of the next tile are on their way while a tile
is finished.

    consumer 0, 1 | k0 . k1 . k2 ... kn | finish | k0 . k1 ...
    producer      | load . load . load ........ (up to STAGES ahead, across tiles)

`gemm_kernel.py` is the same by hand, with what the template has no place for: results that leave under the first
product of the next tile, tiles shared by programs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, multiprocessors
from gpu_accel.gluon_compat import tma_load
from gpu_accel.thunderkittens.gemm_device import advance, pack, place, previous, store_direct, store_packed
from gpu_accel.thunderkittens.gemm_hopper import matrix_map

CONSUMERS = gl.constexpr(2)
_STAGES = 4
_BY_TMA = True  # results through shared memory and TMA: from registers they are 128 stores of two bytes a thread
_quick: list[QuickLaunch] = []


@gluon.jit
def _consumer(
    WG: gl.constexpr, arguments, bufs, bars, tiles_m, tiles_n, steps, STAGES: gl.constexpr, GROUP: gl.constexpr,
    START: gl.constexpr, COMPUTE: gl.constexpr, FINISH: gl.constexpr,
):  # fmt: skip
    full, empty = bars
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, col = place(tile, tiles_m, tiles_n, GROUP)
        acc = START(arguments, WG)
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            acc = COMPUTE(acc, bufs, stage, WG)
            if step > 0:  # the slice before has been read
                mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1)
            stage, phase = advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1)
        FINISH(acc, arguments, row, col, WG)
    tma.store_wait(0)  # what FINISH gave to TMA has been read


@gluon.jit
def _producer(
    arguments, bufs, bars, tiles_m, tiles_n, steps, STAGES: gl.constexpr, GROUP: gl.constexpr, LOAD: gl.constexpr
):
    full, empty = bars
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, col = place(tile, tiles_m, tiles_n, GROUP)
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            LOAD(arguments, bufs, full.index(stage), stage, row, col, step)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def pipeline(
    arguments, bufs, tiles_m, tiles_n, steps, STAGES: gl.constexpr, GROUP: gl.constexpr, LOAD: gl.constexpr,
    START: gl.constexpr, COMPUTE: gl.constexpr, FINISH: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr = 240,
    PRODUCER_REGISTERS: gl.constexpr = 24,
):  # fmt: skip
    """All tiles (tiles_m, tiles_n), each of one slice or more (`steps`). arguments: a tuple that the functions know.

    bufs: the ring's stages in shared memory, a tuple that the functions know too. LOAD, START, COMPUTE, FINISH: the
    functions of the head of this file. STAGES: slices in the ring; GROUP: rows of tiles that are walked together.
    CONSUMER_REGISTERS, PRODUCER_REGISTERS: of a thread, multiples of 8. Call it with 4 warps; it adds 5 of its own.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    bars = (full, empty)
    gl.warp_specialize([
        (_consumer, (0, arguments, bufs, bars, tiles_m, tiles_n, steps, STAGES, GROUP, START, COMPUTE, FINISH)),
        (_consumer, (1, arguments, bufs, bars, tiles_m, tiles_n, steps, STAGES, GROUP, START, COMPUTE, FINISH)),
        (_producer, (arguments, bufs, bars, tiles_m, tiles_n, steps, STAGES, GROUP, LOAD)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# ---- a product with it: out (M, N) = A (M, K) B (K, N), tiles of 128 x 256


@gluon.jit
def _load_slices(arguments, bufs, full, stage, row, col, step):
    a_desc, b_desc, out, M, N, out_desc, out_bufs = arguments
    a_bufs, b_bufs = bufs
    mbarrier.expect(full, 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    for i in gl.static_range(2):
        tma_load(a_desc, [row * 128 + i * 64, step * 64], full, a_bufs.index(stage * 2 + i))
    tma_load(b_desc, [step * 64, col * 256], full, b_bufs.index(stage))


@gluon.jit
def _zeros(arguments, WG: gl.constexpr):
    return gl.full([64, 256], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@gluon.jit
def _multiply(acc, bufs, stage, WG: gl.constexpr):
    a_bufs, b_bufs = bufs
    acc = warpgroup_mma(a_bufs.index(stage * 2 + WG), b_bufs.index(stage), acc, is_async=True)
    return warpgroup_mma_wait(1, deps=[acc])


@gluon.jit
def _write(acc, arguments, row, col, WG: gl.constexpr):
    a_desc, b_desc, out, M, N, out_desc, out_bufs = arguments
    store_direct(acc, out, row * 128 + WG * 64, col * 256, M, N, N)


@gluon.jit
def _write_by_tma(acc, arguments, row, col, WG: gl.constexpr):
    a_desc, b_desc, out, M, N, out_desc, out_bufs = arguments
    LAYOUT: gl.constexpr = acc.type.layout
    store_packed(pack(acc, out_desc.dtype), out_bufs, WG, out_desc, row * 128 + WG * 64, col * 256, LAYOUT, 2)


@gluon.jit(do_not_specialize=["M", "N", "tiles_m", "tiles_n", "steps"])
def product_kernel(
    a_desc, b_desc, out_desc, out, M, N, tiles_m, tiles_n, steps, STAGES: gl.constexpr, BY_TMA: gl.constexpr
):
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2] + a_desc.block_shape, a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    FINISH: gl.constexpr = _write_by_tma if BY_TMA else _write
    out_bufs = a_bufs
    if BY_TMA:  # a warpgroup's half of a tile leaves by halves
        out_bufs = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_shape, out_desc.layout)
    pipeline((a_desc, b_desc, out, M, N, out_desc, out_bufs), (a_bufs, b_bufs), tiles_m, tiles_n, steps, STAGES, 8,
             _load_slices, _zeros, _multiply, FINISH)  # fmt: skip


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) b (K, N) on a Hopper GPU: bfloat16 or float16, contiguous rows that start at multiples of 16 bytes.

    Raises InvalidInputError for shapes, dtypes or devices that do not fit; the level of `ladder.py` asks for the rest.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype or a.device != b.device:
        got = ", ".join(f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (a, b))
        raise InvalidInputError(f"a must be (M, K) and b (K, N) of one dtype on one device, got {got}")
    if a.dtype not in (torch.bfloat16, torch.float16):
        raise InvalidInputError(f"a and b must be bfloat16 or float16, got {a.dtype}")
    if not _quick:
        _quick.append(QuickLaunch(product_kernel))
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    if not out.numel() or not k:
        return out.zero_()
    by_tma = _BY_TMA and n * out.element_size() % 16 == 0
    a_map, b_map = matrix_map(a, 64, 64), matrix_map(b, 64, 256)
    out_map = matrix_map(out, 64, 128) if by_tma else a_map
    tiles_m, tiles_n = -(-m // 128), -(-n // 256)
    programs = min(multiprocessors(a.device) if a.is_cuda else 1, tiles_m * tiles_n)
    sizes = (m, n, tiles_m, tiles_n, -(-k // 64))
    constants = dict(STAGES=_STAGES, BY_TMA=by_tma)
    _quick[0]((a.dtype, by_tma), programs, (a_map, b_map, out_map, out, *sizes), constants, dict(num_warps=4))
    return out
