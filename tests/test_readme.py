"""What README shows works: its Python runs, its commands exist and parse, its table is up to date."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.main import get_command  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from cli.main import app  # noqa: E402
from cli.papers import readme_table  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAPERS = {page.parent.name: page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("papers/*/README.md"))}


def blocks(language: str, text: str = README) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)
    assert found
    return found


def commands(program: str, text: str = README) -> list[list[str]]:
    """Their words, without variables that are set for them, and `&`."""
    lines = [
        shlex.split(line.removesuffix("&"), comments=True)
        for block in blocks("bash", text)
        for line in block.splitlines()
    ]
    lines = [words[1:] if words and re.match(r"[A-Z_]+=", words[0]) else words for words in lines]
    return [words for words in lines if words and words[0] == program]


def run(code: str, folder: Path, *starter: str) -> None:
    script = folder / "example.py"  # a file, as Triton reads the source of its functions
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *starter, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_it_leads_with_the_two_commands() -> None:
    assert [words[1] for words in commands("make")[:2]] == ["fa3", "test"]
    assert README.index("make test") < README.index("## ")


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_its_python_runs(number: int, tmp_path: Path) -> None:
    if "transformers" in blocks("python")[number]:
        pytest.importorskip("transformers")
    run(blocks("python")[number], tmp_path)


@pytest.mark.parametrize("paper", [name for name, text in PAPERS.items() if "```python" in text])
def test_the_python_of_a_paper_runs(paper: str, tmp_path: Path) -> None:
    run("\n".join(code for code in blocks("python", PAPERS[paper]) if "torchrun" not in code), tmp_path)


SCRIPTS = [
    code for text in PAPERS.values() if "```python" in text for code in blocks("python", text) if "torchrun" in code
]


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_what_is_started_with_torchrun_runs_on_two_ranks(number: int, tmp_path: Path) -> None:
    if "transformers" in SCRIPTS[number]:
        pytest.importorskip("transformers")
    run(SCRIPTS[number], tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_what_takes_several_gpus_says_so() -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines() if "--nproc" in line]
    assert lines and all("GPUs" in line.partition("#")[2] for line in lines)


def test_its_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = {words[1] for words in commands("make")} | set(re.findall(r"`make ([a-z0-9-]+)", README))
    assert named and not named - targets


@pytest.mark.parametrize("paper", PAPERS)
def test_the_commands_of_a_paper_parse(paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = commands("gpu-accel", PAPERS[paper])
    assert found
    for words in found:
        for name in words:
            if name.endswith(".py"):
                (tmp_path / name).touch()
        test_its_commands_parse(words)


@pytest.mark.parametrize("text", [README, *PAPERS.values()], ids=["README", *PAPERS])
def test_links_within_a_page_lead_to_its_headings(text: str) -> None:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert not set(re.findall(r"\]\(#([^)]+)\)", text)) - anchors


@pytest.mark.parametrize("words", commands("gpu-accel"), ids=" ".join)
def test_its_commands_parse(words: list[str]) -> None:
    group = get_command(app)
    name, *arguments = words[1:]
    command = group.commands[name]
    if hasattr(command, "commands"):
        command, arguments = command.commands[arguments[0]], arguments[1:]
    with command.make_context(name, arguments) as context:  # raises a usage error for an unknown option
        assert context.params


@pytest.mark.parametrize("words", [w for w in commands("gpu-accel") if w[1] == "run"], ids=" ".join)
def test_its_runs_have_a_plan(words: list[str], tmp_path: Path) -> None:
    """On a CPU, whatever is here; --dry-run compiles nothing, but refuses unknown names and shapes."""
    arguments = [*words[1:], "--dry-run", "--json", "--device", "cpu", "--results", str(tmp_path)]
    if "--nproc" not in words:  # a process of its own takes seconds to import torch
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return
    own = subprocess.run(
        [sys.executable, "-m", "cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert own.returncode == 0, own.stderr


def test_its_table_of_papers_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_ACCEL_PAPERS", raising=False)
    block = re.search(r"<!-- begin generated: papers -->\n(.*?)\n?<!-- end generated: papers -->", README, flags=re.S)
    assert block
    assert block[1].strip() == readme_table().strip(), "run `make readme`"


def test_its_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("https://")]
    missing = [link for link in links if not (ROOT / link).exists()]
    assert links and not missing
