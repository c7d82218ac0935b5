"""`gpu-accel hardware measure` with a made-up GPU, and without one."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from cli import hardware as command
from cli.main import app
from gpu_accel.hardware import Ceilings
from gpu_accel.hardware.detection import match


def test_without_a_gpu_it_explains_itself(monkeypatch):
    from gpu_accel import hardware

    monkeypatch.setattr(hardware, "detect", lambda index=0: None)
    done = CliRunner().invoke(app, ["hardware", "measure"])
    assert done.exit_code == 4 and done.stdout == "" and "doctor" in done.stderr
    done = CliRunner().invoke(app, ["hardware", "measure", "--json"])
    assert done.exit_code == 4 and json.loads(done.stdout)["error"]["type"] == "HardwareError"


def test_two_places_for_records_are_one_too_many():
    done = CliRunner().invoke(app, ["hardware", "measure", "--save", "--results", "x"])
    assert done.exit_code == 2 and "choose one" in done.stderr


@pytest.mark.parametrize(("sms", "share"), [(132, "90%"), (16, "")], ids=["whole", "mig"])
def test_rows_stand_beside_the_datasheet_of_a_whole_gpu_only(sms, share):
    found = match(index=0, name="NVIDIA H100 80GB HBM3", capability="9.0", memory_gb=85.0, sm_count=sms)
    ceilings = Ceilings(gpu=found.name, tflops={"bf16": 700.0, "fp8": 1300.0}, gbps={"read": 3016.8}, launch_us=2.0)
    rows = command.ceiling_rows(found, ceilings)
    assert [row["what"] for row in rows] == ["read", "bf16 product", "fp8 product", "launch of an empty kernel"]
    assert rows[0]["share"] == share and rows[-1]["datasheet"] == ""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["hopper"], "needs a Hopper GPU"),
        (["hopper", "latency"], "needs a Hopper GPU"),
        (["hopper", "tensor-cores", "--quick"], "needs a Hopper GPU"),
        (["blackwell"], "needs sm_100"),
        (["gpu_cores"], "needs a Hopper GPU"),
    ],
    ids=["hopper", "hopper latency", "hopper tensor-cores", "blackwell", "gpu_cores"],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_run_that_needs_a_gpu_explains_itself_in_few_lines(words, reason):
    done = CliRunner().invoke(app, ["run", *words])
    assert done.exit_code == 4 and reason in done.stderr and done.stdout == ""
    assert len(done.stderr.splitlines()) <= 4


def test_the_part_of_hopper_that_runs_anywhere_is_checked_when_it_is_named(tmp_path):
    done = CliRunner().invoke(app, ["run", "hopper", "ceilings", "--quick", "--results", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == "ok" and {record["experiment"] for record in found["records"]} == {"ceilings"}
