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
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bench.records.analysis import Analysis
from reports import charts_capacity, charts_detail, charts_little, charts_model, svg, tables, view
from reports.charts import WIDTH, Chart, Context, live_spec, phone_spec, static_spec
from reports.figures import Figures
from reports.themes import FONT, chart_config, css_variables, ink
from reports.words import Words

TEMPLATES = Path(__file__).parent / "templates"
FRAME = 440  # px of a distribution in an opened stage


def render(analysis: Analysis, *, lang: str = "en", live: bool = True) -> str:
    """The report page. `live=False` leaves the chart library out (about 60 kB instead of 1 MB)."""
    words = Words(lang)
    ctx = Context(analysis, words, Figures(words))
    page = _Page(ctx, live)
    figures = _figures(ctx, page)
    stages, frames = _stages(ctx)
    css = _css()
    js = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    bundle = svg.bundle() if live and page.specs else ""
    live = bool(bundle)
    run = {"tool_version": "", "run_id": "", **analysis.run}
    worst = tables.free_form(ctx, analysis.worst[:20], only=tables.WORST_KEYS)
    sections = [
        "verdict",
        "capacity",
        "little",
        *(["model"] if analysis.model else []),
        "stages",
        "errors",
        "requests",
        "client",
        "reproduce",
        "method",
    ]
    env = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals.update(t=words, symbols=view.SYMBOLS)
    return env.get_template("report.html.j2").render(
        lang=lang,
        run=run,
        title=view.title(ctx),
        meta=view.meta(ctx),
        p95_crossing=view.p95_crossing(ctx),
        verdict=view.verdict(ctx),
        tiles=view.tiles(ctx),
        gates=[view.gate_view(ctx, g) for g in analysis.gates],
        warnings=[view.reason_view(ctx, r) for r in analysis.warnings],
        capacity_sentence=analysis.capacity.sentence
        if ctx.shows_capacity and lang == "en"
        else ""
        if ctx.shows_capacity
        else words("capacity_invalid"),
        figs=figures,
        repeats=tables.repeats(ctx),
        model=_model(ctx),
        stages=stages,
        frames=frames,
        diagnosis=[view.reason_view(ctx, r) for r in analysis.diagnosis],
        stage_columns=tables.stage_columns(ctx),
        stage_notes=tables.stage_notes(ctx),
        error_layers=tables.error_layers(ctx),
        worst=worst,
        arrivals={"columns": figures["sender"].chart.columns, "rows": figures["sender"].chart.rows}
        if figures["sender"]
        else None,
        clients=tables.free_form(ctx, analysis.clients, only=tables.CLIENT_KEYS),
        checks=tables.checks(ctx),
        command=tables.command(ctx),
        environment=tables.environment(ctx),
        config=tables.config_text(ctx),
        origins=[[k, v] for k, v in (analysis.run.get("config_origin") or {}).items()],
        files=[[k, v] for k, v in (analysis.run.get("files") or {}).items()],
        glossary=tables.glossary(ctx),
        toc=[{"id": s, "title": words(f"sec_{s}")} for s in sections],
        css=Markup(css),
        js=Markup(js),
        bundle=Markup(bundle),
        csp=policy([js, bundle] if live else [js], css),
        live=live,
        charts_json=Markup(safe_json({"config": chart_config(), "specs": page.specs})),
    )


# Legend symbols, about 8 px around (17, 7).
SYMBOL_PATHS = {
    "circle": "M13 7a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "square": "M13.4 3.4h7.2v7.2h-7.2Z",
    "triangle-up": "M17 2.4L21.6 10.6H12.4Z",
    "cross": "M15.5 3h3v2.5h2.5v3h-2.5v2.5h-3v-2.5h-2.5v-3h2.5Z",
    "diamond": "M17 2L21.4 7L17 12L12.6 7Z",
}


class _Drawn:
    """A chart with its number and its drawing, as the templates want it."""

    def __init__(self, chart: Chart, number: int, drawing: tuple[str, int, int]) -> None:
        self.chart, self.number = chart, number
        inner, self.width, self.height = drawing
        self.svg = Markup(inner)
        self.phone: dict[str, Any] | None = None
        if chart.phone:
            inner, width, height = svg.draw(phone_spec(chart))
            self.phone = {"svg": Markup(inner), "width": width, "height": height}
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
        drawing = svg.draw(static_spec(chart))
        if self.live:
            self.specs[chart.chart_id] = live_spec(chart)
        return _Drawn(chart, self.number, drawing)


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
    out["model"] = [page.add(c, same_number=i > 0) for i, c in enumerate(charts_model.charts(ctx))]
    out["residual"] = page.add(charts_model.residuals(ctx))
    out["errors"] = page.add(charts_detail.errors(ctx))
    out["heatmap"] = page.add(charts_detail.heatmap(ctx))
    out["sender"] = page.add(charts_detail.sender(ctx))
    return out


def _stages(ctx: Context) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of the stage table, and the shared frames of their distributions."""
    ordered = ctx.planned_stages
    curves = {(s.stage, n): charts_detail.ecdf(ctx, s, n) for s in ordered for n in ("ttft", "tpot")}
    frames: dict[str, svg.Frame] = {}
    for name in ("ttft", "tpot"):
        if any(curves[s.stage, name] for s in ordered):
            spec, domain = charts_detail.ecdf_frame(ctx, name)
            spec["width"] = FRAME
            spec["config"] = {**spec["config"], "font": "sans-serif"}
            frames[name] = svg.Frame(spec, domain)
    rows = []
    for stage in ordered:
        row = tables.stage_row(ctx, stage)
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
        rows.append(row)
    shared = [{"name": n, "svg": Markup(f.inner), "width": f.width, "height": f.height} for n, f in frames.items()]
    return rows, shared


def _model(ctx: Context) -> dict[str, Any] | None:
    if not ctx.analysis.model:
        return None
    return {
        "sentence": str(ctx.analysis.model.get("sentence") or "") if ctx.shows_capacity else ctx.words("cap_invalid"),
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


def policy(scripts: list[str], style: str) -> str:
    """The page's Content-Security-Policy: code and style by hash, nothing from anywhere else."""

    def digest(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode() + "'"

    return (
        f"default-src 'none'; script-src {' '.join(digest(s) for s in scripts)}; style-src {digest(style)}; "
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
