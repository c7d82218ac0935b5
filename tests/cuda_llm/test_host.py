"""Tier B: Python host code, in the sandbox, labelled, judged by results that it never sees."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from gpu_accel.cuda_llm import Sandbox, bubblewrap, landlock, seccomp
from gpu_accel.cuda_llm.host import LABEL, check_host, check_model
from gpu_accel.cuda_llm.sandbox import Outcome
from gpu_accel.cuda_llm.verdict import Kind, Verdict
from gpu_accel.errors import InvalidInputError

RUN = "import torch\n\ndef run(x):\n    return {}\n"
PROBLEM = """import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 24)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs():
    return [torch.randn(5, 32)]

def get_init_inputs():
    return [32]
"""
ANSWER = """import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 24)

    def forward(self, x):
        return {}
"""
RIGHT = "(x @ self.linear.weight.t() + self.linear.bias).clamp(min=0)"


@pytest.mark.parametrize(
    ("source", "verdict", "kind"),
    [
        (RUN.format("torch.softmax(x, -1)"), Verdict.ACCEPTED, None),
        ("import torch\n\ndef custom_kernel(data):\n    return torch.softmax(data[0], -1)\n", Verdict.ACCEPTED, None),
        (RUN.format("x"), Verdict.WRONG, Kind.COPIED_INPUT),
        (RUN.format("torch.softmax(x.half().float(), -1)"), Verdict.WRONG, Kind.PRECISION),
        (RUN.format("torch.softmax(x, -1).half()"), Verdict.WRONG, Kind.MISMATCH),
        (RUN.format("x * float('nan')"), Verdict.WRONG, Kind.NON_FINITE),
        (RUN.format("torch.softmax(x, -1) if x.shape[1] in (100, 257) else x"), Verdict.WRONG, Kind.HELD_OUT),
        (RUN.format("(x, x)"), Verdict.WRONG, Kind.MISMATCH),
        (RUN.format("'accepted'"), Verdict.COMPILE_ERROR, None),
        ("def run(x):\n    import os\n    os._exit(0)\n", Verdict.CRASHED, None),
        ("def run(x):\n    while True: pass\n", Verdict.TIMEOUT, None),
        ("x = 1\n", Verdict.COMPILE_ERROR, None),
        ("def run(x:\n", Verdict.COMPILE_ERROR, None),
    ],
)
def test_verdicts_on_host_code(source: str, verdict: Verdict, kind: Kind | None, sandbox: Sandbox) -> None:
    judged = check_host(source, "softmax", sandbox=sandbox, seed=2, seconds=2.0)
    assert (judged.verdict, judged.kind) == (verdict, kind), judged
    assert LABEL in judged.verified_by, "no verdict of this tier goes without its label"


def test_a_forged_result_does_not_pass(sandbox: Sandbox) -> None:
    """It writes the files that the worker would, and ends the process; its bytes are compared all the same."""
    source = (
        "import json, os\nfrom pathlib import Path\n\ndef run(x):\n    out = []\n    for i in range(5):\n"
        "        n = os.path.getsize(f'in{i}.bin')\n        Path(f'out{i}.bin').write_bytes(b'\\0' * n)\n"
        "        out.append([{'shape': [1, n // 4], 'dtype': 'float32'}])\n"
        "    Path('result.json').write_text(json.dumps({'outputs': out, 'verdict': 'accepted'}))\n    os._exit(0)\n"
    )
    judged = check_host(source, "softmax", sandbox=sandbox, seed=2)
    assert judged.verdict is Verdict.WRONG


with_landlock = pytest.mark.skipif(landlock.abi() < 6, reason="this kernel has no Landlock, or one before Linux 6.12")


@with_landlock
def test_host_code_writes_in_its_folder_alone(sandbox: Sandbox) -> None:
    """Where everybody may write, as in /tmp, a candidate may not; its own folder lies in there too."""
    place = Path(tempfile.gettempdir()) / f"gpu-accel-{uuid.uuid4().hex}"
    source = (
        f"import torch\n\ndef run(x):\n    open('scratch', 'w').write('mine')\n    try:\n        open('{place}', 'w')\n"
        "    except OSError:\n        return torch.softmax(x, -1)\n    return x\n"
    )
    judged = check_host(source, "softmax", sandbox=sandbox, seed=2)
    assert not place.exists()
    assert judged.verdict is Verdict.ACCEPTED, judged
    assert "Landlock" in sandbox.level["files"] and "files: " in sandbox.described


HELD = """
import ctypes, os, socket, sys
from pathlib import Path
from gpu_accel.cuda_llm.landlock import restrict

