"""Folders of searches: one search at a time, whole files, and whatever somebody else may have put there."""

from __future__ import annotations

import copy
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_accel.cuda_llm import TASKS, Judgement, Pool, Sandbox, Verdict, check, optimize_kernel, progress
from gpu_accel.cuda_llm import search as search_module
from gpu_accel.cuda_llm.artefact import attempts_of, best_of, read_run
from gpu_accel.cuda_llm.candidate import Candidate
from gpu_accel.cuda_llm.folders import append_line, held, read_plain, write_whole
from gpu_accel.cuda_llm.host import check_host
from gpu_accel.cuda_llm.measure import Measured
from gpu_accel.cuda_llm.proposers import Brief, Proposal, Replay
from gpu_accel.cuda_llm.records_table import records_of
from gpu_accel.cuda_llm.report import export_traces, read_folder
from gpu_accel.cuda_llm.sandbox import remove
from gpu_accel.errors import GpuAccelError, HardwareError, InvalidInputError

REVERSE = TASKS["reverse"]
OTHER = REVERSE.candidate.with_(num_warps=16).text


class Clocked:
    """A sandbox that says it has a GPU; `check` and `measure` are replaced."""

    gpu, described = True, ""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A search of three candidates, timed by nobody."""
    monkeypatch.setattr(search_module, "check", lambda *given, **more: Judgement(verdict=Verdict.ACCEPTED, error=0.25))
    monkeypatch.setattr(search_module, "measure", lambda *given, **more: Measured(
        judgement=Judgement(verdict=Verdict.ACCEPTED), compared=2, slow={"candidate": (2.0, 2.0), "naive": (9.0, 9.0)},
        samples={"candidate": (2.0, 2.0), "copy": (1.0, 1.0), "library": (3.0, 3.0)}, library_error=0.5,
        warm={"candidate": (1.0, 1.0)}, method="events", warm_method="graph", clocks={"clock_mhz": 1980}, repeated=3,
        tensor_cores=(),
    ))  # fmt: skip
    env = {"gpu": "NVIDIA H100 80GB HBM3", "sku": "H100 SXM"}
    monkeypatch.setattr(search_module, "host", lambda: {"env": env, "commit": "c" * 40, "dirty": False})
    folder = tmp_path / "kept"
    run(folder, candidates=2)
    return folder


def run(folder: Path, **more: Any) -> Any:
    return optimize_kernel(REVERSE.start, out=folder, sandbox=Clocked(), peers=("library",), **more)  # type: ignore[arg-type]


def test_two_searches_do_not_share_a_folder(kept: Path) -> None:
    """Neither a second one that goes on meanwhile, nor one of another process; one that was killed holds nothing."""
    said: list[str] = []

    class Twice:
        name = "twice"

        def propose(self, brief: Brief, history: object, count: int) -> list[Proposal]:
            with pytest.raises(InvalidInputError, match="another search is at work") as error:
                run(kept, resume=True, candidates=9)
            said.append(str(error.value))
            raise RuntimeError("ends")

    before = (kept / "attempts.jsonl").read_bytes()
    with pytest.raises(RuntimeError, match="ends"):
        run(kept, resume=True, candidates=9, proposer=Twice())
    assert said and (kept / "attempts.jsonl").read_bytes() == before
    program = (
        "import sys, time; from pathlib import Path; from gpu_accel.cuda_llm.folders import held\n"
        "with held(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(kept)], stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline() == b"held\n"
        with pytest.raises(InvalidInputError, match="another search is at work"):
            run(kept, resume=True, candidates=9)
        other.send_signal(signal.SIGKILL)
    assert len(run(kept, resume=True, candidates=4).attempts) == 5
    (kept / ".lock").unlink()
    (kept / ".lock").symlink_to(kept / "elsewhere")
    with pytest.raises(InvalidInputError, match="cannot write"), held(kept):
        pass
    assert not (kept / "elsewhere").exists()


def test_what_was_cut_short_can_be_gone_on_with_more_than_once(kept: Path) -> None:
    """A line without its end is dropped, or completed, before the next one; it would spoil the log in its middle."""
    log = kept / "attempts.jsonl"
    for cut, stays in ((40, 2), (1, 3)):
        log.write_bytes(log.read_bytes()[:-cut])
        assert len(attempts_of(kept)) == stays
        for more in (1, 2):
            assert len(run(kept, resume=True, candidates=stays - 1 + more).attempts) == stays + more
        lines = log.read_bytes().splitlines()
        while len(lines) > 3:
            lines.pop()
        log.write_bytes(b"\n".join(lines) + b"\n")
    append_line(kept / "new.jsonl", "{}")
    assert (kept / "new.jsonl").read_bytes() == b"{}\n"


def test_a_search_goes_on_where_it_ran_and_with_its_kernel(kept: Path, sandbox: Sandbox) -> None:
    """Without a GPU it would have put `not timed` in the place of times; nor are those of another GPU its own."""
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    with pytest.raises(InvalidInputError, match="another kernel"):
        optimize_kernel(OTHER, out=kept, resume=True, sandbox=Clocked())  # type: ignore[arg-type]
    path = kept / "run.json"
    found = json.loads(path.read_text())
    for environment, gpu, why in (({}, False, "ran without a GPU"), ({"gpu": "H200"}, True, "ran on 'H200'")):
        path.write_text(json.dumps(found | {"environment": environment, "gpu": gpu}))
        with pytest.raises(InvalidInputError, match=why):
            run(kept, resume=True)
    path.write_text(json.dumps(found | {"environment": {"gpu": "H200"}}))
    with pytest.raises(InvalidInputError, match="without a GPU"):
        optimize_kernel(REVERSE.start, out=kept, resume=True, sandbox=sandbox)
    path.write_bytes(before["run.json"])
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before


def test_what_was_confirmed_elsewhere_is_confirmed_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = kept / "attempts.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows[1] |= {"confirmed": True, "time": 1e-9}
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    liar = Candidate.parse((kept / rows[1]["file"]).read_bytes())

    def check(candidate: Candidate, *given: object, **more: object) -> Judgement:
        return Judgement(verdict=Verdict.WRONG if candidate.digest == liar.digest else Verdict.ACCEPTED)

    monkeypatch.setattr(search_module, "check", check)
    found = run(kept, resume=True, candidates=2)
    assert found.best.digest != liar.digest and not found.attempts[1].ok


def places(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """Where something can be replaced in a value of JSON; of lists the first element."""
    yield at
    for key in value if isinstance(value, dict) else range(min(len(value), 1)) if isinstance(value, list) else ():
        yield from places(value[key], (*at, key))


def changed(value: Any, at: tuple, new: Any) -> Any:
    if not at:
        return new
    made = inner = copy.deepcopy(value)
    for key in at[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = new
    return made


BAD = (..., None, 10**400, "\x1b[2J\ud800", [], {"candidate": [1.0]})


def test_no_field_of_a_folder_is_trusted(kept: Path, tmp_path: Path) -> None:
    """Each in turn is missing or something else: whatever reads the folder works, or says what is wrong."""
    used: dict[str, Callable[[], Any]] = {
        "rows": lambda: [one.row() for one in read_folder(kept)],
        "traces": lambda: export_traces(read_folder(kept), tmp_path / "traces"),
        "records": lambda: [record.to_json() for one in read_folder(kept) for record in records_of(one)],
        "course": lambda: [progress.of_folder(one).speedups for one in read_folder(kept)],
        "attempts": lambda: attempts_of(kept),
        "replay": lambda: Replay(kept).propose(None, [], 9),  # type: ignore[arg-type]
    }
    for use in used.values():
        assert use()
    for name in ("run.json", "attempts.jsonl"):
        whole = (kept / name).read_text()
        first, rest = (whole, "") if name == "run.json" else (whole.splitlines()[0], whole.partition("\n")[2])
        first = json.loads(first)
        for place in places(first):
            for bad in BAD:
                if bad is ... and not place:
                    continue
                (kept / name).write_text(json.dumps(changed(first, place, bad)) + "\n" + rest)
                for what, use in used.items():
                    try:
                        use()
                    except GpuAccelError:
                        continue
                    except Exception as error:
                        pytest.fail(f"{what} of {name}: {place} is {bad!r:.30}: {error!r}")
        (kept / name).write_text(whole)


def test_other_files_than_a_search_writes(kept: Path, tmp_path: Path) -> None:
    """Pipes would be waited for, devices read for ever, and links lead out of the folder."""
    secret, theirs = tmp_path / "secret", tmp_path / "theirs"
    secret.write_text("not to be copied")
    theirs.write_text("stays")
    for name in ("run.json", "attempts.jsonl"):
        whole = (kept / name).read_bytes()
        for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
            (kept / name).unlink()
            make(kept / name)
            with pytest.raises(InvalidInputError):
                read_folder(kept)
            with pytest.raises(InvalidInputError):
                run(kept, resume=True)
            (kept / name).rmdir() if (kept / name).is_dir() else (kept / name).unlink()
            (kept / name).write_bytes(whole)
    best = best_of(kept)
    (kept / "best.py").write_text(OTHER)
    with pytest.raises(InvalidInputError, match="changed since it was timed"):
        export_traces(read_folder(kept), tmp_path)
    for name, text in (("best.py", best.text), ("0001-0123456789abcdef.py", "new")):
        (kept / name).unlink(missing_ok=True)
        (kept / name).symlink_to(theirs)
        write_whole(kept / name, text)
        assert (kept / name).read_text() == text and theirs.read_text() == "stays"
    (kept / "log").symlink_to(theirs)
    with pytest.raises(OSError):
        append_line(kept / "log", "{}")
    last = json.loads((kept / "attempts.jsonl").read_text().splitlines()[-1])["file"]
    (kept / last).unlink()
    (kept / last).symlink_to(secret)
    with pytest.raises(InvalidInputError):
        Replay(kept).propose(None, [], 9)  # type: ignore[arg-type]
    assert theirs.read_text() == "stays"


def test_a_disk_that_fills_up_leaves_what_was_there(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_run(kept)

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        run(kept, resume=True, candidates=5)
    assert read_run(kept) == before and not list(kept.glob(".run.json-*"))
    assert read_plain(kept / "best.py")


def test_files_of_winners_are_plain_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("pipe.json", "deep.json", "nothing.json"):
        with pytest.raises(InvalidInputError, match=name):
            progress.read(tmp_path / name)


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("nan")])
def test_times_that_are_none(seconds: float, sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInputError, match="positive number"):
        check(REVERSE.start, "reverse", sandbox=sandbox, seconds=seconds)
    assert check(REVERSE.start, "reverse", sandbox=sandbox, seconds=1e308).ok


def test_a_pool_that_does_not_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Sandbox] = []
    pool = Pool(2)
    lock, (first, second) = pool.lock, pool._all
    assert lock and lock.exists()

    def start(self: Sandbox) -> None:
        if self is second:
            raise HardwareError("does not start")

    monkeypatch.setattr(Sandbox, "_start", start)
    monkeypatch.setattr(Sandbox, "close", lambda self: ended.append(self))
    with pytest.raises(HardwareError, match="does not start"), pool:
        pass
    assert not lock.exists() and first in ended
    lock = Pool().lock
    gc.collect()
    assert lock and not lock.exists()


LIES = {
    "a pipe for its result": "os.mkfifo('result.json')",
    "a pipe for its log": "os.unlink('log.txt'); os.mkfifo('log.txt')",
    "a link for its log": "os.unlink('log.txt'); os.symlink('/etc/passwd', 'log.txt')",
    "an error of another type": "say({'error': []})",
    "a refusal of another type": "say({'error': 'refused', 'kind': {}})",
    "more than there is memory": "open('out0.bin', 'w').close(); "
    "say({'outputs': [[{'shape': [1 << 31], 'dtype': 'float64'}] * 3000] * 5})",
    "folders without end": "[(os.mkdir('d'), os.chdir('d')) for _ in range(1050)]",
    "a folder that is closed": "os.mkdir('d'); os.mkdir('d/e'); os.chmod('d/e', 0); os.chmod('d', 0)",
}


@pytest.mark.parametrize("lie", LIES)
def test_what_host_code_leaves_behind(lie: str, sandbox: Sandbox) -> None:
    """A verdict in no time, nothing read that only the harness may read, and nothing left."""
    source = (
        "import json, os\n\ndef say(what):\n    open('result.json', 'w').write(json.dumps(what))\n\n"
        f"def run(x):\n    {LIES[lie]}\n    os._exit(0)\n"
    )
    judged = check_host(source, "softmax", sandbox=sandbox, seed=2, seconds=5.0)
    assert judged.verdict in (Verdict.CRASHED, Verdict.COMPILE_ERROR), judged
    assert "root:" not in str(judged)
    assert sandbox._base and not list(sandbox._base.iterdir())


def test_links_are_removed_and_not_what_they_lead_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("stays")
    for place in (tmp_path / "job" / "a" / "b" / "c", tmp_path / "job" / "d"):
        place.mkdir(parents=True)
        (place / "link").symlink_to(tmp_path / "theirs")
        (place / "file").write_text("goes")

    def too_deep(*given: object, **more: object) -> None:
        raise RecursionError

    monkeypatch.setattr(shutil, "rmtree", too_deep)
    remove(tmp_path / "job")
    assert not (tmp_path / "job").exists() and (tmp_path / "theirs" / "file").read_text() == "stays"
