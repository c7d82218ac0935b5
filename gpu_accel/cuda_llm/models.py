"""Proposers that are language models: any endpoint with OpenAI's protocol, Anthropic's, or a local model.

Requests are plain HTTP by the standard library, to the address given and no other: a redirection is an error, or the
key would travel with it. A proxy that the environment names (`https_proxy`, `no_proxy`) is used as by other programs,
but never for a server on this machine. Every exchange is given to `record` (the search puts it into its transcript)
with tokens, price and time. A model that fails ends the search with its reason; what was found stays.
"""

from __future__ import annotations

import functools
import http.client
import ipaddress
import json
import math
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_accel.errors import GpuAccelError, InvalidInputError, UnsupportedError, shown

from .prompts import Message, kernels_in, messages
from .proposers import Attempt, Brief, Proposal

RETRIES = 3
LARGEST_REPLY = 4 << 20  # bytes
MOST_TOKENS = 10**9  # of one exchange; a server that counts more, or less than none, is not believed


class ModelError(GpuAccelError, RuntimeError):
    """A model that does not answer, or not in its protocol."""


@dataclass(frozen=True)
class Answer:
    """One reply."""

    text: str
    tokens: tuple[int, int]  # read, written


@dataclass
class Model:
    """What all models share: prompt, parse, account.

    Args:
        model: its name.
        prices: dollars per million tokens, read and written.
        max_tokens: of a reply.
    """

    model: str
    prices: tuple[float, float] = (0.0, 0.0)
    max_tokens: int = 4096
    name: str = field(default="", init=False)
    record: Callable[[dict[str, Any]], None] | None = field(default=None, init=False, repr=False)
    _history: Sequence[Attempt] | None = field(default=None, init=False, repr=False)
    _asked: int = field(default=-1, init=False, repr=False)  # the last number

    def propose(self, brief: Brief, history: Sequence[Attempt], count: int) -> list[Proposal]:
        """`count` replies to the prompt that the history calls for; what they hold is proposed as it is.

        Fewer, where the model fails after the first.

        Raises:
            ModelError: the model does not answer.
        """
        asked = messages(brief, history)
        made: list[Proposal] = []
        if history is not self._history:  # another search
            self._history, self._asked = history, -1
        for _ in range(count):
            begin = time.monotonic()
            self._asked = max(self._asked + 1, len(history))  # beyond the history: what was proposed twice is not there
            try:
                answer = self.ask(asked, self._asked)
            except ModelError:
                if not made:
                    raise
                break
            dollars = sum(tokens * price for tokens, price in zip(answer.tokens, self.prices, strict=True)) / 1e6
            if self.record:
                self.record({
                    "proposer": self.name, "model": self.model, "messages": asked, "reply": answer.text,
                    "tokens": list(answer.tokens), "dollars": dollars, "seconds": round(time.monotonic() - begin, 3),
                })  # fmt: skip
            # the first block is the candidate; a reply with several is one that does not keep to the form
            made.append(
                Proposal(text=kernels_in(answer.text)[0], note=self.model, tokens=answer.tokens, dollars=dollars)
            )
        return made

    def ask(self, asked: list[Message], number: int) -> Answer:
        """One reply; `number` differs from call to call, for models that draw by a seed."""
        raise NotImplementedError


@dataclass
class OpenAICompatible(Model):
    """Any server with POST {base_url}/chat/completions: vLLM, llama.cpp, Ollama, SGLang, hosted ones.

    Args:
        base_url: such as http://127.0.0.1:8000/v1.
        key: name of the environment variable with the key; none is sent without it.
        temperature: left to the server if None.
        timeout: seconds that a whole reply may take.
    """

    base_url: str = "http://127.0.0.1:8000/v1"
    key: str = ""
    temperature: float | None = 0.8
    timeout: float = 600.0

    def __post_init__(self) -> None:
        self.name = "openai-compatible"
        check_url(self.base_url)

    def ask(self, asked: list[Message], number: int) -> Answer:
        body: dict[str, Any] = {"model": self.model, "messages": asked, "max_tokens": self.max_tokens, "seed": number}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        headers = {"Authorization": f"Bearer {key_from(self.key)}"} if self.key else {}
        found = post(f"{self.base_url.rstrip('/')}/chat/completions", body, headers, self.timeout)
        try:
            text, usage = found["choices"][0]["message"]["content"], found.get("usage") or {}
            return Answer(_text("" if text is None else text), _tokens(usage, "prompt_tokens", "completion_tokens"))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{self.base_url} answers in another form: {json.dumps(found)[:200]}") from error


