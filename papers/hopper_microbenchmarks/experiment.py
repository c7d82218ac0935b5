"""What can be run about Hopper; `gpu-accel run hopper` and the notebook find the experiments here.

Every benchmark is a small CUDA kernel of gpu_accel.hardware.microbenchmarks, compiled by NVRTC when it is needed; its
disassembly must hold the instruction it claims to measure, and its result must be right, before a number counts.
Times are SM clock cycles, so that cards of different clocks compare. The implementation is "kernel" unless said.

    experiment         keys of a case                                   metrics [unit]
    latency            level, load, footprint_kb                        latency [clk]
    bandwidth          level, op, width, footprint_kb                   bandwidth [B/clk/SM], bandwidth_chip [B/clk],
                                                                        time [ms] (gbps follows); atomics instead:
                                                                        throughput [instr/clk/SM]
    instructions       instruction                                      latency [clk], throughput [instr/clk/SM]
    tensor-cores       instruction, n, k, dtype, accumulator, a,        latency [clk], completion [clk], throughput
                       sparse, data                                     [flop/clk/SM], time [ms] (tflops follows)
    fp8-accumulation   k, dtype, data                                   max_rel_error [1]; accumulator_bits and
                                                                        product_bits [bits];
                                                                        "wgmma", "wgmma-promoted", peers "torch-fast",
                                                                        "torch-precise"
    tma                engine, box, bytes, source, ctas, in_flight      latency [clk] (ctas = 1), or bandwidth
                                                                        [B/clk/SM] and time [ms]
    async-copies       engine, block, size                              time [ms] (tflops follows)
    dsm                pattern, cluster                                 latency [clk], or bandwidth [B/clk/SM]
    dpx                function                                         latency [clk], throughput [instr/clk/SM];
                                                                        "dpx" and "software"
    cores              probe, variant, size                             latency [clk], throughput [instr/clk/SM] or
                                                                        wrong_fraction [1]; papers/gpu_cores borrows it

Values of the keys:

    level         l1, shared, l2, dram: the level that serves the loads; l2-near and l2-far: hits by the half of the
                  cache that is the line's home, l2-near-miss and l2-far-miss: what neither has; l2-same (bandwidth):
                  all blocks read one buffer; curve: growing footprints
    load          ld.global.ca.u64, ld.global.ca.u32+index (with address arithmetic), ld.global.cg.u64, ld.shared.u32,
                  ld.u64 (generic, to shared), atom.global.add.u64, atom.shared.add.u32
    op            read, write, copy, atomic-add (one word a thread), atomic-add-same (one word for all)
    width         bytes of one access: 4 or 16
    instruction   (instructions) as in alu_steps.py, named after SASS; a name with "+" is a chain of two
    instruction   (tensor-cores) wgmma, whose m is 64, or mma.sync, whose m is 16; k counts elements, also sparse ones
    dtype         bf16, fp16, tf32, e4m3, e5m2, int8
    accumulator   f32, f16, s32
    a             shared (SS) or registers (RS; mma.sync always)
    data          zeros or random
    k, data       (fp8-accumulation) the length of the sums; uniform (0 to 1), normal, or powers (the test of bits)
    engine        tma (tensor map), bulk (cp.async.bulk), cp.async, load (ld.global and st.shared, to compare), ldg
                  (ld.global until its value may be read)
    box           such as "64x64" (elements of 4 bytes, innermost first); "1-D" where there is no tensor map
    source        l2 or dram: where the data lie
    engine, block (async-copies) load or cp.async; threads along a side of a block, which is that of its tiles
    in_flight     boxes that a block has asked for at a time: 1 as in 2402.13499, or 4
    pattern       own, remote, and l2 to compare (latency); own-bandwidth, ring, pair, broadcast (bandwidth)
    probe         raw-latency (variant: an instruction, LDS, LDG, ATOMS), issue-rate (variant: one-sub-core or
                  four-sub-cores; size: active warps), bank-conflict (variant: no-conflict, same-bank or
                  same-bank-reuse), stall-count (size: the count), memory-burst (variant: LDS, of one warp, or
                  LDS-four-sub-cores, of four; size: loads of each), instruction-cache (size: KB of code)

The `time` of tensor-cores is what power and heat allow at that moment: the clock falls under load and comes back, so
between two runs it moved by up to 16 % for one instruction while its cycles moved by less than 1 %. Rates of the units
are in `throughput`; rates that a card keeps up are in `time`, and no better known than that.
"""

from __future__ import annotations

from gpu_accel.hardware.microbenchmarks import (
    alu,
    async_product,
    bandwidth,
    cores,
    dpx,
    dsm,
    fp8_sums,
    latency,
    tensor,
    tma,
)
from gpu_accel.hardware.microbenchmarks.workload import experiment
from gpu_accel.workbench.experiment import Experiment

from . import ceilings, energy

_ALL = (
    experiment("latency", "Latency of every level of memory, and the curve over footprints", latency.probes),
    experiment("bandwidth", "Bandwidth of every level of memory, and atomics", bandwidth.probes),
    experiment("instructions", "Latency and throughput of arithmetic and conversions", alu.probes),
    experiment(
        "tensor-cores",
        "Latency and throughput of wgmma and mma.sync, dense and sparse, zeros and random numbers",
        tensor.probes,
    ),
    experiment("fp8-accumulation", "How many bits sums of FP8 products keep, and what that costs", fp8_sums.probes),
    experiment("tma", "Latency and throughput of TMA, bulk and asynchronous copies", tma.probes),
    experiment("async-copies", "A product whose tiles arrive by cp.async or by load and store", async_product.probes),
    experiment("dsm", "Latency and throughput of distributed shared memory by cluster size", dsm.probes),
    experiment("dpx", "DPX instructions against the same in plain operations", dpx.probes),
    experiment(
        "cores",
        "What an SM does with its instructions: issue, dependences, register banks, instruction cache",
        cores.probes,
    ),
    ceilings.EXPERIMENT,
    energy.EXPERIMENT,
)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in _ALL}
