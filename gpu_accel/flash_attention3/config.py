"""Tile sizes and warps: looked up in `tuned/*.toml`, never searched for at run time.

A row is found by (pass, head_dim bucket, causal, dtype bytes); the interpreter always gets small tiles, so that tests
walk over several blocks quickly. `candidates` lists what `tune.py` tries on a GPU.
"""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpu_accel.compat import INTERPRET
from gpu_accel.flash_attention3.launch import capability

PASSES = ("forward", "backward_dkdv", "backward_dq")
BUCKETS = (64, 128, 192, 256)
_FOLDER = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class Config:
    """`block_m` query rows, `block_n` keys; `measured` says what was measured, on which `card` and `date`."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    measured: str = "not measured yet"
    date: str = ""
    card: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}, {self.num_warps} warps, {self.num_stages} stages"


def bucket(head_dim: int, head_dim_v: int) -> int:
    """The smallest tabulated head_dim that covers both."""
    return next((b for b in BUCKETS if max(head_dim, head_dim_v) <= b), BUCKETS[-1])


def table_name(device: torch.device) -> str:
    """`sm90` on Hopper, `default` elsewhere (and where no table of that architecture exists)."""
    if device.type == "cuda":
        name = "sm{}{}".format(*capability(device))
        if (_FOLDER / f"{name}.toml").exists():
            return name
    return "default"


@functools.cache
def table(name: str) -> dict[tuple[str, int, bool, int], Config]:
    """All rows of one file; a repeated or unknown key is an error."""
    rows = tomllib.loads((_FOLDER / f"{name}.toml").read_text())["config"]
    found: dict[tuple[str, int, bool, int], Config] = {}
    for row in rows:
        key = (row.pop("pass"), row.pop("head_dim"), row.pop("causal"), row.pop("dtype_bytes"))
        if key in found or key[0] not in PASSES or key[1] not in BUCKETS:
            raise ValueError(f"tuned/{name}.toml: repeated or unknown key {key}")
        found[key] = Config(**row, source=f"tuned/{name}.toml")
    return found


def lookup(
    pass_: str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    *,
    causal: bool,
    seqlen_q: int,
    varlen: bool,
    device: torch.device,
) -> Config:
    """The configuration of one launch."""
    if INTERPRET:
        return INTERPRETER[pass_]
    key = (pass_, bucket(head_dim, head_dim_v), causal, dtype.itemsize)
    config = table(table_name(device))[key]
    if pass_ == "forward" and not varlen and seqlen_q <= 64 < config.block_m:
        return SHORT[key[1] <= 128]
    return config


def within_blocks(config: Config, q_block: int, kv_block: int) -> Config:
    """The configuration with tiles that divide the blocks of a block mask (0: there is none)."""
    m, n = math.gcd(config.block_m, q_block or config.block_m), math.gcd(config.block_n, kv_block or config.block_n)
    if (m, n) == (config.block_m, config.block_n):
        return config
    why = f"{config.measured}; cut to the block mask's {q_block}x{kv_block}"
    return replace(config, block_m=m, block_n=n, measured=why)


INTERPRETER = {
    "forward": Config(32, 16, 4, 1, "interpreter", source="config.py"),
    "backward_dkdv": Config(16, 32, 4, 1, "interpreter", source="config.py"),
    "backward_dq": Config(32, 16, 4, 1, "interpreter", source="config.py"),
}

# Few query rows (decoding): a 64-row tile, the smallest that Hopper's matrix instructions take.
SHORT = {True: Config(64, 64, 4, 3, source="config.py"), False: Config(64, 32, 4, 2, source="config.py")}


def candidates(pass_: str, head_dim: int, *, dtype_bytes: int = 2) -> list[Config]:
    """At most 8 configurations worth timing for one key: (block_m, block_n, num_warps, num_stages)."""
    if dtype_bytes == 4:
        rows = [(64, 32, 4, 2), (64, 64, 4, 2), (32, 32, 4, 2), (128, 32, 8, 2)]
    else:
        rows = _CANDIDATES[pass_][bucket(head_dim, head_dim)]
    return [Config(*row) for row in rows]


_CANDIDATES = {
    "forward": {
        64: [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 3), (64, 64, 4, 3),
             (128, 128, 4, 2), (256, 64, 8, 3)],
        128: [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (64, 64, 4, 3),
              (64, 128, 4, 2)],
        192: [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)],
        256: [(128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)],
    },
    "backward_dkdv": {
        64: [(64, 128, 8, 2), (64, 128, 8, 3), (64, 128, 4, 2), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 2)],
        128: [(64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 3)],
        192: [(32, 64, 8, 2), (64, 64, 8, 2), (32, 128, 8, 2), (32, 64, 8, 3)],
        256: [(32, 64, 8, 2), (64, 64, 8, 2), (32, 64, 8, 3), (64, 64, 8, 1)],
    },
    "backward_dq": {
        64: [(128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 4)],
        128: [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 1), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3)],
        192: [(128, 32, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2)],
        256: [(64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 3), (64, 32, 4, 2), (128, 32, 8, 1)],
    },
}  # fmt: skip