@dataclass
class Anthropic(Model):
    """Anthropic's Messages API; arguments as of `OpenAICompatible`."""

    base_url: str = "https://api.anthropic.com"
    key: str = "ANTHROPIC_API_KEY"
    timeout: float = 600.0

    def __post_init__(self) -> None:
        self.name = "anthropic"
        check_url(self.base_url)

    def ask(self, asked: list[Message], number: int) -> Answer:
        system = "\n\n".join(one["content"] for one in asked if one["role"] == "system")
        body = {"model": self.model, "max_tokens": self.max_tokens, "system": system,
                "messages": [one for one in asked if one["role"] != "system"]}  # fmt: skip
        headers = {"x-api-key": key_from(self.key), "anthropic-version": "2023-06-01"}
        found = post(f"{self.base_url.rstrip('/')}/v1/messages", body, headers, self.timeout)
        try:
            text = "".join(part["text"] for part in found["content"] if part.get("type") == "text")
            return Answer(_text(text), _tokens(found.get("usage") or {}, "input_tokens", "output_tokens"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{self.base_url} answers in another form: {json.dumps(found)[:200]}") from error


@dataclass
class Transformers(Model):
    """A local model through transformers.

    Args:
        model: a folder, or a name that transformers finds.
        loaded: (tokenizer, model) to use instead of loading.
    """

    loaded: tuple[Any, Any] | None = field(default=None, repr=False)
    device: str = "auto"
    temperature: float = 0.8

    def __post_init__(self) -> None:
        self.name = "transformers"

    def ask(self, asked: list[Message], number: int) -> Answer:
        tokenizer, model = self.loaded = self.loaded or self._load()
        text, tokens = generate(tokenizer, model, asked, max_tokens=self.max_tokens, temperature=self.temperature,
                                seed=number)  # fmt: skip
        return Answer(text, tokens)

    def _load(self) -> tuple[Any, Any]:
        try:
            import transformers
        except ImportError as error:
            raise UnsupportedError(f"a local model needs transformers: pip install transformers ({error})") from error
        import torch

        device = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.model)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(self.model, dtype="auto")
        except (OSError, ValueError) as error:
            raise ModelError(f"transformers does not load {self.model}: {str(error)[:300]}") from error
        return tokenizer, model.to(device).eval()


def generate(
    tokenizer: Any, model: Any, asked: list[Message], *, max_tokens: int, temperature: float, seed: int
) -> tuple[str, tuple[int, int]]:
    """(text, (tokens read, tokens written)) of a model of transformers; the prompt is cut on the left if too long."""
    import torch

    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    else:
        text = "\n\n".join(one["content"] for one in asked) + "\n\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    room = getattr(model.config, "max_position_embeddings", None) or 4096
    ids = ids[:, -max(room - max_tokens, 1) :].to(model.device)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id, **options,
        )  # fmt: skip
    new = out[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), (int(ids.shape[1]), int(new.shape[0]))


def _text(content: object) -> str:
    """Text that can be written to a file: half of a surrogate pair, which JSON can spell, becomes a question mark."""
    if not isinstance(content, str):
        raise TypeError(content)
    return content.encode("utf-8", "replace").decode("utf-8")


def _tokens(usage: dict[str, Any], read: str, written: str) -> tuple[int, int]:
    counts = [usage.get(name, 0) for name in (read, written)]
    if not all(isinstance(count, int | float) and 0 <= count <= MOST_TOKENS for count in counts):
        raise ValueError(counts)
    return int(counts[0]), int(counts[1])


