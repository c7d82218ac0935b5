"""Compiles kernels of the package for an H100 that is not there and prints what came out, a list in JSON for each set.

python compile_kernels.py chunked bf16-128-128,fp16-64-128-packed     forward and backward, gates, weights, K-V
python compile_kernels.py chunked bf16-128-64-walks                   the same, and gradients by walks
python compile_kernels.py walks fp16-128-64                           what Mamba-2 and retention take in Gluon alone
python compile_kernels.py delta bf16-128-128,fp16-64-128              the delta rule, forward and backward
python compile_kernels.py gla bf16-128-128                            gates per key dimension, forward and backward
python compile_kernels.py maps bf16-64                               Based, Hedgehog's map, what joins a window
python compile_kernels.py conv bf16-4096                              short causal convolutions
python compile_kernels.py ladder bf16-4096                            the levels of a product, and attention of tiles
python compile_kernels.py longconv bf16-2048,fp32-16384              convolutions by Fourier transforms
python compile_kernels.py rows bf16-4096,fp32-65536                   norms, softmax, losses, rotary, gated activations
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch

from gpu_accel.flash_attention3.launch import instead_of_launching
from gpu_accel.testing.compile_only import Compiled, compile_only

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
compiled: list[tuple[str, Compiled]] = []  # read last, so that all of it is disassembled at once
label = ""
small: set[tuple] = set()


def hook(kernel, arguments, options) -> None:
    name = kernel.fn.__name__
    if name in ("_gates_kernel", "_gate_sums_kernel"):
        if (name, options.get("HAS_RATES")) in small:
            return  # the same for all
        small.add((name, options.get("HAS_RATES")))
    compiled.append((label, compile_only(kernel, arguments, options, name=name, capability=90)))


def row(label: str, c: Compiled) -> dict:
    return dict(
        name=label, kernel=c.name, registers=c.registers, spills=c.spills, shared=c.shared, warps=c.num_warps,
        hgmma=c.sass.count("HGMMA"), mma=c.instructions["HMMA"], tma=c.sass.count("UTMALDG"),
        wide=c.sass.count(".128"),
        faults=c.faults,
    )  # fmt: skip


def chunked(dtype: torch.dtype, key_dim: int, value_dim: int, packed: bool, walks: bool) -> None:
    from gpu_accel.thunderkittens import chunked as ops

    q = torch.empty(1, 4096, 16, key_dim, dtype=dtype)
    v = torch.empty(1, 4096, 16, value_dim, dtype=dtype)
    g = torch.empty(1, 4096, 16)
    cu = torch.tensor([0, 1000, 4096], dtype=torch.int32) if packed else None
    state = torch.empty(2 if packed else 1, 16, key_dim, value_dim)
    tail = (cu, 0.1, 64, 2)
    ops.chunked._init_fn(q, q, v, g, g, state, *tail, "chunks")
    if ops.fused_refusal(key_dim, dtype) is None:
        ops.chunked._init_fn(q, q, v, g, g, state, *tail, "walk")
    if dtype == torch.bfloat16 and not packed:
        ops.chunked._init_fn(q, q, v, g, g, state, *tail, "hopper")
    ops.chunked_backward._init_fn(v, state, q, q, v, g, g, state, *tail, True, "chunks")
    if walks:
        from gpu_accel.thunderkittens import walk_back

        one = q[:, :, :1].contiguous()
        mamba(dtype, key_dim, value_dim)
        retention(dtype, key_dim, value_dim)
        with mock.patch.object(walk_back, "IN_TURNS", not walk_back.IN_TURNS):
            walk_back.gradients(v, None, one, one, v, g, g, None, None, None, scale=0.1, segments=1)


def mamba(dtype: torch.dtype, key_dim: int, value_dim: int) -> None:
    """Mamba-2 by walks; 13 heads for 4 programs: dealt."""
    from gpu_accel.thunderkittens import walk_back, walk_hopper

    one, few = torch.empty(1, 4096, 1, key_dim, dtype=dtype), torch.empty(1, 4096, 13, value_dim, dtype=dtype)
    dt, rates = torch.empty(1, 4096, 13), (torch.empty(13), 0.0, 1.0)
    walk_hopper.walk(one, one, few, dt, dt, None, None, None, scale=1.0, segments=1, rates=rates)
    walk_back.gradients(few, None, one, one, few, dt, dt, None, None, None, scale=1.0, segments=1, rates=rates)


def retention(dtype: torch.dtype, key_dim: int, value_dim: int) -> None:
    """One gate a head, in segments, forwards."""
    from gpu_accel.thunderkittens import walk_hopper

    q, v = torch.empty(1, 4096, 16, key_dim, dtype=dtype), torch.empty(1, 4096, 16, value_dim, dtype=dtype)
    decay = torch.empty(16)[None, None].expand(v.shape[:3])
    local, decays, _ = walk_hopper.segment_sums(q, v, decay, None, segments=2)
    state = torch.empty(1, 16, key_dim, value_dim)
    walk_hopper.walk(q, q, v, decay, None, state, local, decays, scale=0.1, segments=2)


def delta(dtype: torch.dtype, key_dim: int, value_dim: int, packed: bool) -> None:
    from gpu_accel.thunderkittens import delta as ops

    q, v = torch.empty(1, 4096, 16, key_dim, dtype=dtype), torch.empty(1, 4096, 16, value_dim, dtype=dtype)
    g = torch.empty(1, 4096, 16)
    cu = torch.tensor([0, 1000, 4096], dtype=torch.int32) if packed else None
    state = torch.empty(2 if packed else 1, 16, key_dim, value_dim)
    ops.delta_op._init_fn(q, q, v, g, g, state, cu, 0.1, 64)
    ops.delta_backward_op._init_fn(v, state, q, q, v, g, g, state, cu, 0.1, 64)
    if dtype == torch.bfloat16 and not packed:
        from gpu_accel.thunderkittens import delta_hopper

        delta_hopper.forward(q, q, v, g, g, state, 0.1)
        short = q[..., :64].contiguous()
        delta_hopper.forward(short, short, v, None, g, None, 0.1)
        delta_hopper.solve(None, q, v, g, g, 0.1, keep=True)
        states, line = torch.empty(64, 16, key_dim, value_dim, dtype=dtype), torch.empty(4096 * 16)
        with mock.patch.object(delta_hopper, "sms", lambda _: 0):
            delta_hopper.forward(q, q, v, g, g, state, 0.1)
            delta_hopper.walk_back(q, q, v, q, line, q[..., :64], None, v, states, states, state, 0.1)
        for one, low in ((q, states), (q[:, :, :8], None)):
            delta_hopper.walk_back(one, one, v, q, line, q[..., :64], None, v, states, low, state, 0.1)
            delta_hopper.gradients(one, one, v, v, v, v, q[..., :64], (states, low), (states, low), line, line, 0.1)


def gla(dtype: torch.dtype, key_dim: int, value_dim: int, packed: bool) -> None:
    from gpu_accel.thunderkittens import gla as ops

    q, v = torch.empty(1, 4096, 16, key_dim, dtype=dtype), torch.empty(1, 4096, 16, value_dim, dtype=dtype)
    g, state = torch.empty(1, 4096, 16, key_dim), torch.empty(2 if packed else 1, 16, key_dim, value_dim)
    cu = torch.tensor([0, 1000, 4096], dtype=torch.int32) if packed else None
    ops.gla_op._init_fn(q, q, v, g, state, cu, 0.1, 64)
    ops.gla_backward_op._init_fn(v, state, q, q, v, g, state, cu, 0.1, 64)
    if dtype == torch.bfloat16 and not packed:
        from gpu_accel.thunderkittens import gla_hopper

        gla_hopper.forward(q, q, v, g, state, scale=0.1, segments=2)
        short, half = q[..., :64].contiguous(), g[..., :64].bfloat16()
        gla_hopper.forward(short, short, v, half, None, scale=0.1, segments=1)


def maps(dtype: torch.dtype, value_dim: int) -> None:
    from gpu_accel.thunderkittens import based_hopper, features, hedgehog_fused, hedgehog_hopper, windowed

    q, v = torch.empty(1, 4096, 16, 16, dtype=dtype), torch.empty(1, 4096, 16, value_dim, dtype=dtype)
    based_hopper.walk(q, q, v, 0.25, False)
    wide = torch.empty(1, 4096, 16, 128, dtype=dtype)
    features.hedgehog_op._init_fn(wide, torch.empty(16, 128, 64, dtype=dtype))
    windowed.maximum_op._init_fn(wide, wide, torch.empty(4096, dtype=torch.int32), 0.1)
    mapping = torch.empty(16, 128, 64, dtype=dtype)
    short = wide[:, :100]
    hedgehog_fused.window_op._init_fn(short, short, short, mapping, mapping, None, None, 128, 0.1, True)
    hedgehog_hopper.attend(wide, wide, wide, mapping, mapping, None, None, 0.1, 1e-6)
    a = torch.empty(1, 4096, 16)
    windowed.mix_op._init_fn(wide, wide[:, 100:], a, a)
    windowed.mix_backward_op._init_fn(wide, wide, wide[:, 100:], a, a)


def conv(dtype: torch.dtype, dim: int) -> None:
    from gpu_accel.thunderkittens import causal_conv1d as ops

    w, b, seq = torch.empty(dim, 4, dtype=dtype), torch.empty(dim, dtype=dtype), torch.zeros(2, 999, dtype=torch.int32)
    rows, h = torch.zeros(2, dtype=torch.int32), torch.empty(2, dim, 3, dtype=dtype)
    for x in (torch.empty(2, dim, 999, dtype=dtype), torch.empty(2, 999, dim, dtype=dtype).transpose(1, 2)):
        for options in ((w, b, h, None, True), (w, None, None, seq, False)):
            ops.conv_op._init_fn(x, *options)
            ops.conv_backward_op._init_fn(x, x, *options)
    ops.conv_op._init_fn(x, w, b, None, None, True)
    ops.conv_backward_op._init_fn(x, x, w, b, None, None, True)
    for lengths, indices in ((None, None), (rows, rows)):
        ops.update_op._init_fn(x[..., :1], h, w, b, lengths, indices, True)


def ladder(dtype: torch.dtype, size: int) -> None:
    from gpu_accel.thunderkittens import ladder as levels
    from gpu_accel.thunderkittens import template
    from tests.thunderkittens import test_tiles

    a = torch.empty(size, size, dtype=dtype)
    for level in levels.LEVELS:
        if level.interpreted:  # the last one is compiled with the products
            level.run(a, a)
    template.product(a, a)
    hook(test_tiles._attention, (a, a, a, a, size, size, 0.1), dict(D=128, BM=64, BN=64, num_warps=4))
    for which in ("AB", "ABt", "AtB", "AtBt"):
        hook(test_tiles._products, (a, a, a), dict(WHICH=which, num_warps=4))


def longconv(dtype: torch.dtype, size: int) -> None:
    from gpu_accel.thunderkittens import long_conv as ops

    u = torch.empty(4, 8, size // 2, dtype=dtype)
    spectrum = ops.filter_spectrum(torch.zeros(8, 4), size, ops._tall(dtype))
    ops.fft_conv_op._init_fn(u, spectrum, None, None, False)
    ops.fft_conv_op._init_fn(u, spectrum, u, u, True)


def rows_of(dtype: torch.dtype, width: int) -> None:
    """Norms with all that they can do, and with nothing; softmax, losses, rotary, gated activations."""
    from gpu_accel.thunderkittens import elements as e
    from gpu_accel.thunderkittens import long_rows, losses, row_ring
    from gpu_accel.thunderkittens import rows as r

    x, w = torch.empty(64, width, dtype=dtype), torch.empty(width, dtype=dtype)
    stats, y = torch.empty(64), torch.zeros(64, dtype=torch.int64)
    losses.cross_entropy_op._init_fn(x, y, -100, 0.1, 0.1, 30.0)
    losses.cross_entropy_backward_op._init_fn(stats, x, y, torch.empty(64, 2), -100, 0.1, 0.1, 30.0)
    r.norm_op._init_fn(x, x, w, w, 1e-5, True, 0.1, 1, True, r.WHOLE)
    r.norm_op._init_fn(x, None, w, None, 1e-5, False, 0.0, 0, False, r.WHOLE)
    r.norm_backward_op._init_fn(x, x, x, w, stats, stats, dtype, dtype, dtype, True, 0.1, 2**40, r.WHOLE)
    r.norm_backward_op._init_fn(x, None, x, w, stats[:0], stats, dtype, None, None, False, 0.0, 0, r.WHOLE)
    r.softmax_op._init_fn(x, r.WHOLE)
    r.softmax_backward_op._init_fn(x, x, r.WHOLE)
    for kind in ("silu", "gelu", "gelu_tanh"):
        e.gated_op._init_fn(x, x, kind)
        e.gated_backward_op._init_fn(x, x, x, kind)
    if dtype == torch.bfloat16:
        wide, scale = torch.empty(64, 65536, dtype=dtype), torch.empty(65536, dtype=dtype)
        long_rows.run(wide, wide, "softmax")
        long_rows.run(wide[:, :40000].contiguous(), wide, "layer", scale, scale, stats, stats, 1e-5)
        row_ring.forward(wide, wide, "softmax", row_ring.CHOSEN["forward", "softmax", 65536])
        row_ring.forward(wide, wide, "layer", row_ring.CHOSEN["forward", "layer", 65536], scale, scale, None, None,
                         stats, stats)  # fmt: skip
        for ring, h in ((row_ring.CHOSEN["backward", "layer", 65536], wide),
                        (row_ring.CHOSEN["backward", "layer", 16384], wide[:, :16384].contiguous()),
                        (row_ring.CHOSEN["backward", "layer", 1024], wide[:, :1024].contiguous())):  # fmt: skip
            sums = torch.empty(row_ring.programs_of_rows(64, ring, h.device), h.shape[1])
            row_ring.backward(h, h, h, "layer", ring, scale[: h.shape[1]], stats, stats, None, None, sums, sums)
    heads, table = torch.empty(2, 1, 8, 128, dtype=dtype), torch.empty(4096, 64)
    for backward in (False, True):
        e.rotary_op._init_fn(heads, table, table, None, 0, backward, backward)


if __name__ == "__main__":
    sets = []
    with instead_of_launching(hook):
        for which, names in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
            for label in names.split(","):
                kind, *sizes = label.split("-")
                if which == "rows":
                    rows_of(DTYPES[kind], int(sizes[0]))
                elif which in ("conv", "ladder", "longconv", "maps"):
                    dict(conv=conv, ladder=ladder, longconv=longconv, maps=maps)[which](DTYPES[kind], int(sizes[0]))
                else:
                    given = (DTYPES[kind], int(sizes[0]), int(sizes[1]), "packed" in sizes)
                    one = dict(delta=delta, gla=gla).get(which)
                    if which == "walks":
                        mamba(*given[:3])
                        retention(*given[:3])
                    else:
                        one(*given) if one else chunked(*given, "walks" in sizes)
            sets.append(compiled.copy())
            compiled.clear()
            small.clear()
    for one in sets:
        print(json.dumps([row(*kernel) for kernel in one]))
