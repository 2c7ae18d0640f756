"""What every chart is made of: a Vega-Lite spec, a caption, and the same numbers as a table.

Input: layers from the `charts_*` modules. Output: `Chart` objects.
Does not: render (see `svg.py`) or place (see `html.py`) them.

1. Every chart has a table with the values that it draws, in the printed rounding.
2. A spec has no width of its own: `static_spec` and `live_spec` set one.
3. An infinite value is never drawn as a number: it is a mark on the upper edge.
4. Nothing leaves its axes: a mark beyond the domain would squeeze the plot (live) or widen the
   drawing (static), so bands are cut to the domain, lines beyond it are left out, and the scales
   clamp the rest.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
from altair.utils.schemapi import disable_debug_mode

from bench.records.analysis import Analysis, StageAnalysis
from reports.figures import Figures, finite, number
from reports.themes import chart_config, ink, text_ink
from reports.words import Words

# Altair checks every object against the whole schema while it is built: two thirds of the time of
# a page. The finished specs are checked instead, by tests/reports/test_charts.py.
disable_debug_mode()

# px of the static plot without its labels, which take about 50: as wide as its column at 1280 px, so that the
# letters of drawings and of live charts have one size. A drawing is never scaled up.
WIDTH = 900
HEIGHT = 300
HALF = 395  # px of a plot that shares its row with another
PHONE = 290  # px of the plot for phones
PHONE_HEIGHT = 270


NOT_RUN = "not_run"  # mark of a stage that was planned and never started


@dataclass(frozen=True)
class Key:
    """One series: its name and the three signs that tell it from the others."""

    label: str
    colour: str  # a name of `themes`
    dash: tuple[int, ...] = ()  # () = solid
    shape: str = ""  # a Vega symbol, "" = no symbol
    line: bool = True
    area: bool = False
    opacity: float = 1.0


@dataclass
class Chart:
    """One figure of the report."""

    chart_id: str
    title: str
    caption: str
    spec: dict[str, Any]
    columns: list[str]
    rows: list[list[str]]
    label: str = ""  # short name when the chart is one tab of several
    width: int = WIDTH
    keys: list[Key] = field(default_factory=list)  # the legend, set as text by the page
    phone: bool = False  # whether it is drawn a second time for narrow windows


@dataclass
class Curve:
    """One curve of an opened stage, drawn into a frame that the stages share."""

    title: str
    caption: str
    points: list[list[float]]  # [value in ms, share] of a distribution: the plateau shows who never finished


@dataclass
class Context:
    """What the chart builders share."""

    analysis: Analysis
    words: Words
    figures: Figures

    @property
    def stages(self) -> list[StageAnalysis]:
        """The stages that ran, in order of rate, then repeat."""
        return [s for s in self.planned_stages if NOT_RUN not in s.marks]

    @property
    def planned_stages(self) -> list[StageAnalysis]:
        """All stages, also those that an interrupted run never reached, in order of rate, then repeat."""
        return sorted(self.analysis.stages, key=lambda s: (s.offered_qps, s.repeat, s.stage))

    @property
    def top_qps(self) -> float:
        """The right end of the rate axis."""
        rates = {s.offered_qps for s in self.stages}
        return (max(rates, default=0.0) or 1.0) * (2.0 if len(rates) == 1 else 1.04)  # one rate: in the middle

    @property
    def shows_capacity(self) -> bool:
        """False when the verdict forbids to print a capacity figure."""
        return self.analysis.verdict.status != "INVALID"

    @property
    def knee_qps(self) -> float | None:
        """The knee, when it may be shown and is a crossing."""
        capacity = self.analysis.capacity
        return finite(capacity.knee_qps) if self.shows_capacity and capacity.knee_kind == "crossing" else None

    @property
    def client_calibration(self) -> dict[str, Any]:
        """`target.calibration` of run.json; {} where the client was not calibrated."""
        target = self.analysis.run.get("target")
        made = target.get("calibration") if isinstance(target, dict) else None
        return made if isinstance(made, dict) else {}

    def trusted(self) -> list[StageAnalysis]:
        """The stages that curves are drawn from: all but INVALID ones, or all where nothing else is there."""
        good = [s for s in self.stages if s.verdict != "INVALID"]
        return good if good and self.shows_capacity else self.stages

    def by_rate(self) -> list[tuple[float, list[StageAnalysis]]]:
        """(offered rate, its trusted repeats), by rising rate."""
        groups: dict[float, list[StageAnalysis]] = {}
        for stage in self.trusted():
            groups.setdefault(stage.offered_qps, []).append(stage)
        return sorted(groups.items())

    def caption(self, text: str) -> str:
        """A caption that reads capacity from a curve; under an INVALID verdict it says that this is not done."""
        if not self.shows_capacity:
            return self.words("cap_invalid")
        left_out = {s.offered_qps for s in self.stages} - {s.offered_qps for s in self.trusted()}
        note = self.words("cap_invalid_stages", list=rate_list(left_out)) if left_out else ""
        return f"{text} {note}".strip()

    def repeated(self) -> bool:
        """Whether any rate was run more than once."""
        return any(len(group) > 1 for _, group in self.by_rate())


def middle(values: Iterable[Any]) -> float | None:
    """The middle of the repeats' values (the lower one of two), None when there is none."""
    known = sorted(v for v in (number(v) for v in values) if v is not None)
    return known[(len(known) - 1) // 2] if known else None


def rate_list(rates: Iterable[float]) -> str:
    """Rates in words; of many only the first two and the last."""
    known = sorted(set(rates))
    if len(known) > 6:
        return f"{known[0]:g}, {known[1]:g} … {known[-1]:g}"
    return ", ".join(f"{q:g}" for q in known)


def spread(stages: Sequence[StageAnalysis], value: Callable[[StageAnalysis], Any]) -> float | None:
    """`middle` of one value over repeats."""
    return middle(value(s) for s in stages)


class Rows:
    """Data on its way through altair, which would walk over every value of a list at every step."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows


def data(rows: list[dict[str, Any]]) -> alt.Data:
    """Inline data; floats are cut to seven digits to keep the page small."""

    def cut(value: Any) -> Any:
        return float(f"{value:.7g}") if isinstance(value, float) else value

    return alt.Data(values=Rows([{k: cut(v) for k, v in row.items()} for row in rows]))


def columns(names: Sequence[str], rows: Iterable[Sequence[float]]) -> alt.Data:
    """Inline data of many rows of numbers, cut to five digits."""
    return alt.Data(values=Rows([dict(zip(names, (float(f"{v:.5g}") for v in row), strict=True)) for row in rows]))


def cut_span(low: Any, high: Any, top: float) -> tuple[float, float] | None:
    """The part of [low, high] on an axis from 0 to `top`, None where there is none. An end may be infinite."""
    ends = number(low), number(high)
    if ends[0] is None or ends[1] is None:
        return None
    left, right = max(0.0, min(ends)), min(top, max(ends))
    return (left, right) if right > left else None


def cut_band(band: Sequence[dict[str, float]], low: float, high: float) -> list[dict[str, float]]:
    """The band {x, low, high} cut to a log axis from `low` to `high`; edges end where they cross it, not at a stage."""

    def at(a: dict[str, float], b: dict[str, float], part: float) -> dict[str, float]:
        out = {"x": a["x"] + part * (b["x"] - a["x"])}
        return out | {k: math.exp(math.log(a[k]) + part * (math.log(b[k]) - math.log(a[k]))) for k in ("low", "high")}

    far = [{**p, "low": max(p["low"], 1e-12), "high": min(p["high"], 1e12)} for p in band]
    out: list[dict[str, float]] = far[:1]
    for a, b in zip(far, far[1:], strict=False):
        parts = set()
        for key in ("low", "high"):
            for edge in (low, high):
                if (a[key] - edge) * (b[key] - edge) < 0:
                    parts.add(math.log(edge / a[key]) / math.log(b[key] / a[key]))
        out += [at(a, b, part) for part in sorted(parts)] + [b]
    return [{"x": p["x"], **{k: min(high, max(low, p[k])) for k in ("low", "high")}} for p in out]


def rate_axis(ctx: Context) -> alt.X:
    """The shared x axis: offered rate from 0."""
    return alt.X(
        "x:Q",
        title=ctx.words("axis_offered"),
        scale=alt.Scale(domain=[0, ctx.top_qps], nice=False, zero=True, clamp=True),
        axis=alt.Axis(tickCount=10, format=",~f"),
    )


def encodings(field_name: str, keys: Sequence[Key]) -> dict[str, Any]:
    """Colour, dash and shape of the series `keys`; the legend is set by the page, so none is drawn."""
    names = [k.label for k in keys]
    return {
        "color": alt.Color(
            f"{field_name}:N", legend=None, scale=alt.Scale(domain=names, range=[ink(k.colour) for k in keys])
        ),
        "strokeDash": alt.StrokeDash(
            f"{field_name}:N", legend=None, scale=alt.Scale(domain=names, range=[list(k.dash) or [1, 0] for k in keys])
        ),
        "shape": alt.Shape(
            f"{field_name}:N", legend=None, scale=alt.Scale(domain=names, range=[k.shape or "circle" for k in keys])
        ),
    }


def marked_line(base: alt.Chart, x: alt.X, y: alt.Y, signs: dict[str, Any], tips: list[alt.Tooltip]) -> list[alt.Chart]:
    """One line per series with a symbol at every point; `signs` comes from `encodings`."""
    return [
        base.mark_line().encode(x=x, y=y, color=signs["color"], strokeDash=signs["strokeDash"]),
        base.mark_point(size=46, filled=True, opacity=1).encode(
            x=x, y=y, color=signs["color"], shape=signs["shape"], tooltip=tips
        ),
    ]


def log_scale(values: Iterable[float | None], room: float = 1.25, head: float = 0.0) -> tuple[alt.Scale, list[float]]:
    """A log scale that holds the values with some room, and few round ticks on it; `head` is a free share on top."""
    known = [v for v in values if v is not None and v > 0]
    low, high = (min(known) / room, max(known) * room) if known else (0.1, 10.0)
    if high / low < 4:
        middle_value = math.sqrt(low * high)
        low, high = middle_value / 2, middle_value * 2
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in (
        (1,),
        (1, 3),
        (1, 2, 5),
        (1, 2, 3, 5, 7),
        (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8),
    ):  # the coarsest that gives four
        ticks = [m * 10.0**e for e in decades for m in steps if low <= m * 10.0**e <= high]
        if len(ticks) >= 4:
            break
    high *= (high / low) ** (head / (1 - head))
    domain = [float(f"{low:.4g}"), float(f"{high:.4g}")]
    return alt.Scale(type="log", domain=domain, nice=False, clamp=True), [float(f"{v:.6g}") for v in ticks]


def rule_y(
    value: float, text: str, colour: str, dash: list[int], align: str = "right", below: bool = False, halo: bool = False
) -> list[alt.Chart]:
    """A horizontal line with its name above or below it; `halo`: the name can be read over dots."""
    base = alt.Chart(data([{"y": value, "text": text}]))
    looks = [{"stroke": ink("panel"), "strokeWidth": 5, "strokeJoin": "round"}] if halo else []
    names = [
        base.mark_text(
            align=align,
            baseline="top" if below else "bottom",
            dy=6 if below else -6,
            dx=-4 if align == "right" else 4,
            color=text_ink(colour),
            fontWeight=600,
            **look,
        ).encode(y=alt.Y("y:Q"), x=alt.XValue("width" if align == "right" else 0), text=alt.Text("text:N"))
        for look in [*looks, {}]
    ]
    return [base.mark_rule(color=ink(colour), strokeDash=dash, strokeWidth=1.6).encode(y=alt.Y("y:Q")), *names]


def capacity_marks(ctx: Context) -> tuple[list[alt.Chart], list[alt.Chart]]:
    """(behind, in front): watermark band and knee interval; knee line and names. Empty when INVALID."""
    behind: list[alt.Chart] = []
    front: list[alt.Chart] = []
    capacity = ctx.analysis.capacity
    if not ctx.shows_capacity:
        return behind, front
    safe = cut_span(capacity.watermark_low_qps, capacity.watermark_high_qps, ctx.top_qps)
    if safe is not None:
        text = ctx.words("label_watermark")
        band = alt.Chart(data([{"x": safe[0], "x2": safe[1], "mid": sum(safe) / 2, "text": text}]))
        behind.append(band.mark_rect(color=ink("watermark")).encode(x=alt.X("x:Q"), x2=alt.X2("x2:Q")))
        front.append(
            band.mark_text(color=ink("tpot"), baseline="bottom", fontSize=11, fontWeight=600).encode(
                x=alt.X("mid:Q"), y=alt.YValue(-5), text=alt.Text("text:N")
            )
        )
    knee = ctx.knee_qps
    if knee is not None:
        span = cut_span(capacity.knee_low_qps, capacity.knee_high_qps, ctx.top_qps)
        if span is not None:
            behind.append(rate_band(span, opacity=0.9))
        text = f"{ctx.words('label_knee')} {ctx.figures.capacity(knee)}"
        front += rate_line(ctx, knee, text, "knee", strokeWidth=1.4)
    return behind, front


def rate_band(span: tuple[float, float], **look: Any) -> alt.Chart:
    """The interval of a rate, over the whole height; `span` comes from `cut_span`."""
    band = alt.Chart(data([{"x": span[0], "x2": span[1]}]))
    return band.mark_rect(color=ink("wedge"), **look).encode(x=alt.X("x:Q"), x2=alt.X2("x2:Q"))


def rate_line(ctx: Context, value: float, text: str, colour: str, **look: Any) -> list[alt.Chart]:
    """A vertical line at a rate with its name on top; nothing where the rate is not on the axis."""
    if not 0 <= value <= ctx.top_qps:
        return []
    line = alt.Chart(data([{"x": value, "text": text}]))
    right = (1 - value / ctx.top_qps) * PHONE < 6.3 * len(text)  # the name would stand over the plot's end
    name = line.mark_text(
        align="right" if right else "left",
        baseline="bottom",
        dx=3 if right else -3,
        fontSize=11,
        fontWeight=600,
        color=ink(colour),
    )
    return [
        line.mark_rule(color=ink(colour), **look).encode(x=alt.X("x:Q")),
        name.encode(x=alt.X("x:Q"), y=alt.YValue(-5), text=alt.Text("text:N")),
    ]


def compose(layers: Sequence[alt.Chart], height: int = HEIGHT) -> dict[str, Any]:
    """The spec of the layers, without a width."""
    # alt.layer would copy every layer several times; the layers are put together here instead
    parts = [layer.to_dict(validate=False) for layer in layers]
    spec: dict[str, Any] = {"$schema": alt.SCHEMA_URL, "height": height}
    spec["layer"] = [{k: v for k, v in part.items() if k not in ("$schema", "config", "datasets")} for part in parts]
    datasets: dict[str, Any] = {}
    names: dict[str, str] = {}
    for layer in spec["layer"]:  # the same rows are held once
        values = layer.get("data", {}).get("values")
        if values is not None:
            values = values.rows
            text = json.dumps(values)
            name = names.setdefault(text, f"d{len(names)}")
            datasets[name] = values
            layer["data"] = {"name": name}
    spec["datasets"] = datasets
    spec["config"] = chart_config()
    spec["autosize"] = {"type": "fit", "contains": "padding"}
    return spec


def drawn_spec(spec: dict[str, Any], width: int) -> dict[str, Any]:
    """The spec for a drawing: without tooltips, and with a plot of fixed size (`fit` lays out twice)."""
    config = {
        **spec["config"],
        "font": "sans-serif",  # half the time of a list of fonts; the style sheet sets the real one
        "mark": {"invalid": None},  # the data holds finite numbers only; the check is a tenth of the time
        # numbers and titles are never cut, so nobody need measure them for it: another tenth
        "axisQuantitative": {**spec["config"].get("axisQuantitative", {}), "labelLimit": 0, "titleLimit": 0},
    }
    layers = [without_tooltip(layer) for layer in spec["layer"]]
    return {**spec, "layer": layers, "width": width, "config": config, "autosize": "pad"}


def static_spec(chart: Chart) -> dict[str, Any]:
    """The spec for the static drawing."""
    return drawn_spec(chart.spec, chart.width)


def without_tooltip(layer: dict[str, Any]) -> dict[str, Any]:
    """The layer as it is drawn: a tooltip shows nothing there and costs an expression."""
    encoding = {k: v for k, v in layer.get("encoding", {}).items() if k != "tooltip"}
    return {**layer, "encoding": encoding}


def phone_spec(chart: Chart) -> dict[str, Any]:
    """The spec for the static drawing of a phone."""
    return {**static_spec(chart), "width": PHONE, "height": min(chart.spec["height"], PHONE_HEIGHT)}


def live_spec(chart: Chart) -> dict[str, Any]:
    """The spec for the browser: as wide as its column; the page adds the config, once, and unfolds long data."""
    spec = copy.copy(chart.spec)
    spec.pop("config", None)
    spec.pop("$schema", None)
    return {**spec, "width": "container", "datasets": {k: packed(v) for k, v in spec["datasets"].items()}}


def packed(rows: list[dict[str, Any]]) -> Any:
    """Long data as {"columns", "rows"}, which the page unfolds: a third of the size of objects."""
    if len(rows) < 12 or any(row.keys() != rows[0].keys() for row in rows):
        return rows

    def short(value: Any) -> Any:
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return {"columns": list(rows[0]), "rows": [[short(v) for v in row.values()] for row in rows]}


def stage_label(stage: StageAnalysis) -> str:
    """`03 @15` or, for a later repeat, `03 @15 #2`."""
    return f"{stage.stage:02d} @{stage.offered_qps:g}" + (f" #{stage.repeat + 1}" if stage.repeat else "")
