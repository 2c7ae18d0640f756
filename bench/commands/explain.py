"""`bench explain RUN REQUEST`: the story of one request, every decision with its numbers.

Input: a run folder and a request id (or STAGE-ARRIVAL, STAGE:ARRIVAL). Output: text or JSON on standard output.
Does not: decide or guess: what nobody recorded is said to be missing.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import click

USAGE_EXIT = 2
PLACE = re.compile(r"([0-9]+)[-:]([0-9]+)")  # stage and arrival


class ExplainError(Exception):
    """The request cannot be explained; the text says what to do."""


@click.command(
    "explain",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""The story of one request: every decision, its numbers and its rule.

    REQUEST is a request id of requests.csv, or its stage and arrival as the report shows them, such as 3-117 (3:117
    is the same). `bench simulate --decisions` records the decisions, and so does a run against the embedded engine.
    A service outside shows none: of its requests the client's times are told, which clause of the SLO was missed and
    by how much, and who else was in flight.

    \b
    Example:
      bench simulate --config configs/demo.json --decisions --run-dir runs/sim
      bench explain runs/sim sim-6-200
      bench explain runs/sim 6-200 --json
      bench run --config configs/demo.json --run-dir runs/live
      bench explain runs/live 6-200
    """,
)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("request_name", metavar="REQUEST")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def command(run: Path, request_name: str, as_json: bool) -> None:
    """Explain and exit."""
    try:
        found = story(run, request_name)
    except ExplainError as error:
        click.echo(f"bench explain: {error}", err=True)
        sys.exit(USAGE_EXIT)
    click.echo(json.dumps(found, ensure_ascii=False) if as_json else "\n".join(text(found)))


def story(run: Path, name: str) -> dict[str, Any]:
    """Row, decisions and the engine's record of a request. Raises ExplainError."""
    from bench.commands.decisions import DECISIONS, of_request
    from bench.commands.explain_row import around, clauses

    row = _row(run, name)
    lacking = [column for column in ("request_id", "stage", "arrival", "intended_s", "status") if not row.get(column)]
    if lacking:
        without = ", ".join(lacking)
        raise ExplainError(f"{run}: the row of {name!r} has no {without}; bench analyse {run} says what is wrong")
    request_id = row["request_id"]
    log = run / DECISIONS
    try:
        decisions = of_request(log, request_id) if log.exists() else []
        engine = _engine_record(run / "engine_requests.ndjson", request_id)
    except (OSError, ValueError) as error:
        raise ExplainError(f"{run}: a record is damaged ({error}); simulate the run again with --decisions") from None
    _to_run_time(decisions, row, engine)
    document = _document(run)
    slo, others = _slo(document, row.get("request_class") or ""), around(run, row) if not decisions else {}
    return {
        "run": run.name,
        "request_id": request_id,
        "row": row,
        "decisions": decisions,
        "engine": engine,
        "slo": slo,
        "clauses": clauses(row, slo, tpot_unmeasured=others.get("tpot_unmeasured", False)),
        "around": others,
        "missing": "" if decisions else _missing(run, document, engine),
    }


def _missing(run: Path, document: dict[str, Any], engine: dict[str, Any] | None) -> str:
    """Why there is no decision, and where there would be one."""
    from bench.commands.untold import is_ours

    if engine is not None:
        return (
            "the engine keeps its newest decisions only, and those of this request are gone; its own times stand "
            f"in; `bench simulate --run {run} --decisions` shows what the scheduler would have decided"
        )
    if document.get("simulated"):
        return "no decision was recorded; simulate it again with --decisions"
    if is_ours(document):
        return "no decision was recorded: the engine's records are not in this folder (it ended before they were read)"
    return (
        "decisions (who waited, was batched, gave way) are the service's own and are known of the embedded engine "
        "alone; of a service outside, these times are all that is known"
    )


def _to_run_time(decisions: list[dict[str, Any]], row: dict[str, str], engine: dict[str, Any] | None) -> None:
    """Put the engine's clock on the run's: what it read first is what was sent. Simulated decisions have run time."""
    if not decisions or "stage" in decisions[0] or not row.get("sent_s"):
        return
    received_s = engine["received_s"] if engine and engine.get("received_s") is not None else decisions[0]["at_s"]
    shift_s = float(row["sent_s"]) - received_s
    for decision in decisions:
        decision["at_s"] += shift_s