def check_url(url: str) -> None:
    """The address of a server.

    Raises:
        InvalidInputError: it is none of HTTP.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        good = good and url.isascii() and url.isprintable() and " " not in url
    except (ValueError, AttributeError, TypeError):
        good = False
    if not good:
        raise InvalidInputError(f"base_url is {shown(url, 60)}; it begins with http:// or https:// and names a server")


def key_from(variable: str) -> str:
    """The key in an environment variable.

    Raises:
        InvalidInputError: it is not set, or holds what no key does.
    """
    if not variable.isidentifier():  # perhaps the key itself, so it is not repeated
        raise InvalidInputError("the key is given by the name of an environment variable that holds it")
    found = os.environ.get(variable)
    if not found:
        raise InvalidInputError(f"the environment variable {variable} holds no key")
    if not (found.isascii() and found.isprintable()):
        raise InvalidInputError(f"the environment variable {variable} holds a line break or a letter that no key has")
    return found


def post(url: str, body: dict[str, Any], headers: dict[str, str], timeout: float) -> dict[str, Any]:
    """POST JSON, get JSON; busy servers are asked again.

    Args:
        timeout: seconds from the request to the end of its reply.

    Raises:
        ModelError: no answer, an error status, a redirection, or no JSON.
    """
    data = json.dumps(body).encode()
    for attempt in range(RETRIES):
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
        try:
            text = _within(timeout, functools.partial(_read, request, timeout))
            found = json.loads(text)
            if not isinstance(found, dict):
                raise ModelError(f"{url} answers with no object")
            return found
        except _Status as error:
            if error.code in (429, 500, 502, 503, 529) and attempt + 1 < RETRIES:
                time.sleep(error.wait or 2.0**attempt)
                continue
            raise ModelError(f"{url} answers {error.code}: {error.said}") from error
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", error)
            raise ModelError(f"{url} does not answer: {_printable(str(why)) or type(why).__name__}") from error
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{url} answers with no JSON") from error
    raise AssertionError("unreachable")


class _Status(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, said: str, wait: float) -> None:
        super().__init__(code)
        self.code, self.said, self.wait = code, said, wait


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def http_error_302(self, *given: Any) -> None:  # type: ignore[override]
        return None  # so it is an error status like any other

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302  # type: ignore[assignment]


def _read(request: urllib.request.Request, timeout: float) -> bytes:
    """The bytes of a reply, as many as one may have."""
    handlers: list[Any] = [_NoRedirection]
    if _is_here(urllib.parse.urlsplit(request.full_url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout) as reply:
            return reply.read(LARGEST_REPLY)
    except urllib.error.HTTPError as error:
        with error:
            try:
                said = error.read(500).decode(errors="replace")
            except (OSError, http.client.HTTPException):
                said = ""
            if elsewhere := error.headers.get("Location"):
                said = f"it redirects to {elsewhere}"
            raise _Status(error.code, _printable(said), _retry_after(error)) from error


def _is_here(name: str) -> bool:
    """Whether a host's name or address is this machine's own for itself; a proxy has another idea of it."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _within(seconds: float, work: Callable[[], bytes]) -> bytes:
    """What `work` returns or raises, unless it takes longer, as with a server that sends a byte now and then."""
    found: list[bytes] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # raised below
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="reply")
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"no whole reply within {seconds:g} s")
    return found[0]


def _retry_after(error: urllib.error.HTTPError) -> float:
    """Seconds to wait before asking again, at most 30; 0 where the server does not say."""
    try:
        return min(30.0, max(0.0, float(error.headers.get("Retry-After") or 0)))  # of NaN 0
    except ValueError:
        return 0.0


def _printable(text: str) -> str:
    """What a server says, as far as a terminal may be shown it."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:500]).strip()


def prices_of(text: str) -> tuple[float, float]:
    """Dollars per million tokens, read and written, from the words of the command line.

    Raises:
        InvalidInputError: they are not two amounts.
    """
    try:
        read, written = (float(one) for one in text.split(","))
    except ValueError as error:
        raise InvalidInputError(f"--price is {shown(text, 40)}; it is two numbers, such as 0.5,1.5") from error
    if not (0 <= read < math.inf and 0 <= written < math.inf):
        raise InvalidInputError(f"--price is {shown(text, 40)}; prices are finite and not negative")
    return read, written


def make(
    name: str, *, model: str, base_url: str = "", key: str = "", price: str = "0,0", max_tokens: int = 4096
) -> Model:
    """A model by the words of the command line.

    Raises:
        InvalidInputError: something is missing or makes no sense.
    """
    if not model:
        raise InvalidInputError(f"--proposer {name} needs --model")
    read, written = prices_of(price)
    more: dict[str, Any] = {"prices": (read, written), "max_tokens": max_tokens}
    if name == "transformers":
        if base_url or key:
            raise InvalidInputError("--base-url and --key are for endpoints; transformers runs the model here")
        if model.startswith(("/", "./", "../")) and not os.path.isdir(model):
            raise InvalidInputError(f"there is no folder {shown(model, 200)} to load a model from")
        return Transformers(model, **more)
    if base_url:
        more["base_url"] = base_url
    if key:
        more["key"] = key
    made: OpenAICompatible | Anthropic
    made = OpenAICompatible(model, **more) if name == "openai-compatible" else Anthropic(model, **more)
    if made.key:
        key_from(made.key)  # said before a search begins
    return made
