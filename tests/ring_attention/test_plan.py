"""The planner: bytes as sent, published formulas, known readings within its interval, and refusals."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.ring_attention import costs
from gpu_accel.ring_attention.cost_model import Setup, bytes_sent, least_block, peak_memory
from gpu_accel.ring_attention.layouts import make_layout
from gpu_accel.ring_attention.longest import longest
from gpu_accel.ring_attention.masks import Mask, work
from gpu_accel.ring_attention.plan import _time_text, plan, seed_table
from gpu_accel.ring_attention.simulate import simulate_attention
from gpu_accel.ring_attention.sizes import visible_pairs
from gpu_accel.ring_attention.transport import World


def small(**changes) -> Setup:
    settings = {"seq": 64, "heads": 4, "kv_heads": 2, "gpus": 4, "head_dim": 8, "link": "nvlink", **changes}
    return Setup(**settings)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("kv_ring", {}),
        ("q_ring", {}),
        ("allgather", {}),
        ("ulysses", {}),
        ("ulysses", {"gpus": 2}),
        ("usp", {}),
        ("mesh", {"heads": 2, "gpus": 16}),
        ("concentric", {"heads": 2, "gpus": 16}),
        ("double_ring", {"gpus": 8, "gpus_per_node": 4}),
    ],
    ids=lambda x: "-".join(f"{k}{v}" for k, v in x.items()) if isinstance(x, dict) else x,
)
def test_bytes_are_those_that_the_schedules_send(schedule: str, changes: dict, backward: bool):
    setup = small(backward=backward, **changes)
    shape = (1, setup.seq, setup.heads, setup.head_dim)
    q, do = (torch.randn(shape).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, setup.seq, setup.kv_heads, setup.head_dim).bfloat16() for _ in range(2))
    world = World(setup.gpus)
    options = {"inner": 4} if schedule == "double_ring" else {}
    simulate_attention(
        q, k, v, do=do if backward else None, ranks=setup.gpus, schedule=schedule, causal=True, world=world, **options
    )
    assert world.bytes_sent[0] == bytes_sent(schedule, setup)


@pytest.mark.parametrize(
    "question",
    [{"gpus": 8, "gpus_per_node": 4, "heads": 8, "kv_heads": 8},
     {"gpus": 8, "gpus_per_node": 4, "heads": 6, "kv_heads": 2},
     {"gpus": 6, "gpus_per_node": 3, "heads": 10, "kv_heads": 5},
     {"gpus": 9, "gpus_per_node": 8, "heads": 3, "kv_heads": 3},
     {"gpus": 5, "gpus_per_node": 2, "heads": 5, "kv_heads": 1}],
    ids=["8", "8-grouped", "6", "9", "5"],
)  # fmt: skip
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_is_planned_is_what_its_arguments_do(question: dict, backward: bool):
    """With them, and not by defaults, which know nothing of machines."""
    made = plan(seq=4 * question["gpus"], head_dim=8, backward=backward, **question)
    shapes = [(1, made.setup.seq, heads, 8) for heads in (made.setup.heads, made.setup.kv_heads)]
    q, do, k, v = (torch.randn(shapes[i]).half() for i in (0, 0, 1, 1))
    taken = [option for option in made.options if not option.refused]
    assert len(taken) >= 3 and f"schedule='{made.best.schedule}'" in made.explain()
    for option in taken:
        world = World(question["gpus"])
        simulate_attention(
            q, k, v, do=do if backward else None, ranks=question["gpus"], schedule=option.schedule,
            layout=made.layout, causal=True, world=world, **option.arguments,
        )  # fmt: skip
        assert max(world.bytes_sent) == option.sent, option.schedule


PADDED = [(1, 3), (7, 8), (33, 8), (1001, 3)]


@pytest.mark.parametrize("kind", ["causal", "full", "documents"])
@pytest.mark.parametrize(("seq", "gpus"), PADDED)
def test_padding_is_counted_as_the_layouts_make_it(seq: int, gpus: int, kind: str):
    """Lengths that do not divide, some with empty shards, which make rings shorter; and the work of every rank."""
    documents = (seq - seq // 3, seq // 3) if kind == "documents" else None
    causal, small = kind != "full", seq < 10
    question = {"heads": 8, "kv_heads": 2, "head_dim": 8, "gpus_per_node": 4, "causal": causal, "backward": small}
    made = plan(seq=seq, gpus=gpus, documents=documents or False, **question)
    layout = make_layout(made.layout, seqlen=seq, ranks=gpus, documents=documents)
    assert (made.setup.block, made.setup.padding) == (layout.local_length, gpus * layout.local_length - seq)
    runs, mask = [layout.runs(rank) for rank in range(gpus)], Mask(right=0 if causal else -1)
    pairs = tuple(sum(work(mine, theirs, mask) for theirs in runs) for mine in runs)
    assert visible_pairs(made.layout, made.setup.lengths, gpus, causal) == pairs
    assert made.setup.share() == pytest.approx(max(pairs) * gpus / sum(pairs)) and made.setup.share(gpus) == 1
    q, k = (torch.zeros(1, seq, heads, 8).half() for heads in (8, 2))
    for option in made.options:
        if option.refused or not small and option.schedule not in ("kv_ring", "usp"):
            continue
        world = World(gpus)
        simulate_attention(
            q, k, k, do=q if small else None, ranks=gpus, schedule=option.schedule, layout=made.layout,
            documents=documents, causal=causal, world=world, **option.arguments,
        )  # fmt: skip
        assert max(world.bytes_sent) == option.sent, option.schedule


def test_padding_is_told_where_it_costs_something():
    whole, more = (plan(seq=n, heads=32, kv_heads=8, gpus=8) for n in (32768, 32769))
    assert (whole.setup.padding, more.setup.padding) == (0, 15) and more.setup.block == 4098
    for one, two in zip(*(sorted(made.options, key=lambda o: o.schedule) for made in (whole, more)), strict=True):
        assert two.sent > one.sent and two.memory > one.memory and two.seconds[0] > one.seconds[0]
    assert "padding" not in whole.explain() and "adds" not in more.explain()
    assert "zigzag: 4,098 tokens a GPU, 15 of 32,784 padding, the same work for each\n" in more.explain()
    short = plan(seq=65, heads=32, gpus=8)
    assert "zigzag: 10 tokens a GPU, 15 of 80 padding\n" in short.explain()
    told = "padding adds 23.1% to what is held and sent, and the busiest GPU has 51.0% more work than its share"
    assert f"{told}; a multiple of 16 would have none" in short.explain() and short.as_dict()["padding"] == 15
    full = plan(seq=9, heads=32, gpus=8, causal=False)
    assert full.setup.share() == pytest.approx(16 / 9) and "a multiple of 8 would have none" in full.explain()


def test_documents_do_not_see_one_another():
    one, packed = (plan(seq=65536, heads=32, gpus=8, documents=x) for x in (True, 8 * [8192]))
    assert packed.layout == one.layout == "documents" and packed.setup.flops == one.setup.flops / 8
    ring = [next(o for o in made.options if o.schedule == "kv_ring") for made in (one, packed)]
    assert ring[0].sent == ring[1].sent and ring[1].seconds[0] < ring[0].seconds[0]
    assert ring[1].efficiency[0] < ring[0].efficiency[0]  # the same hops for less work
    odd = plan(seq=65536, heads=32, gpus=8, documents=[65535, 1])
    assert odd.setup.block == 8194 and "15 of 65,552" not in odd.explain() and "16 of 65,552 padding" in odd.explain()


def test_the_least_block_is_the_papers():
    """Ring Attention, table 2: c = F / B for full attention with as many key heads; A100 over NVLink, about 1.0k."""
    paper = costs.Link(
        "paper", costs.Constant(300e9, 300e9, 300e9, "B/s", ""), costs.Constant(1, 1, 1, "", ""),
        costs.Constant(0, 0, 0, "s", ""), True, "",
    )  # fmt: skip
    setup = small(kv_heads=4, causal=False)
    ratio = 312e12 / costs.ATTENTION.value
    assert least_block(setup, paper) * ratio == pytest.approx(1040)
    assert least_block(dataclasses.replace(setup, causal=True), paper) * ratio == pytest.approx(2080)
    assert least_block(dataclasses.replace(setup, kv_heads=1), paper) * ratio == pytest.approx(260)


def test_a_short_shard_over_a_slow_link_cannot_hide_and_the_plan_says_so():
    made = plan(seq=1 << 18, heads=32, gpus=64)
    assert made.margin < 1 and made.slowest.name == "ib400"
    assert "too short for a flat ring to hide" in made.explain()
    flat, double = (next(o for o in made.options if o.schedule == name) for name in ("kv_ring", "double_ring"))
    assert flat.exposed > 0.5 > double.exposed  # nested rings hide what the flat one cannot


@pytest.mark.parametrize("link", ["nvlink", "nvlink-nccl"])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_intervals_contain_the_value_and_the_best_comes_first(link: str, gpus: int):
    for kv_heads in (4, 32):
        for backward in (False, True):
            made = plan(seq=65536, heads=32, kv_heads=kv_heads, gpus=gpus, link=link, backward=backward)
            for option in made.options:
                middle, low, high = option.efficiency
                assert 0 < low <= middle <= high <= 1.0
                assert option.seconds[2] <= option.seconds[0] <= option.seconds[1]
            allowed = [o for o in made.options if not o.refused]
            assert allowed[0] is made.best
            assert made.best.efficiency[0] == max(o.efficiency[0] for o in allowed)


def test_merging_in_the_epilogue_helps_the_ring_and_nothing_else():
    separate, fused = (plan(seq=65536, heads=32, gpus=8, link="nvlink", merge=m) for m in ("separate", "fused"))
    by_name = [{o.schedule: o.efficiency[0] for o in made.options} for made in (separate, fused)]
    assert by_name[1]["kv_ring"] > by_name[0]["kv_ring"] + 0.05
    assert by_name[1]["ulysses"] == by_name[0]["ulysses"]


def test_nvlink_by_nccl_hides_nothing():
    copied, nccl = (plan(seq=32768, heads=32, gpus=4, link=link) for link in ("nvlink", "nvlink-nccl"))
    ring = [next(o for o in made.options if o.schedule == "kv_ring") for made in (copied, nccl)]
    assert ring[0].exposed < 0.05 and ring[1].exposed > 0.2


def test_sums_come_home_behind_the_own_block_where_hops_hide():
    """On record, two H200s, 8k tokens a GPU, both passes: 1.1 % of the step is left of all hops."""
    copied, nccl = (plan(seq=16384, heads=32, gpus=2, link=x, backward=True) for x in ("nvlink", "nvlink-nccl"))
    ring = [next(o for o in made.options if o.schedule == "kv_ring") for made in (copied, nccl)]
    assert ring[0].exposed < 0.03 and ring[1].exposed > 0.2


def test_what_does_not_fit_is_refused_and_ulysses_needs_heads():
    made = plan(seq=1 << 20, heads=32, kv_heads=8, gpus=64)
    reasons = {o.schedule: o.refused for o in made.options}
    assert reasons["ulysses"] == "more GPUs than the 32 heads" and not reasons["kv_ring"]
    assert plan(seq=1 << 24, heads=32, kv_heads=8, gpus=64, memory_gb=40).best.schedule != "allgather"
    with pytest.raises(UnsupportedError, match="no schedule fits 80 GB; the least is"):
        plan(seq=1 << 30, heads=32, gpus=8)


def test_one_gpu_sends_nothing():
    made = plan(seq=65536, heads=32, gpus=1, link="nvlink")
    assert all(o.sent == 0 for o in made.options)
    assert made.best.exposed < 1e-3 and made.best.efficiency[0] > 0.9
    told = made.explain()
    assert "1 GPU in 1 machine\n" in told and "nothing is sent" in told and "hop" not in told and "margin" not in told


def test_times_are_told_and_words_agree_with_their_numbers():
    made = plan(seq=131072, heads=32, gpus=4)
    ms = 1e3 * made.best.seconds[0]
    assert f"time      {ms:.3g} ms modelled" in made.explain() and "1 machine, nvlink\n" in made.explain()
    assert _time_text(2.5e-6) == "2.5 us" and _time_text(0.9996) == "1 s"
    few = plan(seq=7, heads=1, gpus=8).explain()
    assert few.startswith("7 tokens, 1 head, 1 key head,") and "2 tokens a GPU, 9 of 16 padding\n" in few


def test_machines_of_one_gpu_have_one_link():
    one, two = (plan(seq=65536, heads=32, gpus=16, gpus_per_node=1, link=x) for x in ("ib400", "ib400+ib400"))
    assert one.options == two.options and one.slowest.name == "ib400"
    assert "rings of one: the plain ring" in one.explain() and "one machine" not in one.explain()


def test_the_seeds_table_is_a_model_here():
    plans = seed_table()
    assert [made.setup.gpus for made in plans] == [8, 64, 512]
    assert all(made.as_dict()["kind"] == "modelled" for made in plans)


def test_the_table_of_the_readme_is_the_models():
    readme = (Path(__file__).parents[2] / "papers/ring_attention/README.md").read_text()
    for made in (*seed_table(), *seed_table(tokens_per_gpu=8192)):
        ring = next(option for option in made.options if option.schedule == "kv_ring")
        shares = [f"{100 * x:.0f} % ({100 * low:.0f} to {100 * high:.0f})"
                  for x, low, high in (made.best.efficiency, ring.efficiency)]  # fmt: skip
        exposed, time = f"{100 * made.best.exposed:.1f} %", _time_text(made.best.seconds[0])
        cells = [made.setup.gpus, f"{made.setup.seq:,}", made.best.schedule, *shares, exposed, time]
        assert f"| {' | '.join(map(str, cells))} |" in readme


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"link": "carrier-pigeon"}, "link is 'carrier-pigeon'"),
        ({"link": "nvlink"}, "name the link between them"),
        ({"kv_heads": 5}, "must be a multiple of kv_heads"),
        ({"head_dim": 63}, "head_dim must be a multiple of 8"),
        ({"head_dim": 264}, "head_dim must be a multiple of 8 up to 256"),
        ({"gpus": 0}, "gpus must be a whole number"),
        ({"seq": 1.5}, "seq must be a whole number"),
        ({"link": None}, "link is None"),
        ({"gpus": 2**40}, "gpus must be at most"),
        ({"heads": 2**40}, "heads must be at most"),
        ({"causal": "no"}, "causal must be True or False"),
        ({"memory_gb": True}, "memory_gb must be a positive number"),
        ({"merge": "none"}, "merge must be one of"),
        ({"documents": "no"}, "documents must be a list of lengths"),
        ({"documents": [65536, -1, 1]}, "a document's length must be a whole number"),
        ({"documents": [4096, 4096]}, "add up to 8,192 tokens, but seq is 65,536"),
        ({"head_dim": 100}, "head_dim must be a multiple of 8"),
        ({"head_dim": 264}, "up to 256, which the kernels take, got 264"),
        ({"memory_gb": float("nan")}, "memory_gb must be a positive number"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_questions_that_make_no_sense(changes: dict, message: str):
    with pytest.raises(InvalidInputError, match=message):
        plan(**{"seq": 65536, "heads": 32, "gpus": 64, **changes})


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "cli", "ring", "plan", *arguments], capture_output=True, text=True, timeout=60
    )


def test_what_is_written_says_that_it_is_modelled(tmp_path):
    from typer.testing import CliRunner

    from cli.ring import app

    for suffix in ("csv", "md", "html", "jsonl"):
        file = tmp_path / f"plan.{suffix}"
        done = CliRunner().invoke(app, ["plan", "--seq", "64k", "--gpus", "4", "-o", str(file)])
        assert done.exit_code == 0 and "modelled" in file.read_text()
        assert suffix in ("csv", "jsonl") or "65,536 tokens, 32 heads" in file.read_text()


def test_help_names_every_link():
    from cli.ring import plan as command
    from gpu_accel.ring_attention.costs import LINKS

    link = inspect.get_annotations(command, eval_str=True)["link"]
    assert all(name in link.__metadata__[0].help for name in LINKS)


def test_the_command():
    question = ["--seq", "1m", "--heads", "32", "--kv-heads", "8", "--gpus", "64", "--link", "nvlink+ib400"]
    done = command(*question, "--json")
    answer = json.loads(done.stdout)
    made = plan(seq=1 << 20, heads=32, kv_heads=8, gpus=64)
    assert done.returncode == 0 and answer == json.loads(json.dumps(made.as_dict()))
    assert command("--seq", "1g", "--gpus", "8", "--link", "nvlink").returncode == 4


def test_the_command_for_the_longest_sequence():
    from typer.testing import CliRunner

    from cli.ring import app

    question = ["longest", "--heads", "8", "--kv-heads", "2", "--memory", "141", "--backward"]
    rows = json.loads(CliRunner().invoke(app, [*question, "--json"]).stdout)["longest"]
    options = {"heads": 8, "kv_heads": 2, "memory_gb": 141.0, "backward": True}
    assert [(row["gpus"], row["tokens"]) for row in rows] == [(n, longest(gpus=n, **options)) for n in (1, 2, 4)]
    one = CliRunner().invoke(app, [*question, "--gpus", "2", "--schedule", "allgather"])
    assert one.stdout.split() == ["2", "GPUs", f"{longest(gpus=2, schedule='allgather', **options):,}", "tokens"]
    none = CliRunner().invoke(app, ["longest", "--memory", "1e-9"])
    assert isinstance(none.exception, UnsupportedError) and not none.stdout  # exit code 4


def test_lengths_as_people_write_them():
    from cli.ring import _lengths, _tokens

    assert [_tokens(x) for x in ("131072", "128k", "1M", "2g")] == [1 << 17, 1 << 17, 1 << 20, 1 << 31]
    for wrong in ("10x", "", "-1", "1.5m", "١٢"):
        with pytest.raises(InvalidInputError, match="a number of tokens such as"):
            _tokens(wrong)
    assert _lengths("4k,12k") == [4096, 12288] and _lengths("3x2k, 7") == [2048, 2048, 2048, 7]
    for wrong in ("", "4k,", "2x", "x", "-1x4k", "1x2x3", "9999999x1"):
        with pytest.raises(InvalidInputError, match="--documents (is|has)"):
            _lengths(wrong)


def test_planning_needs_no_torch():
    code = (
        "import sys; from gpu_accel.ring_attention.plan import plan; plan(seq=4096, heads=8, gpus=2, link='nvlink');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("schedule", ["kv_ring", "ulysses"])
def test_the_longest_sequence_fits_and_the_next_does_not(schedule: str):
    question = {"heads": 8, "kv_heads": 2, "backward": True, "link": "nvlink"}
    found = [longest(gpus=n, schedule=schedule, **question) for n in (1, 2, 4)]
    for n, tokens in zip((1, 2, 4), found, strict=True):
        need = [
            peak_memory(schedule, small(seq=s, gpus=n, **{**question, "head_dim": 128}))
            for s in (tokens, tokens + 1024)
        ]
        assert need[0] <= 80e9 < need[1]
    if schedule == "ulysses":
        assert found[1] == pytest.approx(2 * found[0], rel=0.01) and found[2] == pytest.approx(4 * found[0], rel=0.01)
    else:  # one GPU has no buffers for what travels, and of two only one block of keys is under way
        assert 1.5 < found[1] / found[0] < 1.9 < found[2] / found[1] < 2


def test_questions_about_the_longest_that_make_no_sense():
    for wrong in ({"schedule": "none"}, {"multiple": 0}, {"gpus": 0}, {"memory_gb": -1.0}):
        with pytest.raises(InvalidInputError):
            longest(**{"gpus": 2, "heads": 8, "link": "nvlink", **wrong})
    assert longest(gpus=1, heads=2**16, memory_gb=0.001, link="nvlink") == 0
