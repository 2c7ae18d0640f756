"""The run in Locust's web page: a tab "SLO" with one row per stage, and a page `/slo` with curves.

Input: the web UI of Locust, the conductor. Output: template arguments, two routes, rows in `/stats/requests`.
Does not: count or judge (`live.py` counts), or hold any part of a key.

1. Both routes ask for the login when Locust has one, and stand below `--web-base-path`.
2. The page's policy allows one script and one style by their SHA-256 and no address but its own.
3. The browser draws: this process sends numbers, a few kilobytes every two seconds.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from locust.web import request  # Flask's, by the name under which Locust uses it

PAGES = Path(__file__).resolve().parent / "pages"
TAB = "slo"
COLUMNS = (
    ("stage", "Stage"),
    ("offered", "Offered QPS"),
    ("arrived", "Arrived QPS"),
    ("attainment", "Attainment so far"),
    ("ttft", "TTFT p50 / p95 / p99, ms"),
    ("tpot", "TPOT p50 / p95 / p99, ms"),
    ("flight", "In flight"),
    ("lag", "Send lag p99, ms"),
    ("verdict", "Verdict so far"),
)


def attach(web_ui: Any, options: Any, conductor: Any) -> None:
    """Add the tab and the page to a web UI that has not begun to listen."""
    web_ui.template_args["extended_tabs"] = [{"title": "SLO", "key": TAB}]
    structure = [{"key": key, "title": title} for key, title in COLUMNS]
    web_ui.template_args["extended_tables"] = [{"key": TAB, "structure": structure}]
    web_ui.template_args["extended_csv_files"] = [{"href": "./slo", "title": "SLO curves of this run (live page)"}]
    base = (getattr(options, "web_base_path", "") or "").rstrip("/")
    page, headers = document()

    @web_ui.auth_required_if_enabled
    def slo() -> Any:
        return page, 200, headers

    @web_ui.auth_required_if_enabled
    def slo_data() -> Any:
        summary = conductor.live.summary(conductor.run_time_s)
        return json.dumps(summary), 200, {"Content-Type": "application/json", "Cache-Control": "no-store"}

    web_ui.app.add_url_rule(f"{base}/slo", "bench_slo", slo)
    web_ui.app.add_url_rule(f"{base}/slo/data", "bench_slo_data", slo_data)

    @web_ui.app.after_request
    def add_rows(response: Any) -> Any:
        if request.path == f"{base}/stats/requests" and response.status_code == 200 and response.is_json:
            data = response.get_json()
            data["extended_stats"] = [{"key": TAB, "data": table(conductor.live.summary(conductor.run_time_s))}]
            response.set_data(json.dumps(data))
        return response


def document() -> tuple[str, dict[str, str]]:
    """The page with its style and script inside, and its headers."""
    style, script = ((PAGES / name).read_text(encoding="utf-8") for name in ("slo.css", "slo.js"))
    page = (PAGES / "slo.html").read_text(encoding="utf-8").replace("STYLE", style, 1).replace("SCRIPT", script, 1)
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    return page, {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


def _digest(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode() + "'"


def table(summary: dict[str, Any]) -> list[dict[str, str]]:
    """Rows of the tab: the whole run first, then the stages, the newest first. Every cell is ready text.

    A refused start has a row of its own before them: the rows below it are the previous run's, and say so.
    """
    target, refused = summary["target_qps"], bool(summary["problem"])
    before = "previous run" if refused else "run"
    run = {
        "stage": f"{before} {summary['run_id']}".strip(),
        "offered": "" if target is None else f"target {target:g}",
        "flight": str(summary["in_flight"]) if summary["stages"] else "",
        "verdict": summary["run_verdict"],
    }
    stages = [_row(s) for s in reversed(summary["stages"])]
    if refused:
        stages = [row | {"stage": f"previous run: {row['stage']}"} for row in stages]
    rows = [run, *stages] if stages or not refused else []
    if refused:
        rows.insert(0, {"stage": "refused start", "verdict": summary["verdict"]})
    # Locust sorts by "name", which is no column of ours: it keeps this order.
    return [{"name": f"{i:05d}"} | {key: row.get(key, "") for key, _ in COLUMNS} for i, row in enumerate(rows)]


def _row(s: dict[str, Any]) -> dict[str, str]:
    arrived = s["arrived_qps"]
    left = f", {s['left_s']:.0f} s left" if s["left_s"] else ""
    late = s["sender_late"]
    flight = f"{s['in_flight']}" if s["state"] != "ended" else f"0 (max {s['in_flight_max']})"
    marks = f" [{', '.join(s['marks'])}]" if s["marks"] else ""
    state = "" if s["state"] == "ended" else f" ({s['state']}{left})"
    return {
        "stage": s["name"] + state,
        "offered": f"{s['offered_qps']:g}",
        "arrived": "" if arrived is None else f"{arrived:.1f}",
        "attainment": attainment_text(s["attainment"]) + (f" of {s['due']}" if s["attainment"] else ""),
        "ttft": _three(s["ttft_s"]),
        "tpot": _three(s["tpot_s"]) + _unmeasured(s["tpot_unmeasured"]),
        "flight": flight,
        "lag": _ms(s["send_lag_p99_s"]) + (f" (too late, limit {_ms(s['send_lag_limit_s'])})" if late else ""),
        "verdict": (f"INVALID, our sender is late ({s['verdict']})" if late else s["verdict"]) + marks,
    }


def _unmeasured(count: int) -> str:
    """Long answers without a TPOT: they miss the clause and are in no percentile."""
    return f" ({count} not measured)" if count else ""


def attainment_text(pair: list[float] | None) -> str:
    """`98.21 %`, or `97.10 to 99.40 %` while answers are open."""
    if pair is None:
        return ""
    low, high = f"{100 * pair[0]:.2f}", f"{100 * pair[1]:.2f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _three(values: dict[str, Any]) -> str:
    return " / ".join(_ms(values[name]) or "–" for name in ("p50", "p95", "p99")) if values["n"] else ""


def _ms(seconds: float | str | None) -> str:
    if seconds is None:
        return ""
    if seconds == "inf":
        return "∞"
    ms = float(seconds) * 1000
    return f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}"
