"""The Gluon kernels compile to sm_90a, the experimental one to sm_100a, with every supported Triton.

The flagship neither spills nor serialises.
"""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_hopper.py")
SHARED_LIMIT = 227 * 1024  # bytes that one program can have on an H100
SMALL_SPILL = 600  # bytes a thread, outside the loop that matters: three consumers with masks have 160 registers

EVERY, TWO, ONE = ["flagship", "blackwell"], ["features", "packed", "backward"], ["ablation", "more-backward"]
# 3.6.0 comes with torch 2.11
TWO_TRITONS = pytest.mark.parametrize("compile_environment", ["installed", "3.6.0"], indirect=True)
INSTALLED = pytest.mark.parametrize("compile_environment", ["installed"], indirect=True)


def compiled(compile_once, *wanted: str) -> dict[str, dict]:
    sets = {"installed": [*EVERY, *TWO, *ONE, "blackwell-more"], "3.6.0": EVERY + TWO}.get(compile_once.version, EVERY)
    rows = compile_once(SCRIPT, *sets)
    return {f"{row['name']} {row['kernel']}": row for row in rows if row["set"] in wanted}


@pytest.mark.slow
def test_flagship_neither_spills_nor_serialises(compile_once):
    rows = compiled(compile_once, "flagship")
    assert len(rows) == 3
    for name, row in rows.items():
        # 3.9 puts addresses of O aside at head_dim 64, 34 stores and 56 loads of 4 bytes (24 and 26 without the
        # --regAllocOptLevel=2 that it gives to ptxas), never in the steps
        assert row["spills"] <= (4 * (34 + 56) if row["triton"] >= "3.9" else 0), (name, row)
        assert len(row["loop_spills"]) >= 2 and not any(row["loop_spills"]), (name, row)
        # one for the wait on an array of mbarriers that another wait was on before, one for a turn; without `seamless`
        # (head_dim 256; 64 with 3.9) one more, to free a buffer
        meetings = {"d64": 1 if row["triton"] < "3.9" else 2, "d128": 2, "d256": 3}[row["name"]]
        assert row["loop_meetings"][:2] == [meetings, meetings], (name, row)
        assert not row["warnings"], (name, row)
        assert row["wgmma"] > 0 and row["tma"] > 0, (name, row)
        assert row["shared"] <= SHARED_LIMIT, (name, row)
        assert row["repacking"] < 64, (name, row)  # P stays packed from step to step


@pytest.mark.slow
@TWO_TRITONS
def test_masks_windows_soft_caps_and_modifiers_compile(compile_once):
    rows = compiled(compile_once, "features")
    assert len(rows) == 5
    for name, row in rows.items():
        assert row["spills"] <= SMALL_SPILL, (name, row)
        # a column a register for masks would be put aside in every step: they compare constants
        assert not any(row["loop_spills"][:2]), (name, row)
        assert not row["warnings"], (name, row)
        assert row["wgmma"] > 0 and row["shared"] <= SHARED_LIMIT, (name, row)


@pytest.mark.slow
@INSTALLED
def test_variants_of_the_ablation_compile(compile_once):
    rows = compiled(compile_once, "ablation")
    assert len(rows) == 2
    for name, row in rows.items():
        # two warpgroups are compiled apart, without specialisation there is one program for both
        assert row["wgmma"] > 0 and row["spills"] <= SMALL_SPILL and row["shared"] <= SHARED_LIMIT, (name, row)
        assert not row["warnings"], (name, row)


@pytest.mark.slow
@TWO_TRITONS
def test_packed_sequences_and_another_head_dim_of_v_compile(compile_once):
    rows = compiled(compile_once, "packed")
    assert len(rows) == 4
    for name, row in rows.items():
        assert row["spills"] <= SMALL_SPILL, (name, row)
        assert not row["warnings"], (name, row)
        assert row["wgmma"] > 0 and row["shared"] <= SHARED_LIMIT, (name, row)


@pytest.mark.slow
@TWO_TRITONS
def test_backward_compiles_without_serialised_products(compile_once):
    rows = compiled(compile_once, "backward")
    assert len(rows) == 4  # two kernels at head_dim 256
    for name, row in rows.items():
        # where dQ leaves at head_dim 256, and what only the masked step needs, is put aside once a tile
        assert row["spills"] <= (1000 if row["kernel"] == "dq_kernel" else SMALL_SPILL), (name, row)
        assert not row["warnings"], (name, row)
        assert row["wgmma"] > 0 and row["tma"] > 0 and row["shared"] <= SHARED_LIMIT, (name, row)


@pytest.mark.slow
@INSTALLED
def test_backward_with_modifiers_and_packed_above_128_compiles(compile_once):
    rows = compiled(compile_once, "more-backward")
    assert len(rows) == 3
    for name, row in rows.items():
        # 800 bytes and more once a step or a tile: what a bias and two users' functions or a table ask for
        assert row["spills"] <= 1500 and not row["warnings"] and row["shared"] <= SHARED_LIMIT, (name, row)


@pytest.mark.slow
def test_blackwell_compiles(compile_once):
    rows = compiled(compile_once, "blackwell", "blackwell-more")
    assert len(rows) == (3 if compile_once.version == "installed" else 1)
    for name, row in rows.items():
        assert row["tcgen05"] > 0 and row["wgmma"] == 0 and row["tma"] > 0, (name, row)
        assert row["spills"] <= SMALL_SPILL and not row["warnings"], (name, row)
        assert row["shared"] <= SHARED_LIMIT, (name, row)