inside, outside, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0
print(restrict(inside, also=("/dev/null", "/proc/self")))
(inside / "made").mkdir()
(inside / "made" / "file").write_text("mine")
(inside / "made" / "file").rename(inside / "moved")
open("/dev/null", "w").write("nothing")
Path("/proc/self/comm").write_text("named")  # as CUDA names its threads; it cuts the file short
assert (outside / "theirs").read_text() == "kept"
attempts = {
    "write": lambda: (outside / "theirs").write_text("mine"),
    "truncate": lambda: os.truncate(outside / "theirs", 0),
    "make": lambda: (outside / "new").mkdir(),
    "remove": lambda: (outside / "theirs").unlink(),
    "move": lambda: (inside / "moved").rename(outside / "moved"),
    "signal": lambda: os.kill(os.getppid(), 0),
    "connect": lambda: socket.create_connection(("127.0.0.1", port)),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except OSError as error:
        print(name, type(error).__name__)
    else:
        print(name, "done")
"""


@with_landlock
def test_what_landlock_forbids(tmp_path: Path) -> None:
    """Also to root, and to a user whose own files these are."""
    import socket

    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "theirs").write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = [str(inside), str(outside), str(server.getsockname()[1])]
        root = str(Path(__file__).resolve().parents[2])
        done = subprocess.run(
            [sys.executable, "-c", HELD, *arguments],
            env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert "folder alone" in first and "TCP" in first and "signals nobody" in first
    refused = dict(line.split() for line in rest)
    assert set(refused) == {"write", "truncate", "make", "remove", "move", "signal", "connect"}
    assert all(word in ("PermissionError", "OSError") for word in refused.values()), refused
    assert (outside / "theirs").read_text() == "kept" and len(list(outside.iterdir())) == 1


@pytest.mark.parametrize("bare", [0, 100], ids=["another driver", "no driver"])
def test_walls_that_cuda_does_not_start_behind_are_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, bare: int
) -> None:
    """Such as those of another driver, which wants another place to write to; not where it does not start at all."""
    asked = []

    def run(self: Sandbox, what: str, folder: Path, **job: object) -> Outcome:
        asked.append(self._without)
        words = f"not held to its folder: {self._without}" if self._without else "writes in its folder alone"
        return Outcome(ended="exit", result={"level": {"files": words}, "cuda": bare if self._without else 304})

    monkeypatch.setattr(Sandbox, "run", run)
    monkeypatch.setattr(Sandbox, "_reply", lambda self, timeout: {"ready": True})
    monkeypatch.setattr("gpu_accel.cuda_llm.sandbox.subprocess.Popen", lambda *args, **more: None)
    why = "CUDA does not start behind it (error 304)"
    with Sandbox(gpu=True) as made:
        assert made.level["files"] == ("writes in its folder alone" if bare else f"not held to its folder: {why}")
        assert made._without == ("" if bare else why)
    assert asked == ["", why]


REFUSING = """
import ctypes, os
from gpu_accel.cuda_llm import seccomp

libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
print(seccomp.restrict())
calls = {
    "unshare": lambda: libc.unshare(0),  # asks for nothing, which is otherwise granted
    "ptrace": lambda: libc.ptrace(0, 0, None, None),
    "keyctl": lambda: libc.syscall(seccomp.REFUSED["keyctl"][os.uname().machine == "aarch64"], 0, -3, 0),
    "getppid": lambda: libc.getppid(),
}
for name, call in calls.items():
    print(name, "refused" if call() == -1 and ctypes.get_errno() == 1 else "done")
assert os.fork() or os._exit(0) is None
os.wait()
"""


def test_system_calls_that_are_refused(sandbox: Sandbox) -> None:
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", REFUSING], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert sandbox.level["calls"] == first
    if first.startswith("none refused"):
        pytest.skip(first)
    assert rest == ["unshare refused", "ptrace refused", "keyctl refused", "getppid done"]


def test_a_filter_ends_where_it_should() -> None:
    """Every jump of the filter leads to one of its two last steps, forwards and within a byte."""
    import struct

    for machine in ("x86_64", "aarch64"):
        code = seccomp.program(machine)
        steps = list(struct.iter_unpack("=HBBI", code))
        last = len(steps) - 1
        assert [one[3] for one in steps[-2:]] == [0x7FFF0000, 0x00050001] and len(steps) == len(seccomp.REFUSED) + 6
        for at, (what, yes, no, _) in enumerate(steps[:-2]):
            targets = {at + 1 + step for step in (yes, no) if step}
            assert what == 0x20 or targets == {last}, (machine, at)


def test_bubblewrap_is_told_of_or_does_what_it_says(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    around = sandbox.level["around"]
    assert "not installed" in around or "does not work" in around or "(bubblewrap)" in around
    if "(bubblewrap)" in around:  # a host candidate sees none of the processes outside
        judged = check_host("import os\ndef run(x):\n    raise ValueError(os.getppid())\n", "softmax", sandbox=sandbox)
        assert int(judged.detail.rsplit(":", 1)[1]) < 10, judged
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho bwrap: no permissions to create new namespace 1>&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command, words = bubblewrap.wrapper(tmp_path)
    assert command == [] and "no permissions" in words
    broken.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    bubblewrap._refused.cache_clear()
    command, words = bubblewrap.wrapper(tmp_path)
    assert command[-1] == "--" and ["--bind", str(tmp_path), str(tmp_path)] == command[-6:-3]
    assert "(bubblewrap)" in words and not any(sys.prefix.startswith(f"{one}/") for one in bubblewrap._hidden())
    bubblewrap._refused.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert bubblewrap.wrapper(tmp_path) == ([], "none: bubblewrap is not installed")


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (RIGHT, Verdict.ACCEPTED),
        ("self.linear(x)", Verdict.WRONG),
        ("torch.zeros(x.shape[0], 24)", Verdict.WRONG),
        (RIGHT.replace("x @", "x.half().float() @"), Verdict.WRONG),
        (RIGHT + ".to(torch.bfloat16)", Verdict.WRONG),
        (RIGHT + "[:4]", Verdict.WRONG),
    ],
)
def test_kernelbench_problems(answer: str, verdict: Verdict, sandbox: Sandbox) -> None:
    judged = check_model(PROBLEM, ANSWER.format(answer), sandbox=sandbox, seed=3, trials=2)
    assert judged.verdict is verdict, judged
    assert LABEL in judged.verified_by


FORWARD = "return torch.relu(self.linear(x))"
HIDDEN = "x[:, :24].sign().clamp(max=0) * torch.inf"  # -inf and NaN, as masks of scores give


@pytest.mark.parametrize(
    "problem",
    ["", "x = (", "\0", PROBLEM.replace("class Model", "class Other"), PROBLEM.replace(FORWARD, "return 1 / 0"),
     PROBLEM.replace(FORWARD, "return {'a': x}"), PROBLEM.replace(FORWARD, "return ()")],
    ids=["empty", "no Python", "zero byte", "no Model", "raises", "table", "nothing"],
)  # fmt: skip
def test_a_problem_that_does_not_run_is_no_verdict_on_its_answer(problem: str, sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInputError, match="the problem (does not run here|gives no outputs)"):
        check_model(problem, ANSWER.format(RIGHT), sandbox=sandbox, seed=3, trials=1)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [(f"({RIGHT}) + {HIDDEN}", Verdict.ACCEPTED), (RIGHT, Verdict.WRONG), ("torch.zeros(5, 24)", Verdict.WRONG)],
)
def test_infinity_where_the_problem_gives_it(answer: str, verdict: Verdict, sandbox: Sandbox) -> None:
    problem = PROBLEM.replace(FORWARD, f"{FORWARD} + {HIDDEN}")
    judged = check_model(problem, ANSWER.format(answer), sandbox=sandbox, seed=3, trials=1)
    assert judged.verdict is verdict, judged


@pytest.mark.parametrize("answer", ["", " ", "x = 1"])
def test_an_answer_without_a_model(answer: str, sandbox: Sandbox) -> None:
    assert check_model(PROBLEM, answer, sandbox=sandbox, seed=3, trials=1).verdict is Verdict.COMPILE_ERROR
