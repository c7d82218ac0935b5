"""The inputs of a case: `normal` and `outliers` are drawn, `smollm2` comes from a real language model.

    normal     N(0, 1)
    outliers   N(0, 1) + N(0, 100) * Bernoulli(0.001), the paper's section 4.3
    smollm2    q, k, v of SmolLM2-135M on the Constitution of the United States, after the rotary embedding

Run as a program it makes the file that lets a machine without the model use `smollm2`:

    python3 -m papers.flash_attention3.inputs --tokens 4096 --out FILE
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from gpu_accel.errors import GpuAccelError, UnsupportedError
from gpu_accel.testing import QKV, make_qkv
from gpu_accel.workbench.experiment import Case

from . import capture

TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.bfloat16,  # what is quantised; the paper's inputs are 16 bits wide too
}


def why_not(case: Case) -> str:
    """Why the inputs of a case cannot be had here; empty when they can."""
    return capture.available(int(case["seqlen_q"])) if case["input"] == "smollm2" else ""


def source_of(case: Case) -> str:
    """The words of `Record.input_source`; empty for drawn inputs."""
    if case["input"] != "smollm2" or why_not(case):
        return ""
    layers = ", ".join(map(str, capture.LAYERS[: int(case["batch"])]))
    return f"SmolLM2-135M-Instruct after RoPE, layers {layers}; text.txt (sha256 {capture.text_hash()})"


def make(case: Case, seed: int, device: str, *, dtype: torch.dtype | None = None) -> QKV:
    """q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, heads_kv, head_dim), contiguous, fresh memory.

    Drawn inputs differ with the seed; "smollm2" is the same data for every seed. Raises UnsupportedError when the
    model or the text does not give what the case asks for.
    """
    dtype = dtype or TORCH_DTYPES[str(case["dtype"])]
    if case["input"] == "smollm2":
        return _captured(case, device, dtype)
    return make_qkv(
        batch=int(case["batch"]),
        seqlen_q=int(case["seqlen_q"]),
        seqlen_k=int(case["seqlen_k"]),
        heads=int(case["heads"]),
        heads_kv=int(case["heads_kv"]),
        head_dim=int(case["head_dim"]),
        kind=str(case["input"]),  # type: ignore[arg-type]
        dtype=dtype,
        device=device,
        seed=seed,
    )


def _captured(case: Case, device: str, dtype: torch.dtype) -> QKV:
    tokens, layers = int(case["seqlen_q"]), int(case["batch"])
    asked = (case["seqlen_k"], case["heads"], case["heads_kv"], case["head_dim"])
    if asked != (tokens, capture.HEADS, capture.HEADS_KV, capture.HEAD_DIM) or layers > len(capture.LAYERS):
        raise UnsupportedError(
            f"input smollm2 has {capture.HEADS} query heads, {capture.HEADS_KV} key heads, head_dim "
            f"{capture.HEAD_DIM}, seqlen_k = seqlen_q and at most {len(capture.LAYERS)} layers; got {case}"
        )
    taken = capture.load(tokens)
    q, k, v = (t[:layers, :tokens].to(device, dtype).contiguous().clone() for t in (taken.q, taken.k, taken.v))
    return QKV(q, k, v)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a capture and say where it is."""
    parser = argparse.ArgumentParser(
        prog="python3 -m papers.flash_attention3.inputs", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--tokens", type=int, default=4096, help="length of the capture (default %(default)s)")
    parser.add_argument("--out", type=Path, help="file to write (default: in the cache folder)")
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        parser.error(f"--tokens must be positive, got {options.tokens}")
    try:
        made = capture.run_model(options.tokens)
    except GpuAccelError as error:
        parser.exit(4, f"{error}\n")
    name = capture.cache_name(made.tokens)
    path = capture.write(made, options.out or capture.cache_folder() / name)
    print(f"{path}\n{made.source}\n{made.nll:.3f} nats a token")
    if options.out:
        print(f"elsewhere, put it into $GPU_ACCEL_CACHE or ~/.cache/gpu-accel as {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
