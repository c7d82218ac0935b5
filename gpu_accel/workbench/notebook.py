"""What the notebooks import: the verdict line, the claims table, records in one of three modes, and an explorer.

    recorded   committed results; the default, works anywhere
    live       run the experiment on the GPU of this machine
    smoke      run small cases on the CPU: correctness only, no timing

`run_or_load` calls the same `workbench.runner.run` as the command line and prints the equivalent command. IPython and
ipywidgets are imported inside functions: every object here also works as plain text.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError
from gpu_accel.workbench import plots, registry, report, series
from gpu_accel.workbench.experiment import Settings
from gpu_accel.workbench.records import Record, merge
from gpu_accel.workbench.series import largest as largest

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from gpu_accel.workbench.claims import Verdict
    from gpu_accel.workbench.ledger import Claim
    from gpu_accel.workbench.registry import Paper

MODES = ("recorded", "live", "smoke")
MODE_VARIABLE = "GPU_ACCEL_NOTEBOOK_MODE"


@dataclass(frozen=True)
class Shown:
    """Something a notebook cell ends with: HTML where it can be drawn, text elsewhere, and its rows for asserts."""

    text: str
    html: str
    rows: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Shown:
    """A table of strings."""
    cells = tuple(tuple(str(cell) for cell in row) for row in rows)
    return Shown(report.markdown_table(headings, cells), report.html_table(headings, cells), cells)


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def start() -> Shown:
    """Prepare this machine and the plots; call it before anything that imports Triton kernels.

    Without a GPU the kernels run in Triton's interpreter, which has to be chosen before they are imported.

    Raises:
        HardwareError: there is no GPU and kernels were imported before for compilation; the kernel must be restarted.
    """
    _show_plots_in_exports()
    if has_gpu():
        import torch

        line = f"GPU: {torch.cuda.get_device_name()}. Kernels are compiled for it."
    else:
        compat = sys.modules.get("gpu_accel.compat")
        if compat is not None and not compat.INTERPRET:
            raise HardwareError(
                "kernels were imported without TRITON_INTERPRET=1 on a machine without a GPU; "
                "restart the notebook's kernel and call start() in its first cell"
            )
        os.environ["TRITON_INTERPRET"] = "1"
        line = "No GPU here: kernels run in Triton's interpreter, on small shapes. Timings shown are recorded ones."
    return Shown(line, f"<p>{escape(line)}</p>")


def _show_plots_in_exports() -> None:
    """Let plots carry HTML beside plotly's own format, which `jupyter nbconvert --to html` leaves out.

    The HTML loads plotly.js from its CDN, so a saved notebook does not grow by megabytes. PLOTLY_RENDERER wins.
    """
    if not os.environ.get("PLOTLY_RENDERER") and importlib.util.find_spec("plotly"):
        import plotly.io

        plotly.io.renderers.default = "plotly_mimetype+notebook_connected"


def mode(value: str | None = None) -> str:
    """The notebook's mode: the value given, else the environment variable GPU_ACCEL_NOTEBOOK_MODE, else "recorded".

    Raises:
        InvalidInputError: no such mode.
        HardwareError: "live" without a GPU.
    """
    chosen = value or os.environ.get(MODE_VARIABLE) or "recorded"
    if chosen not in MODES:
        raise InvalidInputError(f"mode is {chosen!r}; choose one of {', '.join(MODES)}")
    if chosen == "live" and not has_gpu():
        raise HardwareError("mode 'live' needs a GPU; use 'recorded' to see committed results or 'smoke' to check here")
    return chosen


def environment() -> Shown:
    """What results taken here would carry: GPU, driver, versions, commit."""
    from gpu_accel.workbench.environment import Environment

    found = Environment.capture("cuda" if has_gpu() else "cpu").as_dict()
    names = ("gpu", "sku", "driver", "cuda", "torch", "triton", "python", "os", "cpu", "commit")
    rows = [(name, str(found[name])) for name in names if found.get(name)]
    if found.get("dirty"):
        rows.append(("local changes", "yes: results are marked dirty"))
    return table(["", "this machine"], rows)


def machine() -> Shown:
    """What this machine can do: each ability with yes or no, and why or what would change it."""
    gpu = has_gpu()
    capability = None
    if gpu:
        import torch

        capability = torch.cuda.get_device_capability()
    triton = importlib.util.find_spec("triton") is not None
    plotting = importlib.util.find_spec("plotly") and importlib.util.find_spec("ipywidgets")
    hopper = capability is not None and capability[0] == 9
    rows = [
        ("read every result and verdict", True, "records are files of this repository"),
        ("explore them in plots", bool(plotting), "" if plotting else "pip install 'gpu-accel[notebook]'"),
        (
            "check kernels",
            triton,
            "on the GPU"
            if gpu
            else "in Triton's interpreter, small shapes"
            if triton
            else "needs Triton, which needs Linux",
        ),
        (
            "measure kernels",
            gpu,
            "mode 'live'" if gpu else "needs a GPU that torch can use; gpu-accel doctor says why not",
        ),
        ("run the Hopper kernels", hopper, "" if hopper else "needs compute capability 9.0, an H100 or H200"),
    ]
    return table(["what", "here", "how"], [(what, "yes" if can else "no", how) for what, can, how in rows])


def doctor() -> Shown:
    """What `gpu-accel doctor` finds: each part of the machine, its state, and what to do."""
    from gpu_accel.hardware import doctor as examine

    return table(["", "found", "what to do"], [(f.level, f.what, f.remedy) for f in examine()])


def _paper(paper: Paper | str) -> Paper:
    return registry.paper(paper) if isinstance(paper, str) else paper


def verdicts(paper: Paper | str, records: Iterable[Record] | None = None) -> list[Verdict]:
    """A verdict for every claim of the paper, from its committed records or from those given."""
    from gpu_accel.workbench.claims import judge

    paper = _paper(paper)
    found = paper.records() if records is None else list(records)
    return [judge(claim, found) for claim in paper.claims()]


def verdict_line(paper: Paper | str, records: Iterable[Record] | None = None) -> Shown:
    """One line: how many claims got which verdict, and below it on what the verdicts rest."""
    paper = _paper(paper)
    records = paper.records() if records is None else list(records)
    judged = verdicts(paper, records)
    line, basis = report.summary(judged), series.stamp(records).text
    return Shown(f"{line}\n({basis})", f"<p><b>{escape(line)}</b><br><small>{escape(basis)}</small></p>")


def claims_table(paper: Paper | str, records: Iterable[Record] | None = None) -> Shown:
    """Every claim: statement, where, the paper's value, the value here with its interval, the verdict."""
    judged = verdicts(paper, records)
    rows = tuple(report.claim_row(v) for v in judged)
    return Shown(report.claims_markdown(judged), report.claims_html(judged), rows)


