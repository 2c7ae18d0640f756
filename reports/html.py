"""`render(analysis)`: the whole report as one HTML page that needs no network.

Input: an `Analysis`. Output: HTML text.
Does not: compute a statistic, read or write a file (see `write.py`).

1. Every chart is a static SVG that shows without scripts; with scripts the
   same spec comes alive when it scrolls into view.
2. The page's own policy allows exactly three pieces of code and one style
   sheet, each by its SHA-256; nothing inline besides, no request at all.
3. Text that came from outside is escaped by Jinja; inside the JSON block `<`,
   `>` and `&` are written as \\u escapes, so no text can end the block.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bench.records.analysis import Analysis
from reports import (
    baseline,
    capacity,
    charts_capacity,
    charts_detail,
    charts_little,
    charts_model,
    charts_requests,
    charts_server,
    svg,
    tables,
    view,
)
from reports.charts import WIDTH, Chart, Context, drawn_spec, live_spec, phone_spec, static_spec
from reports.figures import Figures
from reports.summary import artifacts
from reports.themes import FONT, chart_config, css_variables, ink
from reports.words import Words, coded

TEMPLATES = Path(__file__).parent / "templates"
FRAME = 395  # px of the plot of a distribution in an opened stage


def render(
    analysis: Analysis, *, lang: str = "en", live: bool = True, comparison: dict[str, Any] | None = None,
    folder: str = "", beside: Sequence[str] = (), other: str = "",
) -> str:  # fmt: skip
    """The report page. `live=False` leaves the chart library out (half of the size).

    `comparison`: the content of compare.json, or {"refused": ...}; None: no baseline was given.
    `folder`: where the run lies, as one would type it. `beside`: names of files that lie beside the page, to link.
    `other`: the name of the same page in the other language, where it lies beside this one.
    """
    words = Words(lang)
    ctx = Context(analysis, words, Figures(words))
    page = _Page(ctx, live)
    figures = _figures(ctx, page)
    against = baseline.section(ctx, comparison) if comparison is not None else None
    if against is not None:
        figures["overlays"] = [page.add(c, alone=len(against.overlays) == 1) for c in against.overlays]
        figures["differences"] = [page.add(c, same_number=i > 0) for i, c in enumerate(against.differences)]
    env = environment()
    env.globals.update(t=words, symbols=view.SYMBOLS)
    template = env.get_template("report.html.j2")  # compiled while the charts are drawn
    stages, frames = _stages(ctx)
    css = _css()
    js = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    bundle = svg.bundle() if live and page.specs else None
    run = {"tool_version": "", "run_id": "", **analysis.run}
    worst = tables.free_form(ctx, analysis.worst[:20], only=tables.WORST_KEYS)
    sections = [
        "verdict",
        "capacity",
        "little",
        "server",
        *(["model"] if analysis.model else []),
        "stages",
        "errors",
        "requests",
        "client",
        *(["compare"] if against is not None else []),
        "reproduce",
        "method",
    ]
    return template.render(
        lang=lang,
        run=run,
        title=view.title(ctx),
        meta=view.meta(ctx),
        p95_crossing=view.p95_crossing(ctx),
        verdict=view.verdict(ctx),
        tiles=view.tiles(ctx),
        gates=[view.gate_view(ctx, g) for g in analysis.gates],
        warnings=view.reasons_view(ctx, analysis.warnings),
        capacity_sentence=_capacity(ctx),
        limits=capacity.limits(ctx),
        figs=figures,
        repeats=tables.repeats(ctx),
        model=_model(ctx),
        stages=stages,
        frames=frames,
        diagnosis=view.reasons_view(ctx, analysis.diagnosis),
        stage_columns=tables.stage_columns(ctx),
        stage_notes=tables.stage_notes(ctx),
        error_layers=tables.error_layers(ctx),
        worst=worst,
        arrivals={"columns": figures["sender"].chart.columns, "rows": figures["sender"].chart.rows}
        if figures["sender"]
        else None,
        calibration=tables.calibration(ctx),
        clients=tables.free_form(ctx, analysis.clients, only=tables.CLIENT_KEYS),
        checks=tables.checks(ctx),
        command=tables.command(ctx, folder),
        environment=tables.environment(ctx),
        config=tables.config_text(ctx),
        origins=[[k, v] for k, v in (analysis.run.get("config_origin") or {}).items()],
        files=[[each["name"], each["sha256"]] for each in artifacts(analysis.run)],
        outputs=list(beside),
        other=other,
        glossary=tables.glossary(ctx),
        against=against,
        toc=[{"id": s, "title": words(f"sec_{s}")} for s in sections],
        css=Markup(css),
        js=Markup(js),
        bundle=Markup(bundle.packed if bundle else ""),
        csp=policy([digest(js), *([bundle.digest] if bundle else [])], digest(css)),
        live=bundle is not None,
        charts_json=Markup(safe_json({"config": chart_config(), "specs": page.specs})),
    )


def environment() -> Environment:
    """The template environment of all pages."""
    env = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    env.filters["coded"] = coded
    return env


# Legend symbols, about 8 px around (17, 7).
SYMBOL_PATHS = {
    "circle": "M13 7a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "square": "M13.4 3.4h7.2v7.2h-7.2Z",
    "triangle-up": "M17 2.4L21.6 10.6H12.4Z",
    "triangle-down": "M17 11.6L21.6 3.4H12.4Z",
    "cross": "M15.5 3h3v2.5h2.5v3h-2.5v2.5h-3v-2.5h-2.5v-3h2.5Z",
    "diamond": "M17 2L21.4 7L17 12L12.6 7Z",
}


class _Drawn:
    """A chart with its number and its drawing, as the templates want it; the drawing may still be under way."""

    def __init__(self, chart: Chart, number: int) -> None:
        self.chart, self.number = chart, number
        self._wide = svg.submit(static_spec(chart))
        self._small = svg.submit(phone_spec(chart)) if chart.phone else None
        self.narrow = chart.width < 600
        self.keys = [
            {
                "label": k.label,
                "ink": ink(k.colour),
                "edge": ink("axis"),
                "area": k.area,
                "opacity": k.opacity,
                "line": k.line,
                "dash": " ".join(map(str, k.dash)),
                "path": SYMBOL_PATHS.get(k.shape, ""),
            }
            for k in chart.keys
        ]

    @property
    def width(self) -> int:
        return self._wide.result()[1]

    @property
    def height(self) -> int:
        return self._wide.result()[2]

    @property
    def svg(self) -> Markup:
        return Markup(self._wide.result()[0])

    @property
    def phone(self) -> dict[str, Any] | None:
        """The second drawing, for narrow windows."""
        if self._small is None:
            return None
        inner, width, height = self._small.result()
        return {"svg": Markup(inner), "width": width, "height": height}


class _Page:
    """Counts figures and gathers the specs of the live charts."""

    def __init__(self, ctx: Context, live: bool) -> None:
        self.ctx, self.live = ctx, live
        self.number = 0
        self.specs: dict[str, Any] = {}

    def add(self, chart: Chart | None, *, same_number: bool = False, alone: bool = False) -> _Drawn | None:
        if chart is None:
            return None
        if alone:  # it has the whole row, and scaling the half would double its letters
            chart.width = WIDTH
        if not same_number:
            self.number += 1
        if self.live:
            self.specs[chart.chart_id] = live_spec(chart)
        return _Drawn(chart, self.number)


def _figures(ctx: Context, page: _Page) -> dict[str, Any]:
    have = bool(ctx.stages)
    latency = [charts_capacity.latency(ctx, name) for name in ("ttft", "tpot", "e2e")] if have else []
    attainment = [charts_capacity.attainment(ctx, flag) for flag in (False, True)] if have else []
    out: dict[str, Any] = {
        "latency": [page.add(c, same_number=i > 0) for i, c in enumerate(latency)],
        "attainment": [page.add(c, same_number=i > 0) for i, c in enumerate(attainment)],
    }
    speed = charts_capacity.token_speed(ctx) if have else None
    out["rates"] = page.add(charts_capacity.rates(ctx), alone=speed is None) if have else None
    out["speed"] = page.add(speed)
    law, over_time = charts_little.law(ctx), charts_little.over_time(ctx)
    out["little"] = page.add(law)
    out["time"] = page.add(over_time)
    service = charts_server.charts(ctx)
    odd = len(service) % 2 == 1
    out["server"] = [page.add(c, alone=odd and c is service[-1]) for c in service]
    out["model"] = [page.add(c, same_number=i > 0) for i, c in enumerate(charts_model.charts(ctx))]
    out["residual"] = page.add(charts_model.residuals(ctx))
    out["errors"] = page.add(charts_detail.errors(ctx))
    out["heatmap"] = page.add(charts_detail.heatmap(ctx))
    pair = [c for c in (charts_requests.scatter(ctx, name) for name in charts_requests.SIDES) if c is not None]
    out["scatter"] = [page.add(c, alone=len(pair) == 1) for c in pair]
    out["sender"] = page.add(charts_detail.sender(ctx))
    return out


def _stages(ctx: Context) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of the stage table, and the shared frames of their distributions."""
    ordered = ctx.planned_stages
    curves = {(s.stage, n): charts_detail.ecdf(ctx, s, n) for s in ordered for n in ("ttft", "tpot")}
    drawn = {}
    for name in ("ttft", "tpot"):
        if any(curves[s.stage, name] for s in ordered):
            spec, domain = charts_detail.ecdf_frame(ctx, name)
            drawn[name] = svg.submit(drawn_spec(spec, FRAME)), domain, None
    curves |= {(s.stage, "joint"): charts_little.stage_curve(ctx, s) for s in ordered}
    if any(curves[s.stage, "joint"] for s in ordered):
        spec, domain, top = charts_little.stage_frame(ctx)
        drawn["joint"] = svg.submit(drawn_spec(spec, FRAME)), domain, top
    rows = [tables.stage_row(ctx, stage) for stage in ordered]
    frames = {name: svg.Frame(drawing.result(), domain, top) for name, (drawing, domain, top) in drawn.items()}
    for stage, row in zip(ordered, rows, strict=True):
        for name, frame in frames.items():
            curve = curves[stage.stage, name]
            if curve is not None:
                row["figures"].append(
                    {
                        "name": name,
                        "title": curve.title,
                        "caption": curve.caption,
                        "path": frame.steps(curve.points),
                        "width": frame.width,
                        "height": frame.height,
                        "ink": ink(name),
                    }
                )
    shared = [{"name": n, "svg": Markup(f.inner), "width": f.width, "height": f.height} for n, f in frames.items()]
    return rows, shared


