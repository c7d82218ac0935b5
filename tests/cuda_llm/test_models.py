"""Language models as proposers: exact against a scripted server, and the whole path with a real small model."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from gpu_accel.cuda_llm import TASKS, Sandbox, Verdict, optimize_kernel
from gpu_accel.cuda_llm.artefact import attempts_of
from gpu_accel.cuda_llm.models import Anthropic, ModelError, OpenAICompatible, Transformers, _is_here, make
from gpu_accel.cuda_llm.prompts import kernels_in, messages
from gpu_accel.cuda_llm.proposers import Attempt, Brief, Files, Replay
from gpu_accel.cuda_llm.verdict import Judgement, Kind
from gpu_accel.errors import InvalidInputError
from papers.flash_attention3 import capture

_spec = importlib.util.spec_from_file_location("cuda_llm_servers", Path(__file__).with_name("servers.py"))
assert _spec and _spec.loader
servers = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(servers)

REVERSE = TASKS["reverse"]
WIDER = REVERSE.start.replace("# BLOCK = 256", "# BLOCK = 512")
WRONG = REVERSE.start.replace("n - 1 - i", "i")


def fenced(source: str) -> str:
    return f"Here is a kernel:\n```python\n{source}```\nIt is fast."


def scripted(replies: list[str], seen: list):
    def answer(path: str, body: dict, headers: dict):
        seen.append((path, body, headers))
        return 200, servers.completion(replies[len(seen) - 1])

    return answer


def test_a_scripted_search_goes_as_the_script_says(sandbox: Sandbox, tmp_path: Path) -> None:
    """Malformed, wrong, right: each reason is in the next prompt; tokens, money and transcript add up."""
    seen: list = []
    with servers.served(scripted(["no kernel today", fenced(WRONG), fenced(WIDER)], seen)) as url:
        proposer = OpenAICompatible("tiny", prices=(1.0, 2.0), base_url=url)
        found = optimize_kernel(
            REVERSE.start, proposer=proposer, candidates=3, batch=1, sandbox=sandbox, out=tmp_path / "run"
        )
    verdicts = [one.judgement.name for one in found.attempts]
    assert verdicts == ["accepted", "malformed", "wrong(copied_input)", "accepted"]
    assert [path for path, *_ in seen] == ["/v1/chat/completions"] * 3
    asked = [body["messages"][1]["content"] for _, body, _ in seen]
    assert "rejected" not in asked[0] and "launch headers" in asked[1] and "out is a copy of x" in asked[2]
    assert all(body["model"] == "tiny" for _, body, _ in seen)
    assert found.attempts[3].tokens == (100, 50) and found.dollars == pytest.approx(3 * 200e-6)
    lines = [json.loads(line) for line in (tmp_path / "run" / "transcript.jsonl").read_text().splitlines()]
    assert [line["reply"] for line in lines] == ["no kernel today", fenced(WRONG), fenced(WIDER)]
    again = optimize_kernel(REVERSE.start, proposer=Replay(tmp_path / "run"), candidates=9, sandbox=sandbox)
    assert [one.judgement.name for one in again.attempts] == verdicts
    assert [one.digest for one in again.attempts] == [one.digest for one in attempts_of(tmp_path / "run")]


def test_money_ends_a_search(sandbox: Sandbox) -> None:
    seen: list = []
    with servers.served(scripted(["none"] * 9, seen)) as url:
        proposer = OpenAICompatible("tiny", prices=(10_000.0, 0.0), base_url=url)  # a dollar a call
        found = optimize_kernel(REVERSE.start, proposer=proposer, dollars=2.0, sandbox=sandbox)
    assert len(seen) == 2 and "2 dollars" in found.note
    assert found.dollars == pytest.approx(1.0), "the second is a repeat and no attempt"


def test_money_for_nothing_is_spent_after_resuming_too(sandbox: Sandbox, tmp_path: Path) -> None:
    seen: list = []
    with servers.served(scripted(["none"] * 9, seen)) as url:
        proposer = OpenAICompatible("tiny", prices=(10_000.0, 0.0), base_url=url)
        for dollars in (2.0, 3.0):
            found = optimize_kernel(REVERSE.start, proposer=proposer, dollars=dollars, sandbox=sandbox,
                                    out=tmp_path / "run", resume=dollars > 2)  # fmt: skip
    assert len(seen) == 3 and "3 dollars" in found.note


def test_a_server_of_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would be told prompts and key, or, on another machine, know nothing of it."""
    seen: list = []
    with servers.served(scripted([], seen)) as proxy, servers.served(scripted(["x"], mine := [])) as url:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.removesuffix("/v1"))
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert OpenAICompatible("tiny", base_url=url).ask([], 0).text == "x"
    assert len(mine) == 1 and not seen
    assert all(map(_is_here, ("127.9.9.9", "::1", "localhost"))) and not any(map(_is_here, ("10.0.0.1", "a.org", "")))