def claims_about(paper: Paper | str, *experiments: str, records: Iterable[Record] | None = None) -> Shown:
    """The claims that records of these experiments settle, as `claims_table` shows them.

    Raises:
        InvalidInputError: the paper has no experiment of that name.
    """
    paper = _paper(paper)
    if unknown := [name for name in experiments if name not in paper.experiments]:
        raise InvalidInputError(f"{paper.id} has no experiment {unknown[0]!r}; it has {', '.join(paper.experiments)}")
    judged = [v for v in verdicts(paper, records) if v.claim.measure and v.claim.measure.experiment in experiments]
    rows = tuple(report.claim_row(v) for v in judged)
    return Shown(report.claims_markdown(judged), report.claims_html(judged), rows)


def ledger() -> Shown:
    """All papers at a glance: one row each with the count of every verdict."""
    from gpu_accel.workbench.claims import WORDS, against_itself, summary

    rows = []
    for paper in registry.papers():
        records = paper.records()
        judged = verdicts(paper, records)
        counts = summary(judged)
        hold, fail = against_itself(judged)
        itself = f"{hold} hold, {fail} do not" if hold + fail else "–"
        total, words = str(sum(counts.values())), [str(count) for count in counts.values()]
        basis = series.stamp(records).text
        rows.append([paper.title, f"arXiv:{paper.arxiv}", total, *words, itself, basis])
    return table(["paper", "source", "claims", *WORDS, "paper against itself", "results"], rows)


def papers_table() -> Shown:
    """Every paper of the registry: id, title, experiments, notebook."""
    rows = [[p.alias, p.title, ", ".join(p.experiments), p.package, p.notebook] for p in registry.papers()]
    return table(["name", "paper", "experiments", "import", "notebook"], rows)


def command_line(paper: Paper | str, experiment: str, settings: Settings) -> str:
    """The shell command that runs the same experiment with the same settings."""
    paper = _paper(paper)
    words = ["gpu-accel run", paper.alias, experiment, "--precision", settings.precision]
    words += ["--input", settings.input, "--seed", str(settings.seed)]
    for shape in settings.shapes:
        pairs = (f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in shape.items())
        words += ["--shape", ",".join(pairs)]
    if settings.device != "auto":
        words += ["--device", settings.device]
    return " ".join(words + (["--quick"] if settings.quick else []))


