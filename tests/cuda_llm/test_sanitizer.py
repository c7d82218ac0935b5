"""The gate of finalists: compute-sanitizer's reports, and machines that have none of it.

The tool itself is stood in for by a script; that the launcher which it runs works on a GPU is tested in tests/gpu.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from gpu_accel.cuda_llm import TASKS, Judgement, Kind, Sandbox, Verdict, sanitizer

PASSED = Judgement(verdict=Verdict.ACCEPTED, detail="9 launches", verified_by=("guards",))
LAUNCHED = "launched\nlaunched\n"
CLEAN = f"========= COMPUTE-SANITIZER\n{LAUNCHED}========= ERROR SUMMARY: 0 errors\n"
BEYOND = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at softmax+0x1b0
=========     Address 0x7f0 is out of bounds
launched
========= ERROR SUMMARY: 3 errors
"""
NO_RACE = f"{LAUNCHED}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
WARNED = f"{LAUNCHED}========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n"
RACE = f"""========= Error: Race reported between Write access at k+0x10 and Read access at k+0x50
{LAUNCHED}========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
API = f"{LAUNCHED}========= Program hit CUDA_ERROR_INVALID_VALUE\n========= ERROR SUMMARY: 1 error\n"


@pytest.mark.parametrize(
    ("memcheck", "racecheck", "language", "name", "says"),
    [
        (CLEAN, NO_RACE, "cuda", "accepted", "compute-sanitizer racecheck of 2 launches"),
        (CLEAN, WARNED, "cuda", "accepted", "compute-sanitizer racecheck of 2 launches"),
        (BEYOND, NO_RACE, "cuda", "wrong(out_of_bounds)", "3 errors"),
        (CLEAN, RACE, "cuda", "wrong(race)", "1 errors in shared memory"),
        (CLEAN, RACE, "triton", "accepted", "barriers that Triton placed"),
        (API, NO_RACE, "cuda", "accepted", "none of memory"),
        ("Unable to connect", NO_RACE, "cuda", "accepted", "memcheck did not run: Unable to connect"),
        ("========= ERROR SUMMARY: 0 errors\n", NO_RACE, "cuda", "accepted", "memcheck did not run"),
        ("", "", "cuda", "accepted", "memcheck did not run: it said nothing"),
    ],
    ids=["clean", "warning", "beyond", "race", "race-of-triton", "api", "no-connection", "no-launch", "silence"],
)
def test_what_reports_mean(memcheck: str, racecheck: str, language: str, name: str, says: str) -> None:
    told = {"launches": 2, "memcheck": memcheck, "racecheck": racecheck}
    found = sanitizer.read(told, language, PASSED)
    assert found.name == name and says in f"{found.detail} {found.verified_by}", found
    if "memcheck did not run" in says:
        assert not any("memcheck" in one for one in found.verified_by)
    if not found.ok:
        assert found.evidence


UNWRITTEN = """========= Uninitialized __global__ memory read of size 4 bytes
=========     at scan+0x90
launched
========= ERROR SUMMARY: 64 errors
"""


@pytest.mark.parametrize(
    ("initcheck", "name", "says"),
    [
        (CLEAN, "accepted", "compute-sanitizer initcheck of 2 launches"),
        (UNWRITTEN, "wrong(not_deterministic)", "64 reads of memory that was never written"),
        (API, "accepted", "none of memory"),
        ("", "accepted", "initcheck did not run"),
    ],
    ids=["clean", "unwritten", "api", "silence"],
)
def test_scratch_that_was_never_written(initcheck: str, name: str, says: str) -> None:
    told = {"launches": 2, "memcheck": CLEAN, "racecheck": NO_RACE, "initcheck": initcheck}
    found = sanitizer.read(told, "triton", PASSED)
    assert found.name == name and says in f"{found.detail} {found.verified_by}", found
    assert found.ok or found.evidence


def test_a_machine_without_the_tool_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "tool", lambda: "")

    class Gpu:
        gpu = True

    found = sanitizer.sanitize(TASKS["dot"].candidate, TASKS["dot"], sandbox=Gpu(), judged=PASSED)  # type: ignore[arg-type]
    assert found.ok and found.detail == "9 launches; compute-sanitizer is not installed"
    assert "not installed" in sanitizer.level()
    wrong = Judgement(verdict=Verdict.WRONG, kind=Kind.MISMATCH)
    assert sanitizer.sanitize(TASKS["dot"].candidate, TASKS["dot"], sandbox=Gpu(), judged=wrong) is wrong  # type: ignore[arg-type]


def test_the_tool_gets_launches_of_small_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script in its place says what it was given."""
    script = tmp_path / "compute-sanitizer"
    script.write_text(
        "#!/bin/sh\nset -e\ntest -f sanitized.py\n"
        "for one in kernel*.cubin; do echo launched; done\ncat launches.json 1>&2\n"
        'echo "========= ERROR SUMMARY: 0 errors"\n'
    )
    for one in (script, *script.parents[:4]):  # up to the folder of all that pytest made
        one.chmod(one.stat().st_mode | stat.S_IROTH | stat.S_IXOTH | stat.S_IXUSR)
    monkeypatch.setattr(sanitizer, "tool", lambda: str(script))
    task = TASKS["reverse"]
    kept = {}
    plain = sanitizer.read
    monkeypatch.setattr(sanitizer, "read", lambda result, *more: (kept.update(result), plain(result, *more))[1])
    with Sandbox(gpu=True, seconds=120) as sandbox:  # its workers compile; here is no GPU that they could use
        found = sanitizer.sanitize(task.candidate, task, sandbox=sandbox, judged=PASSED)
        assert sandbox.level["sanitizer"].startswith("memcheck, racecheck and initcheck of finalists")
    if "PermissionError" in found.detail:  # as it should be said, and nothing more can be seen here
        pytest.skip(f"this environment cannot be read by the user that candidates run as: {found.detail}")
    assert found.ok, (found, kept)
    launches = json.loads(kept["memcheck"][kept["memcheck"].index("[{"):].splitlines()[0])
    assert len(launches) == kept["launches"] == sanitizer.LAUNCHES
    (one,) = launches[0]["passes"]
    assert one["parameters"][:2] == ["x", "out"] and launches[0]["buffers"]["x"][2] == 4000
    assert one["parameters"][2] == 1000 and one["scratch"] == 0
    assert "compute-sanitizer memcheck of 4 launches" in found.verified_by and "no shared memory" in found.detail
