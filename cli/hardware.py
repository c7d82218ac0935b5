"""`gpu-accel hardware`: what is known of GPUs (peaks, bandwidth, their sources), and which one is here."""

from __future__ import annotations

import typer

from gpu_accel.errors import HardwareError

from . import output
from .console import out, plain, table
from .options import JsonOption, OutputOption, ProfileArgument
from .render import number

app = typer.Typer(no_args_is_help=True, help="GPU profiles as data: list, show, detect.")


@app.command("list")
def list_profiles(json_: JsonOption = False, output_: OutputOption = None) -> None:
    """Every GPU with a profile."""
    from gpu_accel.hardware import profiles

    output.check_suffix(output_)
    rows = [one.as_dict() for one in profiles()]
    if output_:
        output.write(output_, rows, title="GPU profiles")
    if json_:
        return output.print_json(rows)
    made = table("profile", "GPU", "arch", "SMs", "bf16", "fp8", "fp4", "memory", "bandwidth", "power",
                 right=("SMs", "bf16", "fp8", "fp4", "memory", "bandwidth", "power"))  # fmt: skip
    for one in profiles():
        peaks = [number(one.peaks[dtype].value) if dtype in one.peaks else "" for dtype in ("bf16", "fp8", "fp4")]
        made.add_row(
            f"[bold]{one.name}[/]", plain(one.title), f"{one.architecture} {one.capability}", str(one.sm_count or ""),
            *peaks, f"{one.memory_gb:g} GB", f"{one.bandwidth_gbs:g} GB/s", f"{one.power_w:g} W" if one.power_w else "",
        )  # fmt: skip
    out().print(made)
    out().print("Dense peaks in TFLOP/s. Their sources: gpu-accel hardware show PROFILE", style="dim")


@app.command("show")
def show(name: ProfileArgument, json_: JsonOption = False, output_: OutputOption = None) -> None:
    """One profile, with the source of every number."""
    from gpu_accel.hardware import profile

    output.check_suffix(output_)
    one = profile(name)
    row = one.as_dict()
    quantities = {f"{key} peak": value for key, value in row["peaks"].items()} | row["spec"]
    if output_:
        rows = [{"quantity": key, **value} for key, value in quantities.items()]
        output.write(output_, rows, payload=row, title=one.title)
    if json_:
        return output.print_json(row)
    made = table("", "value", "unit", "source", "remark", title=plain(one.title), right=("value",))
    for key, value in quantities.items():
        remark = "; ".join(filter(None, [value.get("derived"), value.get("note")]))
        made.add_row(key.replace("_", " "), f"{value['value']:,}", value["unit"], value["source"], plain(remark))
    for key, why in row["absent"].items():
        made.add_row(key.replace("_", " "), "", "", "", plain(why), style="dim")
    screen = out()
    screen.print(f"\n{one.architecture}, compute capability {one.capability}, announced {one.introduced}")
    screen.print(made)
    for key, source in row["sources"].items():
        screen.print(f"  {key}: {source['title']} ({source['kind']}) {source['url']}", markup=False, soft_wrap=True)
    for remark in one.notes:
        screen.print(f"  {remark}", markup=False)


@app.command("detect")
def detect(json_: JsonOption = False, output_: OutputOption = None) -> None:
    """The GPU of this machine, and its profile.

    Exit code 4 when there is none.
    """
    from gpu_accel.hardware import detect as look

    output.check_suffix(output_)
    found = look()
    row = found.as_dict() if found else {}
    if output_:
        output.write(output_, [row], payload=row, title="This machine")
    if not found:
        raise HardwareError("torch sees no GPU; `gpu-accel doctor` says what stands in the way")
    if json_:
        output.print_json(row)
    else:
        made = table("", "value", title="this machine")
        for key, value in output.flatten(row).items():
            made.add_row(key, plain(value))
        out().print(made)
