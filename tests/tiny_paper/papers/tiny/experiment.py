"""One experiment: our kernel and torch's, both checked against float64."""

from __future__ import annotations

from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, SimpleExperiment, Workload

SCALE = 1.5


def cases(settings: Settings) -> list[Case]:
    sizes = (257, 4096) if settings.on_gpu else (257,)
    return [{"n": n, "dtype": "fp32", "input": settings.input} for n in sizes]


def build(case: Case, settings: Settings) -> Workload:
    import torch
    from tiny_axpy import axpy, reference

    def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(case["n"], generator=generator).to(settings.device) for _ in range(2))

    def ours(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return axpy(SCALE, x, y, out=torch.full_like(x, float("nan")))

    def theirs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.add(y, x, alpha=SCALE)

    def error(function, seed: int) -> float:
        x, y = inputs(seed)
        return (function(x, y).double() - reference(SCALE, x, y)).abs().max().item()

    def competitor(name: str, role: str, function) -> Implementation:
        def make(seed: int):
            x, y = inputs(seed)
            return lambda: function(x, y)

        return Implementation(
            name=name,
            role=role,
            make=make,
            check=lambda seed: Check(error(function, seed), 1e-6, "max_abs"),
            values=lambda seed: {"max_error": (error(function, seed), "1")},
        )

    return Workload(
        implementations=[competitor("portable", "ours", ours), competitor("torch", "peer", theirs)],
        baselines=("torch",),
        flops=2.0 * case["n"],
        bytes_moved=12.0 * case["n"],
    )


EXPERIMENTS = {"add": SimpleExperiment(name="add", title="a * x + y", list_cases=cases, build_case=build)}