def _capacity(ctx: Context) -> str:
    """The sentence over the capacity section."""
    c = ctx.analysis.capacity
    if not ctx.shows_capacity:
        return ctx.words("capacity_invalid")
    return ctx.words.said(c.code, c.params, c.sentence) if ctx.words.lang == "en" or c.code else ""


def _model(ctx: Context) -> dict[str, Any] | None:
    if not ctx.analysis.model:
        return None
    return {
        "sentence": charts_model.sentence(ctx) if ctx.shows_capacity else ctx.words("cap_invalid"),
        "notes": charts_model.notes(ctx),
        "parameters": charts_model.parameters(ctx),
        "load": charts_model.load_table(ctx),
    }


def _css() -> str:
    light, dark = css_variables(dark=False), css_variables(dark=True)
    themes = (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=light]{{color-scheme:light}}:root[data-theme=dark]{{color-scheme:dark;{dark}}}"
        f"@media print{{:root:root:root{{color-scheme:light;{light}}}}}"
    )
    return themes + (TEMPLATES / "report.css").read_text(encoding="utf-8").replace("FONT", FONT)


def digest(text: str) -> str:
    """Base64 of the SHA-256 of a piece of code or style, as a policy names it."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()


def policy(scripts: list[str], style: str) -> str:
    """The page's Content-Security-Policy: code and style by their digests, nothing from anywhere else."""
    allowed = " ".join(f"'sha256-{script}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'sha256-{style}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def safe_json(value: Any) -> str:
    """JSON that can stand inside a script element whatever texts it holds."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return (
        text.replace("&", "\\u0026")
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )
