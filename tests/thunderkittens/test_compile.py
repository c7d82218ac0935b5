"""Kernels compiled for an H100 that is not there: tensor cores in every product, no spills."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
pytestmark = pytest.mark.parametrize("compile_environment", ["installed"], indirect=True)
CHUNKS = ["bf16-128-64-walks,bf16-16-64-packed", "fp16-64-128", "fp32-64-64"]
DELTA = ["bf16-128-128", "fp16-64-128"]
GROUPS = [  # each is compiled in one process
    [("chunked", names) for names in CHUNKS],
    [
        *(("delta", names) for names in DELTA), ("gla", "bf16-128-128"), ("maps", "bf16-64"), ("conv", "bf16-4096"),
        ("longconv", "bf16-4096"), ("ladder", "bf16-4096"), ("rows", "bf16-4096,fp32-65536"), ("walks", "fp16-128-64"),
    ],
]  # fmt: skip


def compiled(compile_once, what: str, names: str) -> list[dict]:
    (group,) = (group for group in GROUPS if (what, names) in group)
    rows = compile_once(SCRIPT, *(word for words in group for word in words))
    return rows[group.index((what, names))]


@pytest.mark.slow
@pytest.mark.parametrize("names", CHUNKS)
def test_chunks(names, compile_once):
    rows = compiled(compile_once, "chunked", names)
    found = {row["kernel"] for row in rows}
    walks = {"_fused_kernel", "walk_kernel", "both_kernel", "_gates_kernel", "_gate_sums_kernel", "_pairs_kernel",
             "segments_kernel"}  # fmt: skip
    assert found - walks == {"_states_kernel", "_output_kernel", "_dv_kernel", "_dqk_kernel"}
    assert ("_fused_kernel" in found) == ("fp32" not in names)
    # the forward, for Mamba-2 the walk for dq (beside that for dk and dv), of one head and of heads in turns, retention
    assert [row["kernel"] for row in rows].count("walk_kernel") == (5 if "bf16" in names else 0)
    for row in rows:
        # a state of 128 x 64 beside gates, weights and a first state does not fit entirely
        most = {"_fused_kernel": 96, "walk_kernel": 16}
        assert row["spills"] <= most.get(row["kernel"], 0) and not row["faults"], row
        assert row["hgmma"] or row["mma"] or row["kernel"] in ("_gates_kernel", "_gate_sums_kernel"), row
        # two programs of the walk share an SM
        assert row["shared"] <= (112 if row["kernel"] in ("walk_kernel", "segments_kernel") else 227) * 1024, row


@pytest.mark.slow
def test_walks_in_float16(compile_once):
    """Mamba-2's: dealt, for dq, and for dk and dv; retention's; powers of two take few registers more."""
    rows = [row for row in compiled(compile_once, "walks", "fp16-128-64") if "walk" in row["kernel"] or row["tma"]]
    assert sorted(row["kernel"] for row in rows) == ["both_kernel", "segments_kernel", *["walk_kernel"] * 3]
    for row in rows:
        assert row["spills"] == 0 and row["hgmma"] and not row["faults"], row
        assert row["shared"] <= (227 if row["kernel"] == "both_kernel" else 112) * 1024, row


@pytest.mark.slow
@pytest.mark.parametrize("names", DELTA)
def test_delta_rule(names, compile_once):
    """A triangular system of 64 rows beside keys of 128: some of it is spilled, and may not grow."""
    rows = compiled(compile_once, "delta", names)
    own = {"_solve_kernel", "_walk_kernel", "_walk_back_kernel", "_inputs_kernel"}
    hopper = {f"delta_{name}_kernel" for name in ("solve", "walk", "walk_back", "back")} if "bf16" in names else set()
    gates = {row["kernel"] for row in rows} & {"_gates_kernel"}
    assert {row["kernel"] for row in rows} - gates == own | {"_output_kernel", "_dqk_kernel"} | hopper
    for row in rows:
        # three programs that solve share an SM
        most = dict.fromkeys(own, 512) | {"delta_solve_kernel": 128, "delta_back_kernel": 160, "_dqk_kernel": 128}
        assert row["spills"] <= most.get(row["kernel"], 0) and not row["faults"], row
        assert row["kernel"] != "delta_solve_kernel" or row["registers"] <= 168 and row["shared"] <= 75 * 1024, row
        assert (row["hgmma"] or row["kernel"] in gates) and row["shared"] <= 227 * 1024, row


@pytest.mark.slow
def test_gates_of_every_key(compile_once):
    rows = compiled(compile_once, "gla", "bf16-128-128")
    others = {"_sums_kernel", "_ones_kernel"}
    products = {"_states_kernel", "_rows_kernel", "_mirrored_kernel", "_gradients_kernel"}
    walks = [row for row in rows if row["kernel"] == "gla_walk_kernel"]
    pairs = [row for row in rows if row["kernel"] == "gla_pairs_kernel"]
    assert {row["kernel"] for row in rows if row not in walks + pairs} == products | others
    # K = 128 in segments, then K = 64 in one; two programs of a walk share an SM, and of pairs where registers let them
    assert len(pairs) == 2 and len(walks) == 3
    assert all(row["tma"] and row["shared"] <= 112 * 1024 for row in walks + pairs), rows
    for row in rows:
        # pairs have 128 or 168 registers, so that two or three programs share an SM: measured, see gla_hopper.py
        most = {"_gradients_kernel": 192, "gla_pairs_kernel": 384 if row["warps"] == 8 else 128}
        assert row["spills"] <= most.get(row["kernel"], 0), row
        assert not row["faults"] and row["shared"] <= 227 * 1024, row
        assert row["hgmma"] or row["kernel"] in others, row


@pytest.mark.slow
def test_feature_maps(compile_once):
    """Based keeps 256 x 64 sums in registers beside its operands; what is put aside of them may not grow."""
    rows = {row["kernel"]: row for row in compiled(compile_once, "maps", "bf16-64")}
    sums = {"_mix_kernel", "_mix_backward_kernel"}
    windows = {"_window_join_kernel", "_window_maximum_kernel"}
    assert set(rows) == {"based_walk_kernel", "_hedgehog_kernel", "hedgehog_walk_kernel"} | windows | sums
    assert rows["based_walk_kernel"]["spills"] <= 192 and rows["based_walk_kernel"]["shared"] <= 112 * 1024, rows
    assert not any(row["spills"] for name, row in rows.items() if name != "based_walk_kernel"), rows
    assert all((row["hgmma"] or name in sums) and not row["faults"] for name, row in rows.items()), rows


@pytest.mark.slow
def test_short_convolutions(compile_once):
    rows = compiled(compile_once, "conv", "bf16-4096")
    assert len(rows) == 2 * 4 + 2 + 3  # walks of channels side by side, and their sums
    assert not any(row["spills"] for row in rows), rows


@pytest.mark.slow
def test_long_convolutions(compile_once):
    rows = compiled(compile_once, "longconv", "bf16-4096")
    assert len(rows) == 2
    for row in rows:
        assert row["spills"] == 0 and row["hgmma"] and row["shared"] <= 227 * 1024, row


@pytest.mark.slow
def test_ladder(compile_once):
    """No spills; tensor cores from the second level on; TMA in the last but one."""
    rows = compiled(compile_once, "ladder", "bf16-4096")
    assert not any(row["spills"] for row in rows), rows
    naive, *levels = [row for row in rows if row["kernel"] in ("_naive_kernel", "_tiled_kernel", "_tma_kernel")]
    assert not naive["hgmma"] and all(row["hgmma"] for row in levels) and len(levels) == 4
    assert [row["tma"] > 0 for row in levels] == [False, False, False, True]
    (template,) = (row for row in rows if row["kernel"] == "product_kernel")
    assert template["hgmma"] and template["tma"] and not template["faults"]
    assert len(rows) == 6 + 1 + 4


@pytest.mark.slow
def test_rows(compile_once):
    rows = compiled(compile_once, "rows", "bf16-4096,fp32-65536")
    sums = [row for row in rows if row["kernel"] == "_parts_kernel"]  # of gradients of weight and bias
    rings = [row for row in rows if row["kernel"] in ("forward_rows_kernel", "backward_rows_kernel")]
    assert len(rows) == 18 + 18 + len(sums) + len(rings) and len(sums) == 4 and len(rings) == 5
    assert all(row["tma"] for row in rings)
    for row in rows:
        assert row["spills"] == 0, row
        assert row["wide"] >= 1 or row in sums, row  # 16 bytes at a time
