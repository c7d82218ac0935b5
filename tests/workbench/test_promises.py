"""Papers that break their promises: failures stay alone, and what was timed is what was checked."""

from __future__ import annotations

import pytest

from gpu_accel.errors import IncorrectResultError
from gpu_accel.testing.fake_runs import BAD, GOOD, THREE, a_paper, cpu, gpu, implementation, of, peer, raises
from gpu_accel.workbench.experiment import Check, Settings, SimpleExperiment, Timed
from gpu_accel.workbench.records import read_records
from gpu_accel.workbench.runner import run

EXITS = raises(SystemExit(0))
FOREIGN = [None, (1e-3, 2e-3, "m"), True, Check("a", 1.0, "m"), Check(0.0, None, "m"), Check(0.0, 1.0, 3)]


@pytest.mark.parametrize("role", ["ours", "peer"])
@pytest.mark.parametrize(
    "bad",
    [{"check": EXITS}, {"make": EXITS}, {"values": EXITS}, {"make": lambda seed: lambda: EXITS(seed)}]
    + [{"check": lambda seed, found=found: found} for found in FOREIGN]
    + [{"values": lambda seed, found=found: found} for found in (None, [], 1.0, {"m": 1.0}, {"m": ("a", "1")}, {1: 2})]
    + [{"make": lambda seed: None}],
)
def test_what_breaks_its_promises_fails_alone(role: str, bad: dict):
    host = gpu()
    build = lambda case: [implementation(host, "x", **({"role": role} | bad)), peer(host)]  # noqa: E731
    result = run(a_paper(build, THREE), host=host)
    assert [r.impl for r in result.records if r.metric == "time"] == ["peer"] * 3
    assert [o.impl for o in (result.incorrect if role == "ours" else result.skipped)] == ["x"] * 3
    assert result.exit_code == (3 if role == "ours" else 0)


def test_exit_while_cases_are_listed_or_built_is_no_success():
    with pytest.raises(RuntimeError, match=r"SystemExit\(0\)"):
        run(a_paper(EXITS), host=cpu())
    paper = a_paper(lambda case: [])
    paper.experiment = lambda name: SimpleExperiment(name=name, title="", list_cases=EXITS, build_case=EXITS)
    with pytest.raises(RuntimeError, match=r"SystemExit\(0\)"):
        run(paper, host=cpu())


def test_record_that_cannot_be_written_loses_no_other(tmp_path):
    host, output = gpu(), tmp_path / "r.jsonl"
    values = lambda seed: {"rmse": (float("nan"), "1"), "max_abs": (0.5, "1")}  # noqa: E731
    build = lambda case: [implementation(host, values=values), implementation(host, "odd", note={1}), peer(host)]  # noqa: E731
    result = run(a_paper(build), settings=Settings(output=str(output)), host=host)
    found = [(r.impl, r.metric) for r in read_records(output)]
    assert found == [("portable", "time"), ("portable", "max_abs"), ("peer", "time")]
    assert sorted(o.impl for o in result.incorrect) == ["odd", "portable"] and result.exit_code == 3


@pytest.mark.parametrize("role", ["ours", "peer"])
@pytest.mark.parametrize(
    ("verify", "where"),
    [
        (lambda: BAD, "incorrect"),
        (raises(IncorrectResultError("changed its input")), "incorrect"),
        (lambda: None, "incorrect or skipped"),
        (lambda: GOOD, ""),
    ],
)
def test_time_whose_call_fails_its_verification_is_not_recorded(role: str, verify, where: str):
    host = gpu()
    verify = verify if verify.__name__ == "<lambda>" else lambda: raises(IncorrectResultError("changed its input"))(0)
    make = lambda seed: Timed(lambda: host.timer.work(1.0, ("timed", seed)), verify)  # noqa: E731
    build = lambda case: [implementation(host, "x", role=role, make=make), implementation(host), peer(host)]  # noqa: E731
    result = run(a_paper(build), host=host)
    assert ("x" in of(result)) == (not where) and {"portable", "peer"} <= of(result).keys()
    assert all("x" not in record.ratio_to for record in result.records)
    failed = [o.impl for o in result.incorrect] + [o.impl for o in result.skipped if "skipped" in where]
    assert failed == (["x"] if where else [])