def run_or_load(
    paper: Paper | str,
    experiment: str,
    mode: str = "recorded",
    *,
    precision: str = "bf16",
    input: str | None = None,
    seed: int = 0,
    shapes: tuple[dict[str, Any], ...] = (),
    quick: bool = False,
    seconds: float = 0.25,
) -> list[Record]:
    """Records of one experiment: committed ones, or those of a run here and now (`live`, `smoke`).

    Prints the equivalent command line and where the records come from. In mode "recorded" there may be none yet.
    Without `input` the experiment's own inputs are meant.

    Raises:
        InvalidInputError: unknown paper, experiment, mode, precision or input.
        HardwareError: "live" without a GPU.
    """
    paper, chosen = _paper(paper), globals()["mode"](mode)
    if experiment not in paper.experiments:
        raise InvalidInputError(f"{paper.id} has no experiment {experiment!r}; it has {', '.join(paper.experiments)}")
    if input is not None and input not in paper.inputs:
        raise InvalidInputError(f"input is {input!r}; {paper.id} has {', '.join(paper.inputs)}")
    allowed = paper.experiments[experiment].precisions
    if allowed and precision not in allowed:
        raise InvalidInputError(f"precision is {precision!r}; {experiment} runs in {', '.join(allowed)}")
    device = {"recorded": "auto", "live": "cuda", "smoke": "cpu"}[chosen]
    settings = Settings(
        device=device,
        precision=precision,
        input=input or paper.inputs[0],
        seed=seed,
        shapes=shapes,
        quick=quick or chosen == "smoke",
        seconds=seconds,
    )
    print(f"$ {command_line(paper, experiment, settings)}")
    if chosen == "recorded":
        burst = [r for r in paper.records() if r.timing.get("mode", "burst") == "burst"]  # as a run here would be
        # where there is no choice, cases have no dtype (a latency), or that of what is given to them (to be quantised)
        named = precision if len(allowed) > 1 else None
        wanted = series.select(burst, experiment=experiment, precision=named, input=input)
        records = merge(wanted)
    else:
        from gpu_accel.workbench.runner import run

        result = run(paper, [experiment], settings=settings)
        records = list(result.records)
        reasons = Counter((outcome.impl, outcome.why) for outcome in (*result.skipped, *result.incorrect))
        for (impl, why), count in reasons.items():
            print(f"no result of {impl} in {count} case{'' if count == 1 else 's'}: {why}")
    print(f"{len(records)} records, {series.stamp(records).text}" if records else "not measured yet")
    return records


def recorded(records: Iterable[Record], *, metric: str = "tflops", unit: str = "TFLOP/s", **where: Any) -> str:
    """The best recorded value with its interval and stamp as one line, or "not measured yet"."""
    found = [r for r in series.select(records, **where) if r.has(metric)]
    if not found:
        return "not measured yet"
    best = max(found, key=lambda r: r.value(metric))
    ends = best.interval(metric)
    spread = f" [{ends[0]:.4g} to {ends[1]:.4g}]" if ends else ""
    case = ", ".join(f"{key} {best.case[key]}" for key in ("seqlen_q", "head_dim", "causal") if key in best.case)
    return f"{best.value(metric):.4g} {unit}{spread} ({case}), {series.stamp([best]).text}"


def one_gpu(records: Iterable[Record]) -> list[Record]:
    """Measured records of one GPU: this machine's if it has any, else the GPU with the newest record."""
    measured = sorted((r for r in records if r.kind == "measured"), key=lambda r: r.when)
    if not measured:
        return []
    here = ""
    if has_gpu():
        import torch

        here = torch.cuda.get_device_name()
    names = {series.gpu_of(r) for r in measured}
    chosen = here if here in names else series.gpu_of(measured[-1])
    return [r for r in measured if series.gpu_of(r) == chosen]


