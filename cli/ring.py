"""`gpu-accel ring plan`: what a distributed attention would cost, and which schedule and layout to take.

`gpu-accel ring longest`: the longest sequence that fits in memory.
"""

from __future__ import annotations

import re
from typing import Annotated

import typer

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown

from . import output
from .console import out
from .options import JsonOption, OutputOption

app = typer.Typer(no_args_is_help=True, help="Ring attention: plan it before it runs.")
_SCALES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@app.command("plan")
def plan(
    seq: Annotated[str, typer.Option("--seq", help="Tokens of the whole sequence: 131072, 128k, 1m.")],
    gpus: Annotated[int, typer.Option("--gpus", help="How many GPUs.")],
    heads: Annotated[int, typer.Option("--heads", help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="Key heads.", show_default="as many")] = None,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Size of a head.")] = 128,
    batch: Annotated[int, typer.Option("--batch", help="Sequences.")] = 1,
    link: Annotated[
        str,
        typer.Option(
            "--link",
            help="Within a machine, and with a plus between machines: nvlink+ib400. "
            "nvlink, nvlink-nccl, ib400, ib200 or ib800.",
        ),
    ] = "nvlink+ib400",
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", help="GPUs of a machine.")] = 8,
    memory: Annotated[float, typer.Option("--memory", help="Memory of a GPU in GB.")] = 80.0,
    documents: Annotated[
        str | None, typer.Option("--documents", help="Lengths of packed documents, which add up: 4k,12k or 64x2k.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="No causal mask.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward.")] = False,
    fused: Annotated[
        bool, typer.Option("--fused/--separate", help="Results merged in a kernel's epilogue, or in extra passes.")
    ] = True,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """Compare the schedules for one attention: bytes, memory, modelled time and efficiency with intervals, and why.

    Times are modelled; exit code 4 when nothing fits in memory.
    """
    from gpu_accel.ring_attention.plan import plan as make_plan

    output.check_suffix(output_)
    made = make_plan(
        seq=_tokens(seq), heads=heads, kv_heads=kv_heads, gpus=gpus, link=link, head_dim=head_dim, batch=batch,
        causal=not full, backward=backward, gpus_per_node=gpus_per_node, memory_gb=memory,
        merge="fused" if fused else "separate", documents=False if documents is None else _lengths(documents),
    )  # fmt: skip
    payload = made.as_dict()
    if output_:
        rows = [{"kind": payload["kind"], **option} for option in payload["options"]]
        output.write(output_, rows, payload=payload, title=f"Ring attention, modelled: {made.title()}")
    if json_:
        return output.print_json(payload)
    out().print(made.explain(), markup=False, highlight=False, soft_wrap=True)


@app.command("longest")
def longest(
    gpus: Annotated[
        list[int] | None, typer.Option("--gpus", help="How many GPUs; repeatable. Default: 1, 2, 4.")
    ] = None,
    heads: Annotated[int, typer.Option("--heads", help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="Key heads.", show_default="as many")] = None,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Size of a head.")] = 128,
    batch: Annotated[int, typer.Option("--batch", help="Sequences.")] = 1,
    schedule: Annotated[str, typer.Option("--schedule", help="One that `ring plan` compares.")] = "kv_ring",
    memory: Annotated[float, typer.Option("--memory", help="Memory of a GPU in GB.")] = 80.0,
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward.")] = False,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """The longest sequence whose attention fits in the memory of so many GPUs, by counted bytes.

    Attention alone, with its shards, results and buffers. Exit code 4 when nothing fits on any of them.
    """
    from gpu_accel.ring_attention.longest import longest as tokens_of

    output.check_suffix(output_)
    rows = [
        {
            "gpus": n, "heads": heads, "kv_heads": kv_heads or heads, "head_dim": head_dim, "batch": batch,
            "schedule": schedule, "backward": backward, "memory_gb": memory,
            "tokens": tokens_of(
                gpus=n, heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=batch, schedule=schedule,
                memory_gb=memory, backward=backward,
            ),
        }
        for n in gpus or (1, 2, 4)
    ]  # fmt: skip
    if not any(row["tokens"] for row in rows):
        raise UnsupportedError(f"not one token fits in {memory:g} GB a GPU")
    if output_:
        output.write(output_, rows, payload={"longest": rows}, title="Longest sequences")
    if json_:
        return output.print_json({"longest": rows})
    for row in rows:
        out().print(
            f"{row['gpus']:>4} GPU{' ' if row['gpus'] == 1 else 's'}  {row['tokens']:>14,} tokens", highlight=False
        )


def _tokens(text: str, option: str = "--seq") -> int:
    found = re.fullmatch(r"(\d{1,15})([kmg]?)", text.strip().lower(), re.ASCII)
    if not found:
        raise InvalidInputError(f"{option} is {shown(text, 40)}: a number of tokens such as 131072, 128k or 1m")
    return int(found[1]) * _SCALES[found[2]]


def _lengths(text: str) -> list[int]:
    """Of documents: `64x2k` is 64 of them."""
    lengths: list[int] = []
    for part in text.split(","):
        times, _, length = part.rpartition("x")
        if not re.fullmatch(r"\s*\d{0,6}", times, re.ASCII):
            raise InvalidInputError(f"--documents has {shown(part, 40)}: lengths such as 4k,12k, or 64x2k for 64 of 2k")
        lengths += [_tokens(length, "--documents")] * int(times.strip() or 1)
    return lengths
