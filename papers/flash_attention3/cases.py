"""The grids: which shapes an experiment runs on a GPU, on a CPU in Triton's interpreter, and when shapes are given.

A case is a flat dictionary with every condition of an attention call: pass, batch, seqlen_q, seqlen_k, heads, heads_kv,
head_dim, causal, dtype, input.
"""

from __future__ import annotations

from gpu_accel.errors import InvalidInputError
from gpu_accel.workbench.experiment import Case, Scalar, Settings

from . import capture

TOKENS = 16384  # tokens in a batch, whatever the sequence length (paper, section 4.1)
HIDDEN = 2048  # heads * head_dim
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
SEQLENS_FP8 = (512, 1024, 2048, 4224, 8448, 16896)  # multiples of 132 SMs x 32 from 4k on (paper, appendix C.2)
SEQLENS_TEXT = (512, 1024, 2048, 4096)  # the text has 5.6 thousand tokens
SEQLENS_QUICK = (1024, 8192)

DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp8": "e4m3"}  # --precision -> the dtype word of records

# Small shapes for the interpreter, each for a reason.
_CPU = (
    {"batch": 1, "seqlen_q": 128, "seqlen_k": 128, "heads": 2, "head_dim": 64, "causal": False},  # whole tiles
    {"batch": 2, "seqlen_q": 67, "seqlen_k": 131, "heads": 1, "head_dim": 64, "causal": True},  # odd, bottom-right
    {"batch": 1, "seqlen_q": 97, "seqlen_k": 97, "heads": 2, "heads_kv": 1, "head_dim": 128, "causal": True},  # GQA
    {"batch": 1, "seqlen_q": 1, "seqlen_k": 97, "heads": 2, "heads_kv": 1, "head_dim": 128, "causal": False},  # one row
)
_CPU_QUICK = _CPU[:2]
_CPU_TEXT = (160,)


def attention_cases(settings: Settings, *, direction: str) -> list[Case]:
    """The cases of `forward` and `backward`.

    On a GPU the paper's grid (head_dim x causal x seqlen, 16k tokens, hidden size 2048), or the captured text's own
    heads for input "smollm2"; on a CPU a handful of small shapes. `settings.shapes` takes the place of both.
    """
    if settings.shapes:
        grid = [shape for given in settings.shapes for shape in _complete(given, settings)]
    elif settings.input == "smollm2":
        lengths = SEQLENS_TEXT if settings.on_gpu else _CPU_TEXT
        layers = len(capture.LAYERS) if settings.on_gpu else 1
        grid = [text_shape(n, layers=layers) for n in (lengths[:2] if settings.quick else lengths)]
    elif settings.on_gpu:
        lengths = SEQLENS_FP8 if settings.precision == "fp8" else SEQLENS
        dims = HEAD_DIMS
        if settings.quick:
            lengths, dims = SEQLENS_QUICK, (128,)
        grid = [paper_shape(n, head_dim=d, causal=c) for d in dims for c in (False, True) for n in lengths]
    else:
        grid = list(_CPU_QUICK if settings.quick else _CPU)
    return [make_case(shape, settings, direction=direction) for shape in grid]


def paper_shape(seqlen: int, *, head_dim: int, causal: bool) -> dict[str, Scalar]:
    """One shape of the paper's grid: about 16k tokens in all, hidden size 2048."""
    return {
        "batch": max(1, round(TOKENS / seqlen)),
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
        "heads": HIDDEN // head_dim,
        "head_dim": head_dim,
        "causal": causal,
    }


def text_shape(seqlen: int, *, layers: int = 1) -> dict[str, Scalar]:
    """The captured model's own shape; its layers take the place of a batch."""
    return {
        "batch": layers,
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
        "heads": capture.HEADS,
        "heads_kv": capture.HEADS_KV,
        "head_dim": capture.HEAD_DIM,
        "causal": True,
    }


def make_case(shape: dict[str, Scalar], settings: Settings, *, direction: str = "forward", dtype: str = "") -> Case:
    """A shape with everything else that a record must say."""
    return {
        "pass": direction,
        "batch": shape["batch"],
        "seqlen_q": shape["seqlen_q"],
        "seqlen_k": shape["seqlen_k"],
        "heads": shape["heads"],
        "heads_kv": shape.get("heads_kv", shape["heads"]),
        "head_dim": shape["head_dim"],
        "causal": shape["causal"],
        "dtype": dtype or DTYPES[settings.precision],
        "input": settings.input,
    }


def _complete(given: Case, settings: Settings) -> list[dict[str, Scalar]]:
    """A shape as the user typed it, with what was left out: both values of causal, the paper's batch and heads."""
    shape = dict(given)
    both = shape.pop("seqlen", None)
    for axis in ("seqlen_q", "seqlen_k"):
        if both is not None:
            shape.setdefault(axis, both)
    shape.setdefault("seqlen_q", shape.get("seqlen_k", 0))
    shape.setdefault("seqlen_k", shape["seqlen_q"])
    if settings.input == "smollm2":
        fixed = text_shape(int(shape["seqlen_q"] or 0), layers=len(capture.LAYERS))
        wrong = [key for key in ("heads", "heads_kv", "head_dim", "causal") if shape.get(key, fixed[key]) != fixed[key]]
        if wrong or shape["seqlen_q"] != shape["seqlen_k"] or not 1 <= int(shape.get("batch", 1)) <= fixed["batch"]:
            raise InvalidInputError(
                f"shape {given} does not fit input smollm2: {fixed['heads']} query heads, {fixed['heads_kv']} key "
                f"heads, head_dim {fixed['head_dim']}, causal, seqlen_q = seqlen_k, batch 1 to {fixed['batch']} "
                "(layers). For example seqlen=1024, or batch=1,seqlen=2k"
            )
        shape = {**fixed, **shape}
    if not shape["seqlen_q"]:
        raise InvalidInputError(f"shape {given} has no sequence length; for example seqlen=2048")
    shape.setdefault("head_dim", 128)
    shape.setdefault("heads", shape.get("heads_kv", max(1, HIDDEN // int(shape["head_dim"]))))
    shape.setdefault("heads_kv", shape["heads"])
    shape.setdefault("batch", max(1, round(TOKENS / int(shape["seqlen_q"]))) if settings.on_gpu else 1)
    if int(shape["heads"]) % int(shape["heads_kv"]):
        raise InvalidInputError(f"heads ({shape['heads']}) must be a multiple of heads_kv ({shape['heads_kv']})")
    if "causal" in shape:
        return [shape]
    return [{**shape, "causal": causal} for causal in (False, True)]