class Explorer:
    """Dropdowns over records that redraw a throughput figure; the figure itself is `view(params)`, a pure function.

    Args:
        records: timed records of one or more passes, dtypes and GPUs.
        claims: the paper's claims, whose own curve is drawn beside ours.

    The widgets are made on first use (`widget`, or by showing the object in a notebook), `controls` holds them by name.
    The figure is a display of its own that is updated, not an Output widget: nbclient, which runs notebooks headless,
    answers an Output widget's messages on the very socket it waits on, and then sleeps until the cell's timeout in some
    runs (seen with nbclient 0.11).
    """

    ANY = "all"

    def __init__(self, records: Iterable[Record], *, claims: Iterable[Claim] = ()) -> None:
        self.records = [r for r in merge(records) if r.kind != "checked" and r.has("tflops") and "seqlen_q" in r.case]
        self.claims = list(claims)
        self.figure: go.Figure | None = None
        self.controls: dict[str, Any] = {}
        self._widget: Any = None
        self._display: Any = None

    def choices(self) -> dict[str, list[Any]]:
        """What each control offers, from the records; empty lists when nothing is measured."""

        def values(key: str) -> list[Any]:
            return sorted({r.case[key] for r in self.records if key in r.case}, key=lambda v: (str(type(v)), v))

        return {
            "gpu": series.gpus(self.records),
            "pass": values("pass"),
            "precision": values("dtype"),
            "input": values("input"),
            "head_dim": [self.ANY, *values("head_dim")],
            "causal": [self.ANY, *values("causal")],
            "impl": series.order(r.impl for r in self.records),
        }

    def defaults(self) -> dict[str, Any]:
        """The first choice of each control, and all implementations."""
        choices = self.choices()
        first: dict[str, Any] = {key: values[0] if values else None for key, values in choices.items()}
        return {**first, "impl": tuple(choices["impl"])}

    def view(self, params: dict[str, Any]) -> go.Figure:
        """The figure for a choice of `choices()`; missing keys take their default."""
        unknown = params.keys() - self.defaults().keys()
        if unknown:
            raise InvalidInputError(
                f"unknown choice {', '.join(sorted(unknown))}; there are {', '.join(self.choices())}"
            )
        chosen = {**self.defaults(), **params}
        where = {key: None if chosen[key] == self.ANY else chosen[key] for key in ("head_dim", "causal", "input")}
        impls = (chosen["impl"],) if isinstance(chosen["impl"], str) else tuple(chosen["impl"] or ())
        where |= {"pass": chosen["pass"], "dtype": chosen["precision"], "impl": impls}
        records = series.select(self.records, **where)
        records = [r for r in records if r.kind != "measured" or series.gpu_of(r) == chosen["gpu"]]
        quotes = []
        if records:
            quotes = series.paper_curve(self.claims, pass_=chosen["pass"] or "forward", dtype=chosen["precision"])
            shown = {(r.case.get("head_dim"), r.case.get("causal")) for r in records}
            quotes = [c for c in quotes if (c.cell["head_dim"], c.cell["causal"]) in shown]
        title = " ".join(str(part) for part in (chosen["pass"], chosen["precision"]) if part) or "Throughput"
        return plots.throughput(records, quotes=quotes, title=title.capitalize())

    @property
    def widget(self) -> Any:
        """The ipywidgets view."""
        if self._widget is None:
            self._widget = self._build()
        return self._widget

    def _build(self) -> Any:
        try:
            import ipywidgets as widgets
        except ImportError as error:
            raise UnsupportedError("the explorer needs ipywidgets: pip install 'gpu-accel[notebook]'") from error
        defaults = self.defaults()
        for name, options in self.choices().items():
            kind = widgets.SelectMultiple if name == "impl" else widgets.Dropdown
            value = defaults[name]
            self.controls[name] = kind(options=options, value=value, description=name.replace("_", " "))

        def redraw(_change: Any = None) -> None:
            self.figure = self.view({name: control.value for name, control in self.controls.items()})
            if self._display is not None:
                self._display.update(_bundle(self.figure), raw=True)

        for control in self.controls.values():
            control.observe(redraw, names="value")
        redraw()
        left = widgets.VBox([control for name, control in self.controls.items() if name != "impl"])
        return widgets.HBox([left, self.controls["impl"]])

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)
        self._display = display(_bundle(self.figure), raw=True, display_id=True)


def _bundle(figure: go.Figure) -> dict[str, Any]:
    """A figure as Jupyter's front ends take it; its own way of showing itself cannot be updated."""
    return {
        "application/vnd.plotly.v1+json": json.loads(figure.to_json()),
        "text/html": figure.to_html(full_html=False, include_plotlyjs="cdn"),
        "text/plain": f"{figure.layout.title.text} ({figure.layout.meta['stamp']})",
    }


def explorer(records: Iterable[Record], *, claims: Iterable[Claim] = ()) -> Explorer:
    """Dropdowns for GPU, pass, precision, input, head_dim, causal and implementations over recorded rows."""
    return Explorer(records, claims=claims)