@pytest.mark.parametrize(
    ("status", "reply", "why"),
    [
        (400, {"error": "no such model"}, "no such model"),
        (200, b"<html>", "no JSON"),
        (200, {"choices": []}, "another form"),
        (200, b"[1]", "no object"),
    ],
)
def test_a_server_that_fails_is_reported(status: int, reply, why: str, sandbox: Sandbox) -> None:
    with servers.served(lambda *given: (status, reply)) as url, pytest.raises(ModelError, match=why):
        optimize_kernel(REVERSE.start, proposer=OpenAICompatible("m", base_url=url), sandbox=sandbox)


def drip(connection) -> None:
    for byte in b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 40:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def with_tokens(count: str) -> bytes:
    return b'{"choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":%s}}' % count.encode()


HEAD = b"HTTP/1.1 200 OK\r\n"
RUBBISH = {
    "no status": (b"\x1b[2Jrubbish\r\n\r\n", "not answer: .{1,3}2Jrubbish"),
    "a long line": (b"HTTP/1.1 " + b"a" * 100_000, "not answer"),
    "many headers": (HEAD + b"a: b\r\n" * 200, "not answer"),
    "half a chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\n{", "not answer"),
    "half an error": (b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{", "answers 400"),
    "half a body": (HEAD + b"Content-Length: 9\r\n\r\n{", "no JSON"),
    "deep": (HEAD + b"\r\n" + b"[" * 100_000, "no JSON"),
    "text in parts": (HEAD + b'\r\n{"choices":[{"message":{"content":[1]}}]}', "another form"),
    **{f"{count} tokens": (HEAD + b"\r\n" + with_tokens(count), "another form")
       for count in ("-5", "1e999", "NaN", "1" + "0" * 40)},
}  # fmt: skip


@pytest.mark.parametrize("what", RUBBISH)
def test_rubbish_is_an_error_of_the_model(what: str) -> None:
    said, why = RUBBISH[what]
    with servers.raw(lambda connection: connection.sendall(said)) as url, pytest.raises(ModelError, match=why) as got:
        OpenAICompatible("m", base_url=url).ask([], 0)
    assert str(got.value).isprintable()


def test_a_reply_that_never_ends_is_given_up() -> None:
    """Neither one byte now and then, which no timeout of a socket sees, nor more bytes than a reply has."""
    with servers.raw(drip) as url, pytest.raises(ModelError, match=r"no whole reply within 0.3 s"):
        OpenAICompatible("m", base_url=url, timeout=0.3).ask([], 0)

    def flood(connection) -> None:
        connection.sendall(HEAD + b"\r\n")
        while True:
            connection.sendall(b" " * 65536)

    with servers.raw(flood) as url, pytest.raises(ModelError, match="no JSON"):
        OpenAICompatible("m", base_url=url).ask([], 0)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirection_gets_the_key(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    heard: list[bytes] = []
    with servers.raw(heard.append) as elsewhere:
        said = f"HTTP/1.1 {status} Moved\r\nLocation: {elsewhere.replace('127.0.0.1', 'localhost')}\r\n\r\n"
        with (
            servers.raw(lambda connection: connection.sendall(said.encode())) as url,
            pytest.raises(ModelError, match=f"answers {status}: it redirects to http://localhost"),
        ):
            OpenAICompatible("m", base_url=url, key="A_KEY").ask([], 0)
    assert not heard


@pytest.mark.parametrize("after", ["nan", "-5", "inf", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_strange_time_to_wait(after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    here = threading.get_ident()  # a server of another test may still be asleep now and then
    keep = lambda seconds: slept.append(seconds) if threading.get_ident() == here else None  # noqa: E731
    monkeypatch.setattr("gpu_accel.cuda_llm.models.time.sleep", keep)
    said = f"HTTP/1.1 429 Busy\r\nRetry-After: {after}\r\n\r\n".encode()
    with servers.raw(lambda connection: connection.sendall(said)) as url, pytest.raises(ModelError, match="429"):
        OpenAICompatible("m", base_url=url).ask([], 0)
    assert slept == ([30, 30] if after == "inf" else [1, 2])


@pytest.mark.parametrize("key", ["line\n", "schlüssel"])
def test_what_no_key_holds(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", key)
    with pytest.raises(InvalidInputError, match="A_KEY"):
        OpenAICompatible("m", key="A_KEY").ask([], 0)
    with pytest.raises(InvalidInputError, match="by the name") as got:
        OpenAICompatible("m", key="sk-the-key-itself").ask([], 0)
    assert "sk-" not in str(got.value)


def test_half_a_surrogate_pair_can_be_kept(sandbox: Sandbox, tmp_path: Path) -> None:
    with servers.served(lambda *given: (200, servers.completion("\ud800"))) as url:
        proposer = OpenAICompatible("m", base_url=url)
        found = optimize_kernel(REVERSE.start, proposer=proposer, candidates=1, sandbox=sandbox, out=tmp_path / "run")
    assert found.attempts[1].text == "?" and attempts_of(tmp_path / "run")[1].text == "?"


def test_what_was_answered_before_a_failure_counts(sandbox: Sandbox) -> None:
    """And each call of a search has a seed of its own."""
    seeds: list[int] = []

    def answer(path, body, headers):
        seeds.append(body["seed"])
        return (200, servers.completion("same")) if len(seeds) < 3 else (400, {"error": "over"})

    with servers.served(answer) as url:
        proposer = OpenAICompatible("m", base_url=url, prices=(1.0, 2.0))
        found = optimize_kernel(REVERSE.start, proposer=proposer, dollars=5.0, sandbox=sandbox)
    assert seeds == [1, 2, 3, 4] and "The model failed" in found.note
    assert len(found.attempts) == 2 and found.dollars == pytest.approx(200e-6)


def test_nobody_listens(sandbox: Sandbox) -> None:
    nobody = OpenAICompatible("m", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(ModelError, match="does not answer"):
        optimize_kernel(REVERSE.start, proposer=nobody, sandbox=sandbox)


def test_a_busy_server_is_asked_again() -> None:
    calls: list[int] = []

    def answer(*given):
        calls.append(1)
        return (200, servers.completion("x")) if len(calls) == 2 else (503, {"error": "busy"})

    with servers.served(answer) as url:
        assert OpenAICompatible("m", base_url=url).ask([], 0).text == "x"
    assert len(calls) == 2


def test_anthropic_s_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list = []

    def answer(path, body, headers):
        seen.append((path, body, headers))
        return 200, {"content": [{"type": "thinking", "thinking": "?"}, {"type": "text", "text": "hello"}],
                     "usage": {"input_tokens": 3, "output_tokens": 4}}  # fmt: skip

    with servers.served(answer) as url:
        proposer = Anthropic("claude", base_url=url.removesuffix("/v1"))
        with pytest.raises(InvalidInputError, match="ANTHROPIC_API_KEY"):
            monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
            proposer.ask([], 0)
        monkeypatch.setenv("ANTHROPIC_API_KEY", "secret")
        found = proposer.ask([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], 0)
    assert found.text == "hello" and found.tokens == (3, 4)
    path, body, headers = seen[0]
    assert path == "/v1/messages" and body["system"] == "s" and [one["role"] for one in body["messages"]] == ["user"]
    lower = {name.lower(): value for name, value in headers.items()}
    assert lower["x-api-key"] == "secret" and lower["anthropic-version"] == "2023-06-01"


def test_a_prompt_has_its_three_parts_and_no_secret() -> None:
    brief = Brief(task=REVERSE, start=REVERSE.candidate, target="h100-sxm")
    system, user = (one["content"] for one in messages(brief, []))
    assert "/// launch" in system and "H100" in user and "GB/s" in user and REVERSE.title in user
    assert REVERSE.candidate.source in user and "seed" not in user
    hidden = REVERSE.held_out(3)
    assert not any(f"n = {dims['n']}," in user for dims in hidden[:2])
    best = Attempt(number=1, candidate=REVERSE.candidate.with_(BLOCK=512), ms=0.125, time=1.0,
                   judgement=Judgement(verdict=Verdict.ACCEPTED))  # fmt: skip
    bad = Attempt(number=2, candidate=None, text="x = 1", judgement=Judgement(verdict=Verdict.MALFORMED, detail="what"))
    user = messages(brief, [best, bad])[1]["content"]
    assert "0.125 ms" in user and "BLOCK = 512" in user and "malformed: what" in user


def test_kernels_are_found_in_replies() -> None:
    assert kernels_in("a\n```cpp\nx\n```\nb\n```\ny\n```") == ["x\n", "y\n"]
    assert kernels_in("```\nnot closed") == ["not closed"]
    assert kernels_in("bare") == ["bare"]


def test_files_in_a_folder(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(WIDER)
    (tmp_path / "b.py").write_text(WRONG)
    (tmp_path / "notes.txt").write_text("no kernel")
    found = optimize_kernel(REVERSE.start, proposer=Files(tmp_path), sandbox=sandbox)
    assert sorted((one.change, one.judgement.name) for one in found.attempts[1:]) == [
        ("a.py", "accepted"), ("b.py", "wrong(copied_input)"),
    ]  # fmt: skip
    assert found.attempts[2].judgement.kind in (Kind.COPIED_INPUT, None)
    with pytest.raises(InvalidInputError, match="no folder"):
        Files(tmp_path / "none")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"model": ""}, "needs --model"),
        ({"model": "m", "price": "1"}, "two numbers"),
        ({"model": "m", "price": "-1,2"}, "not negative"),
        *(({"model": "m", "base_url": url}, "http://")
          for url in ("localhost", "ftp://x", "http://", "http://[::1", "http://a b", "http://x:abc", "http://x:99999")),
    ],
)
def test_models_that_make_no_sense(words: dict, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        make("openai-compatible", **words)


def test_what_is_missing_is_said_before_a_search_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    for name, words, why in (
        ("anthropic", {"model": "m"}, "ANTHROPIC_API_KEY holds no key"),
        ("openai-compatible", {"model": "m", "key": "ANTHROPIC_API_KEY"}, "ANTHROPIC_API_KEY holds no key"),
        ("transformers", {"model": "./no/such/folder"}, "no folder"),
    ):
        with pytest.raises(InvalidInputError, match=why):
            make(name, **words)


@pytest.mark.slow
@pytest.mark.skipif(bool(capture._no_model()), reason=capture._no_model() or "SmolLM2 is here")
def test_a_real_model_completes_a_search(sandbox: Sandbox, tmp_path: Path) -> None:
    """SmolLM2 (135M) writes no kernel; what counts is that its reply comes by HTTP, is logged, and gets its verdict."""
    tokenizer, model, _ = capture._load_model()
    with servers.served(servers.of_model(tokenizer, model)) as url:
        proposer = OpenAICompatible("smollm2", base_url=url, max_tokens=12)
        found = optimize_kernel(REVERSE.start, proposer=proposer, candidates=1, batch=1, sandbox=sandbox, out=tmp_path)
    assert [one.judgement.verdict for one in found.attempts] == [Verdict.ACCEPTED, Verdict.MALFORMED]
    read, written = found.attempts[1].tokens
    assert read > 500 and 0 < written <= 12
    assert json.loads((tmp_path / "transcript.jsonl").read_text())["tokens"] == [read, written]


@pytest.mark.slow
@pytest.mark.skipif(bool(capture._no_model()), reason=capture._no_model() or "SmolLM2 is here")
@pytest.mark.skipif(
    not all(importlib.util.find_spec(one) for one in ("fastapi", "uvicorn")),
    reason="`transformers serve` needs fastapi and uvicorn: pip install 'transformers[serving]'",
)
def test_a_server_that_is_not_ours(sandbox: Sandbox, tmp_path: Path) -> None:
    """`transformers serve` with SmolLM2, as a user starts it."""
    tokenizer, model, _ = capture._load_model()
    folder = tmp_path / "smollm2"
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--device", "cpu"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen([*command, "--port", str(port)], env=environment, stderr=subprocess.DEVNULL)
    try:
        for _ in range(120):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert server.poll() is None, "the server has ended"
            time.sleep(1)
        proposer = OpenAICompatible(str(folder), base_url=f"http://127.0.0.1:{port}/v1", max_tokens=12)
        found = optimize_kernel(
            REVERSE.start, proposer=proposer, candidates=1, batch=1, sandbox=sandbox, out=tmp_path / "run"
        )
    finally:
        server.kill()
        server.wait()
    assert [one.judgement.verdict for one in found.attempts] == [Verdict.ACCEPTED, Verdict.MALFORMED]
    read, written = found.attempts[1].tokens
    assert read > 500 and 0 < written <= 12


def test_a_local_model_is_asked_by_transformers(sandbox: Sandbox) -> None:
    """A random model of a few thousand weights: its noise is a reply like any other."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=4096, **shape)
    proposer = Transformers("noise", loaded=(Bytes(), transformers.LlamaForCausalLM(config).eval()), max_tokens=5)
    found = optimize_kernel(REVERSE.start, proposer=proposer, candidates=2, batch=1, sandbox=sandbox)
    assert [one.judgement.verdict for one in found.attempts[1:]] == [Verdict.MALFORMED] * (len(found.attempts) - 1)
    assert found.attempts[1].tokens[1] == 5 and found.attempts[1].tokens[0] > 1000
    again = optimize_kernel(REVERSE.start, proposer=proposer, candidates=1, batch=1, sandbox=sandbox)
    assert again.attempts[1].text == found.attempts[1].text, "the same prompt, seed and model"


class Bytes:
    """A tokenizer of bytes."""

    chat_template, pad_token_id, eos_token_id = None, 0, None

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([list(text.encode())])}

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return bytes(ids.tolist()).decode(errors="replace").replace("\0", " ")
