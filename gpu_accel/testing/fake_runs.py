"""Runs of made-up experiments for tests of the runner: a host with a fake clock, implementations, a paper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gpu_accel.testing.fake_timer import FakeTimer
from gpu_accel.workbench.experiment import Check, Implementation, SimpleExperiment, Workload
from gpu_accel.workbench.host import Host

GOOD = Check(1e-3, 2e-3, "max_abs")
BAD = Check(5e-3, 2e-3, "max_abs")
THREE = [{"n": n, "dtype": "bf16"} for n in (1, 2, 3)]


class FakeHost(Host):
    """Memory that is counted by hand: `made` allocations of `each` bytes."""

    total, each, made, released = 1000, 10, 0, 0

    def free_bytes(self) -> int:
        return self.total

    def allocated_bytes(self) -> int:
        return self.made * self.each

    def release(self) -> None:
        self.released += 1


def gpu(**env) -> FakeHost:
    env = {"gpu": "Test GPU 1"} | env
    return FakeHost(device="cuda", env=env, commit="abc", timer=FakeTimer())


def cpu() -> FakeHost:
    return FakeHost(device="cpu", env={"gpu": None, "cpu": "test"}, commit="abc")


def raises(error: BaseException):
    def function(seed: int):
        raise error

    return function


def implementation(host: FakeHost, name: str = "portable", ms: float = 1.0, check=GOOD, **more) -> Implementation:
    def make(seed: int):
        host.made += 1
        timer: Any = host.timer
        return lambda: timer.work(ms, (name, seed))

    function = check if callable(check) else lambda seed: check
    fields: dict[str, Any] = {"name": name, "role": "ours", "make": make, "check": function} | more
    return Implementation(**fields)


def peer(host: FakeHost, name: str = "peer", ms: float = 2.0, **more) -> Implementation:
    return implementation(host, name, ms, **{"role": "peer"} | more)


def a_paper(build, cases=({"n": 1, "dtype": "bf16"},), name: str = "forward"):
    """A paper with one experiment; `build(case)` gives implementations or a workload."""

    def build_case(case, settings) -> Workload:
        made = build(case)
        if isinstance(made, Workload):
            return made
        baselines = ("peer",) if "peer" in [impl.name for impl in made] else ()
        return Workload(implementations=made, baselines=baselines, flops=1e9)

    experiment = SimpleExperiment(name=name, title="F", list_cases=lambda settings: list(cases), build_case=build_case)
    return SimpleNamespace(
        id="made_up",
        inputs=("normal",),
        experiments={name: SimpleNamespace(precisions=("bf16",))},
        default_experiments=lambda precision: (name,),
        experiment=lambda wanted: experiment,
    )


def of(result, metric: str = "time") -> dict:
    return {record.impl: record for record in result.records if record.metric == metric}
