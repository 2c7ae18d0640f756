"""What a run's own files tell of one request without recorded decisions: its times, its clauses, who else was there.

Input: a run folder, its row of requests.csv as text, the deadlines. Output: plain dicts and lines.
Does not: guess at what the service did inside; that is known of the embedded engine alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# column -> (event, what it is)
STEPS = (
    ("headers_s", "headers", "the answer's header block is complete"),
    ("first_token_s", "first token", ""),
    ("first_content_s", "first content", "what came before was reasoning or a tool call"),
    ("last_token_s", "last token", ""),
    ("done_s", "end", ""),
)
NEAR_S = 5.0  # a look at the service's page farther from the moment says nothing about it


def number(row: dict[str, str], name: str) -> float | None:
    """A cell as a number; None when it is empty or none."""
    try:
        return float(row[name]) if row.get(name) else None
    except ValueError:
        return None


def timeline(row: dict[str, str]) -> list[tuple[float, str, str, str]]:
    """(seconds since it was due, event, rule, text) of what the client did and saw, in order."""
    start = number(row, "intended_s") or 0.0
    found = [(0.0, "due", "client", f"planned {start:.3f} s after the run's start")]
    sent_s = number(row, "sent_s")
    if sent_s is None:
        return [*found, (0.0, "never sent", "client", row.get("detail") or row.get("code") or "")]
    found.append((sent_s - start, "sent", "client", _sending(row, sent_s - start)))
    for column, event, said in STEPS:
        at_s = number(row, column)
        if at_s is None or (column == "first_content_s" and at_s == number(row, "first_token_s")):
            continue
        if column == "first_token_s":
            said = f"{(at_s - sent_s) * 1e3:z.1f} ms after it was sent: the service's share of the TTFT"
        elif column == "last_token_s":
            gaps = at_s - (number(row, "first_token_s") or at_s)
            said = f"{row.get('output_tokens') or '?'} tokens, {gaps * 1e3:z.1f} ms after the first"
        elif column == "done_s" and row.get("status") != "ok":
            said = " ".join(part for part in (row.get("status"), row.get("code")) if part)
        found.append((at_s - start, event, "client", said))
    return found


def _sending(row: dict[str, str], lag_s: float) -> str:
    parts = [f"{lag_s * 1e3:z.1f} ms after it was due: our own lateness"]
    names = (("DNS", "dns_s"), ("connect", "connect_s"), ("TLS", "tls_s"))
    steps = [(label, number(row, name)) for label, name in names]
    known = [f"{label} {value * 1e3:.1f} ms" for label, value in steps if value is not None]
    if row.get("connection"):
        parts.append(f"{row['connection']} connection" + (f" ({', '.join(known)})" if known else ""))
    return "; ".join(parts)


def clauses(row: dict[str, str], slo: dict[str, float], *, tpot_unmeasured: bool = False) -> list[dict[str, Any]]:
    """Per clause of the SLO: its limit and value in seconds, whether it was met, by how much, in words."""
    found = []
    ok = row.get("status") == "ok"
    for name, column, key in (("TTFT", "ttft_s", "ttft_deadline_ms"), ("TPOT", "tpot_s", "tpot_deadline_ms")):
        limit_s, value_s = slo.get(key), number(row, column)
        if limit_s is None:
            continue
        limit = f"{limit_s * 1e3:g} ms"
        met = ok and (value_s <= limit_s if value_s is not None else name == "TPOT" and not tpot_unmeasured)
        if not ok:
            ended = row.get("status") or "nothing"
            said = f"missed: the arrival ended as {ended}, which meets no clause (limit {limit})"
        elif value_s is None and met:
            said = f"met: the answer is too short to have one (limit {limit})"
        elif value_s is None:
            said = f"missed: it was not measured (limit {limit})"
        else:
            apart = abs(value_s - limit_s)
            share = f", {apart / limit_s:.1%} of the limit" if limit_s > 0 else ""
            said = f"{'met' if met else 'missed'}: {value_s * 1e3:.1f} ms {'<=' if met else '>'} {limit}, "
            said += f"{apart * 1e3:.1f} ms {'to spare' if met else 'too long'}{share}"
        found.append({"clause": name, "limit_s": limit_s, "value_s": value_s, "met": met, "text": f"{name} {said}"})
    return found


def around(run: Path, row: dict[str, str]) -> dict[str, Any]:
    """Who else was there: requests in flight when it was sent, its rank in the stage, the service's own queue.

    Empty where the ledger cannot be read as a whole. `tpot_unmeasured`: the analysis's rule on this row.
    """
    import numpy as np

    from analysis.little import in_flight_at
    from analysis.load import LedgerError, read_ledger, requests_path
    from analysis.row_checks import unmeasured_tpot
    from analysis.run_files import read_server_gauge

    try:
        ledger = read_ledger(requests_path(run))
    except (LedgerError, OSError, ValueError):
        return {}
    stage, arrival, repeat = (int(number(row, name) or 0) for name in ("stage", "arrival", "repeat"))
    mine = np.flatnonzero(
        (ledger["stage"] == stage) & (ledger["arrival"] == arrival) & (ledger["repeat"] == repeat)
    )  # fmt: skip
    if not len(mine):
        return {}
    found: dict[str, Any] = {"tpot_unmeasured": bool(unmeasured_tpot(ledger, mine[:1])[0])}
    sent_s = number(row, "sent_s")
    if sent_s is not None:
        known = np.isfinite(ledger["sent_s"]) & np.isfinite(ledger["done_s"])
        count = in_flight_at(np.array([sent_s]), ledger["sent_s"][known], ledger["done_s"][known])[0]
        found["in_flight"] = max(int(count) - 1, 0)  # without itself
    peers = (ledger["stage"] == stage) & (ledger["repeat"] == repeat) & ledger.is_value("phase", row.get("phase") or "")
    ok = ledger.is_value("status", "ok")
    ttft_s = np.where(ok, ledger["ttft_s"].astype(float), np.inf)[peers]
    ttft_s = np.sort(np.where(np.isnan(ttft_s), np.inf, ttft_s))
    value_s = number(row, "ttft_s") if row.get("status") == "ok" else None
    found |= {"peers": len(ttft_s), "peers_missing": int(np.isinf(ttft_s).sum()), "peers_ttft_p50_s": None}
    if len(ttft_s):
        middle = float(ttft_s[(len(ttft_s) + 1) // 2 - 1])  # nearest rank
        found["peers_ttft_p50_s"] = middle if np.isfinite(middle) else None
        found["peers_faster"] = int((ttft_s < value_s).sum()) if value_s is not None else None
    gauge = read_server_gauge(run)
    if gauge is not None and sent_s is not None and len(gauge.t_s):
        near = int(np.abs(gauge.t_s - sent_s).argmin())
        if abs(float(gauge.t_s[near]) - sent_s) <= NEAR_S:
            cells = ((key, float(getattr(gauge, key)[near])) for key in ("running", "waiting", "kv_usage"))
            known_cells = {key: value for key, value in cells if np.isfinite(value)}
            found["service"] = {"after_s": float(gauge.t_s[near]) - sent_s, **known_cells}
    return found


def around_lines(found: dict[str, Any], row: dict[str, str]) -> list[str]:
    """`around` in sentences."""
    lines = []
    if "in_flight" in found:
        lines.append(f"in flight when it was sent: {found['in_flight']} other requests of this run")
    service = found.get("service")
    if service:
        when = f"{abs(service['after_s']):.1f} s {'after' if service['after_s'] >= 0 else 'before'}"
        parts = [f"{service[key]:.0f} {key}" for key in ("running", "waiting") if key in service]
        parts += [f"{service['kv_usage']:.0%} of the KV memory in use"] if "kv_usage" in service else []
        if parts:
            lines.append(f"the service's own page {when} it was sent: {', '.join(parts)}")
    if found.get("peers"):
        middle = found["peers_ttft_p50_s"]
        said = "never came for half of them" if middle is None else f"is {middle * 1e3:.1f} ms in the middle"
        rank = found.get("peers_faster")
        place = "" if rank is None else f"; {rank} of {found['peers']} were faster than this one"
        phase = row.get("phase") or "stage"
        lines.append(f"TTFT of the {found['peers']} arrivals of its stage ({phase}) {said}{place}")
    return lines
