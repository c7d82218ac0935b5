"""`gpu-accel hardware`: what is known of GPUs (peaks, bandwidth, their sources), and which one is here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_accel.errors import HardwareError, InvalidInputError

from . import output
from .console import note, out, plain, table
from .options import DEFAULT_RESULTS, JsonOption, OutputOption, ProfileArgument
from .render import number

if TYPE_CHECKING:
    from gpu_accel.hardware import Ceilings, Detected

app = typer.Typer(no_args_is_help=True, help="GPUs as data: list, show, detect, and measure what this one gives.")


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
                 right=("SMs", "bf16", "fp8", "fp4", "memory", "bandwidth", "power"),
                 spare=("GPU", "power", "SMs"))  # fmt: skip
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


@app.command("measure")
def measure(
    results: Annotated[
        Path | None,
        typer.Option("--results", metavar="DIR", help="Where records go.", show_default=str(DEFAULT_RESULTS)),
    ] = None,
    save: Annotated[bool, typer.Option("--save", help="Write records into this checkout, to be committed.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller tensors, for a first look.")] = False,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """What this GPU gives: copy, read and write bandwidth, dense products, and a launch.

    The experiment `ceilings` of the Hopper paper on any GPU; rooflines are drawn from its records. Exit code 4 without
    a GPU, 3 when a result is wrong.
    """
    from gpu_accel.hardware import detect as look
    from gpu_accel.hardware import measured_ceilings
    from gpu_accel.hardware.ceilings import EXPERIMENT, PAPER

    output.check_suffix(output_)
    if save and results:
        raise InvalidInputError("--results and --save both say where records go: choose one")
    found = look()
    if found is None or found.platform == "xpu":
        why = "torch sees no GPU" if found is None else f"nothing is timed on {found.name}: the timer knows CUDA only"
        raise HardwareError(f"{why}; `gpu-accel doctor` says what stands in the way")
    from gpu_accel.workbench import registry, runner
    from gpu_accel.workbench.experiment import Settings
    from gpu_accel.workbench.host import Host

    from .results import record_file

    paper, host = registry.paper(PAPER), Host.here("cuda")
    file = record_file(paper, sku=host.env.get("sku") or host.gpu, commit=host.commit,
                       folder=results or DEFAULT_RESULTS, save=save, tag="ceilings")  # fmt: skip
    output.check_folder(file.parent)
    with output.stdout_to_stderr():
        result = runner.run(paper, [EXPERIMENT], Settings(quick=quick, output=str(file)), host=host)
    for outcome in (*result.skipped, *result.incorrect):
        note(f"no result of {outcome.impl} in {outcome.case}: {outcome.why}", style="yellow")
    ceilings = measured_ceilings(records=result.records)
    rows = ceiling_rows(found, ceilings) if ceilings else []
    payload = {"gpu": found.as_dict(), "ceilings": ceilings.as_dict() if ceilings else None, "output": str(file)}
    if output_:
        output.write(output_, rows, payload=payload, title=f"What {found.name} gives")
    if json_:
        output.print_json(payload)
    elif rows:
        made = table(*rows[0], title=plain(found.name), right=("measured", "datasheet", "share"))
        for row in rows:
            made.add_row(*(plain(value) for value in row.values()))
        out().print(made)
        note(f"records: {file}")
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def ceiling_rows(found: Detected, ceilings: Ceilings) -> list[dict[str, Any]]:
    """One row each: what, measured, the datasheet's figure, and the share; "" where there is no figure."""
    profile = found.profile if found.exact else None
    rows = []
    for what, measured in ceilings.gbps.items():
        rows.append((what, measured, profile.bandwidth_gbs if profile else None, "GB/s"))
    for dtype, measured in ceilings.tflops.items():
        known = profile.peaks.get(dtype) if profile else None
        rows.append((f"{dtype} product", measured, known.value if known else None, "TFLOP/s"))
    if ceilings.launch_us is not None:
        rows.append(("launch of an empty kernel", ceilings.launch_us, None, "us"))
    return [
        {
            "what": what,
            "measured": number(measured),
            "datasheet": number(printed) if printed else "",
            "share": f"{measured / printed:.0%}" if printed else "",
            "unit": unit,
        }
        for what, measured, printed, unit in rows
    ]
