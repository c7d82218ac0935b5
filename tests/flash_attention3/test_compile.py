"""Compile without a GPU, with every Triton that is supported: no spills in the flagship, everything else assembles."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT, FEATURES = (Path(__file__).with_name(f"compile_{name}.py") for name in ("flagship", "features"))
# 3.6.0 comes with torch 2.11
TWO_TRITONS = pytest.mark.parametrize("compile_environment", ["installed", "3.6.0"], indirect=True)
INSTALLED = pytest.mark.parametrize("compile_environment", ["installed"], indirect=True)


def compiled(compile_once, which: str) -> dict[str, dict]:
    hopper = ("flagship", "large")
    rows = compile_once(SCRIPT, *(hopper if which in hopper else (which,)))
    return {row["name"]: row for row in rows if row["set"] == which}


@pytest.mark.slow
def test_flagship_forward_neither_spills_nor_serialises(compile_once):
    rows = compiled(compile_once, "flagship")
    assert len(rows) == 4
    for name, row in rows.items():
        assert row["spills"] == 0, (name, row)
        assert not row["warnings"], (name, row)
        assert row["wgmma"] > 0 and row["tma"] > 0, (name, row)
        assert row["shared"] <= 227 * 1024


@pytest.mark.slow
def test_large_packed_and_backward_kernels_assemble(compile_once):
    rows = compiled(compile_once, "large")
    assert len(rows) == 6
    for name, row in rows.items():
        assert row["wgmma"] > 0, (name, row)
        assert row["shared"] <= 227 * 1024, (name, row)
        assert ("-pointer-" in name) == (row["tma"] == 0), (name, row)
    forward = {name: row for name, row in rows.items() if name.endswith("forward")}
    assert all(row["spills"] == 0 for row in forward.values()), forward


@pytest.mark.slow
@TWO_TRITONS
def test_features_keep_the_matrix_instructions_and_do_not_spill(compile_once):
    rows = {row["name"]: row for row in compile_once(FEATURES, "features")}
    assert len(rows) == 21
    for name, row in rows.items():
        assert row["wgmma"] > 0 and row["shared"] <= 227 * 1024, (name, row)
        assert not row["warnings"], (name, row)
        if not name.startswith("packed-"):
            assert row["spills"] == 0 and row["tma"] > 0, (name, row)


@pytest.mark.slow
@INSTALLED
def test_ampere_configurations_fit_its_shared_memory(compile_once):
    rows = compiled(compile_once, "ampere")
    assert len(rows) == 3
    for name, row in rows.items():
        assert row["wgmma"] == 0 and row["shared"] <= 99 * 1024, (name, row)


@pytest.mark.slow
@INSTALLED
def test_blackwell_compiles(compile_once):
    (row,) = compiled(compile_once, "blackwell").values()
    assert row["shared"] <= 227 * 1024