def test_only_real_lack_of_memory_excuses_a_failure():
    for error, excused in [
        (RuntimeError("the kernel ran out of memory bounds"), False),
        (ValueError("CUDA out of memory"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError("x"), True),
    ]:
        host = gpu()
        for bad in ({"check": raises(error)}, {"make": lambda seed, e=error: lambda: raises(e)(0)}):
            result = run(a_paper(lambda case, h=host, b=bad: [implementation(h, **b)]), host=host)
            assert bool(result.skipped) == excused and bool(result.incorrect) != excused, (error, bad)


def timed_attention(experiment: str, name: str, **shape):
    """A contender of the paper's own experiments and what it gives to be timed, on this CPU."""
    from gpu_accel.workbench import registry

    precision = shape.pop("precision", "bf16")
    case = {"batch": 1, "seqlen": 64, "heads": 1, "head_dim": 64, "causal": True} | shape
    settings = Settings(device="cpu", precision=precision, shapes=(case,))
    found = registry.paper("fa3").experiment(experiment)
    workload = found.build(found.cases(settings)[0], settings)
    return next(impl for impl in workload.implementations if impl.name == name).make(3)


@pytest.mark.parametrize(
    ("experiment", "name", "precision"),
    [
        ("forward", "sdpa-math", "bf16"),
        ("backward", "sdpa-math", "bf16"),
        ("forward", "portable", "fp8"),
        ("forward", "portable+quantize", "fp8"),
    ],
)
def test_attention_as_timed_is_verified_on_its_own_inputs(experiment: str, name: str, precision: str):
    torch = pytest.importorskip("torch")
    if precision == "fp8" and torch.cuda.is_available():
        pytest.skip("Triton interprets here only where there is no GPU")
    timed = timed_attention(experiment, name, precision=precision, seqlen=67)
    timed()
    assert timed.verify().ok


@pytest.mark.parametrize("fault", ["remembers", "overwrites"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_that_is_right_once_only_is_not_verified(direction: str, fault: str):
    torch = pytest.importorskip("torch")
    from papers.flash_attention3 import attention
    from papers.flash_attention3.judging import Judge
    from papers.flash_attention3.peers import Contender

    kept: list = []

    class Remembering(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / q.shape[-1] ** 0.5
            ctx.p = scores.softmax(-1)
            o = torch.einsum("bhqk,bkhd->bqhd", ctx.p, v.double()).to(q.dtype)
            if fault == "remembers" and direction == "forward":
                kept.append(o)
                return kept[0]
            if direction == "forward":
                k.zero_()
            return o

        @staticmethod
        def backward(ctx, do):
            q, k, v = (t.double() for t in ctx.saved_tensors)
            p, g = ctx.p, do.double()
            dp = torch.einsum("bqhd,bkhd->bhqk", g, v)
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
            found = [torch.einsum("bhqk,bkhd->bqhd", ds, k), torch.einsum("bhqk,bqhd->bkhd", ds, q)]
            found = [t.to(do.dtype) for t in (*found, torch.einsum("bhqk,bqhd->bkhd", p, g))]
            kept.append(found)
            if fault == "overwrites":
                do.zero_()
                return tuple(found)
            return tuple(kept[0])

    case = {"pass": direction, "batch": 1, "seqlen_q": 33, "seqlen_k": 33, "heads": 1, "heads_kv": 1, "head_dim": 64}
    case |= {"causal": False, "dtype": "bf16", "input": "normal"}
    contender = Contender(name="c", role="peer", layout="bshd", attend=Remembering.apply)
    judge = Judge(case, "cpu")
    make = attention.forward_implementation if direction == "forward" else attention._backward_implementation
    impl = make(contender, judge)
    assert impl.check(3).ok, "the check alone sees nothing"
    kept.clear()
    timed = impl.make(3)
    timed()
    if fault == "overwrites":
        with pytest.raises(IncorrectResultError, match="changed its input"):
            timed.verify()
    else:
        assert not timed.verify().ok
