"""Microbenchmarks of a Hopper GPU: small CUDA kernels, compiled at run time, each with its machine code checked.

    latency.py    bandwidth.py    every level of memory, and atomics
    alu.py        dpx.py          instructions: latency and throughput
    tensor.py     fp8_sums.py     wgmma and mma.sync; how exactly products of 8-bit floats are added
    tma.py        dsm.py          asynchronous copies; shared memory of other blocks
    cores.py                      how an SM core issues instructions

Each offers `probes()`; `workload.experiment` makes an experiment of them. Below that are probe.py (a kernel, its
promise about SASS, a checked measurement), compile.py (NVRTC, nvdisasm), sass.py (reading machine code) and launch.py.

Importing this imports neither torch nor CUDA's bindings; those are the extra `microbenchmarks`.
"""
