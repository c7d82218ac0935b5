"""What can be run about ring attention; `gpu-accel run ring` and the notebook find the experiments here.

error        error.py         any machine, one process: N ranks are simulated
predict      predict.py       arithmetic: the cost model against readings
scaling, overlap, memory, schedules     distributed.py, one process a GPU: gpu-accel run ring scaling --nproc 4
links        links.py         one process a GPU: what a hop takes by itself
replay       replay.py        one rank of any number of them, on one device
"""

from __future__ import annotations

from functools import partial

from gpu_accel.workbench.experiment import Experiment, SimpleExperiment

from . import distributed, error, links, predict, replay

_ALL = (
    SimpleExperiment(
        name="error",
        title="Error against float64 as ranks are added, simulated in one process",
        list_cases=error.list_cases,
        build_case=error.build,
    ),
    SimpleExperiment(
        name="predict",
        title="The cost model against published and earlier readings",
        list_cases=predict.list_cases,
        build_case=predict.build,
    ),
    SimpleExperiment(
        name="scaling",
        title="Weak and strong scaling on the GPUs of one machine, next to torch's context parallel",
        list_cases=distributed.scaling_cases,
        build_case=partial(distributed.build, names=distributed.scaling_names),
    ),
    SimpleExperiment(
        name="overlap",
        title="What a step spends on computing and on waiting",
        list_cases=distributed.overlap_cases,
        build_case=partial(distributed.build, names=distributed.OVERLAP),
    ),
    SimpleExperiment(
        name="memory",
        title="Peak memory beyond the shards, per GPU",
        list_cases=distributed.memory_cases,
        build_case=partial(distributed.build, names=distributed.memory_names, memory=True),
    ),
    SimpleExperiment(
        name="schedules",
        title="All schedules on one shape",
        list_cases=distributed.schedule_cases,
        build_case=partial(distributed.build, names=distributed.SCHEDULES),
    ),
    SimpleExperiment(
        name="replay",
        title="One rank of 1 to 512 on one GPU, without a network",
        list_cases=replay.list_cases,
        build_case=replay.build,
    ),
    SimpleExperiment(
        name="links",
        title="A hop of the ring by itself: copy engine and NCCL",
        list_cases=links.list_cases,
        build_case=links.build,
    ),
)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in _ALL}