def _document(run: Path) -> dict[str, Any]:
    try:
        found = json.loads((run / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _slo(document: dict[str, Any], request_class: str) -> dict[str, float]:
    """The deadlines of a class in seconds; empty class: those of all others."""
    config = document.get("config") or {}
    slo = dict(config.get("slo") or {})
    for entry in config.get("classes") or []:
        if isinstance(entry, dict) and request_class and entry.get("name") == request_class:
            slo |= {key: value for key, value in entry.items() if value is not None}
    return {key: slo[key] / 1e3 for key in ("ttft_deadline_ms", "tpot_deadline_ms") if slo.get(key) is not None}


def _row(run: Path, name: str) -> dict[str, str]:
    from bench.records.ledger import REQUESTS, find_requests, open_rows

    place = PLACE.fullmatch(name)
    stage, arrival = (str(int(number)) for number in place.groups()) if place else ("", "")
    by_place = None
    try:
        with open_rows(find_requests(run) or run / REQUESTS) as handle:
            for row in csv.DictReader(handle):
                if row.get("request_id") == name:
                    return row
                if place and by_place is None and row.get("stage") == stage and row.get("arrival") == arrival:
                    by_place = row  # an id that looks like a place goes first
    except OSError as error:
        raise ExplainError(f"{error.filename or run}: {error.strerror or error}; give a run folder") from None
    if by_place is not None:
        return by_place
    raise ExplainError(f"{run}: no request {name!r}; give a request_id, or STAGE-ARRIVAL such as 3-117")


def _engine_record(path: Path, request_id: str) -> dict[str, Any] | None:
    if not path.exists():
        return None
    mark = json.dumps(request_id)
    with path.open(encoding="utf-8") as handle:
        for line in handle:
            if mark in line:
                record = json.loads(line)
                if record.get("request_id") == request_id:
                    return record
    return None


def text(found: dict[str, Any]) -> list[str]:
    """The story as lines."""
    from bench.commands.explain_row import around_lines, number, timeline

    row = found["row"]
    start = number(row, "intended_s") or 0.0
    who = ", ".join(f"{k} {row[k]}" for k in ("tenant", "request_class") if row.get(k))
    lines = [
        f"request {found['request_id']} of {found['run']}: stage {row['stage']}, arrival {row['arrival']}, "
        f"{row.get('input_tokens') or '?'} prompt tokens, max_tokens {row.get('max_tokens') or '?'}"
        + (f", {who}" if who else ""),
        "",
    ]
    told = [(float(d["at_s"]) - start, d["event"], d["rule"], d["text"]) for d in found["decisions"]]
    if told and "stage" not in found["decisions"][0]:
        told = sorted([*_client_side(row, start), *told], key=lambda line: round(line[0], 6))
    lines += [_line(*line) for line in told]
    if not found["decisions"] and found["engine"]:
        lines += _engine_lines(found["engine"])
    elif found["engine"]:
        lines.append(f"{'':15}{_engine_cost(found['engine'])}")
    elif not found["decisions"]:
        lines += [_line(*line) for line in timeline(row)]
    lines += ["", *around_lines(found["around"], row), _outcome(row, found["slo"])]
    if found["clauses"]:
        met = all(clause["met"] for clause in found["clauses"])
        lines.append(f"SLO {'met' if met else 'missed'}: " + "; ".join(clause["text"] for clause in found["clauses"]))
    if found["missing"]:
        lines.append(f"note: {found['missing']}")
    return lines


def _line(at_s: float, event: str, rule: str, said: str) -> str:
    return f"{at_s * 1e3:>z10.1f} ms  {event:<18} {said}  [{rule}]"


def _engine_lines(record: dict[str, Any]) -> list[str]:
    start = record.get("received_s")
    steps = (
        ("received_s", "received"),
        ("queued_s", "queued"),
        ("scheduled_s", "scheduled"),
        ("first_token_s", "first token"),
        ("last_token_s", "last token"),
        ("done_s", record.get("outcome") or "done"),
    )
    lines = [
        _line(record[key] - start, name, "engine", "")
        for key, name in steps
        if start is not None and record.get(key) is not None
    ]
    if record.get("reason"):
        lines.append(
            f"{'':15}reason: {record['reason']}; preempted {record.get('preemptions', 0)} times; {_engine_cost(record)}"
        )
    return lines


def _engine_cost(record: dict[str, Any]) -> str:
    replica = record.get("replica")
    where = "" if replica is None else f" (replica {replica})"
    return f"scheduler CPU {(record.get('decision_s') or 0.0) * 1e3:.2f} ms while it was inside{where}"


def _client_side(row: dict[str, str], start: float) -> list[tuple[float, str, str, str]]:
    """What the client did and saw."""
    if not row.get("sent_s"):
        return []
    lag_s = float(row["sent_s"]) - start
    said = f"{lag_s * 1e3:z.1f} ms after it was due; the engine's clock is set to this moment"
    seen = (("first_token_s", "first token here"), ("done_s", "end here"))
    return [(lag_s, "sent", "client", said)] + [
        (float(row[key]) - start, name, "client", "") for key, name in seen if row.get(key)
    ]


def _outcome(row: dict[str, str], slo: dict[str, float]) -> str:
    parts = [f"outcome: {row['status']}" + (f" {row['code']}" if row.get("code") else "")]
    if row.get("detail"):
        parts.append(row["detail"])
    if row.get("retry_after_s"):
        parts.append(f"Retry-After {float(row['retry_after_s']):.3g} s")
    for column, key, label in (("ttft_s", "ttft_deadline_ms", "TTFT"), ("tpot_s", "tpot_deadline_ms", "TPOT")):
        if row.get(column):
            value = float(row[column])
            limit = slo.get(key)
            judged = "" if limit is None else f" {'<=' if value <= limit else '>'} {limit * 1e3:.0f} ms"
            parts.append(f"{label} {value * 1e3:.1f} ms{judged}")
    if row.get("output_tokens"):
        parts.append(f"{row['output_tokens']} tokens")
    return "; ".join(parts)
