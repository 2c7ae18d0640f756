"""Writes docs/ledger.md from the column tables: `python -m tests.repo.write_ledger_doc`."""

from __future__ import annotations

from pathlib import Path

from bench.records.request import COLUMNS, FLAGS
from bench.records.server import SERVER_MEANING
from bench.records.stage import INFLIGHT_MEANING, STAGE_MEANING

HEAD = """# The run folder

`runs/<UTC>-<id>/`, or what `--run-dir` says. Plain CSV and JSON; times are seconds from the run's start on the master's clock; an empty cell means absent, never 0.

| file | what it holds |
|---|---|
| `run.json` | how the run was made: versions, host, seed, schedule hash, command, config with secrets masked, problems while recording, digests of the files once the run has ended (`files`, below) |
| `requests.csv` | the ledger: one row per planned arrival, below |
| `stages.csv` | one row per stage, below |
| `inflight.csv` | the gauge: ten samples a second of each worker, below; shares no code with the ledger |
| `server_metrics.csv` | what the service says of itself once a second, when `target.metrics_url` names its metrics page or the engine is embedded, below |
| `locust_stats.csv`, `locust_stats_history.csv`, `locust_failures.csv`, `locust_exceptions.csv` | Locust's own files, written once more after the last event |
| `preflight.json` | what the preflight saw |
| `engine_requests.ndjson`, `engine_state.json` | embedded engine only: its own record of every request |
| `analysis.json` | all numbers and the verdict (`bench analyse` writes it again); JSON Schema: [bench/records/analysis.schema.json](../bench/records/analysis.schema.json) |
| `report.html`, `summary.json`, `summary.md`, `junit.xml` | the same for people and for CI (`bench report` writes them again) |
| `log.txt`, `engine.log` | consoles of Locust and the engine |

Locust's rows are named by stage (`03 chat @15`) and have the types `POST` (the whole request), `TTFT` and `TPOT`; times there are ms from the intended send time. Aggregated counts each arrival once. A failed arrival is a failure with its code; one that was never sent has no time.

`files` of `run.json`: for each of `requests.csv`, `stages.csv`, `inflight.csv`, `server_metrics.csv` and `locust_stats.csv` that there is, its `bytes` and `sha256`, taken when the last of them was closed (also by `bench simulate`, `bench recover` and after Ctrl-C). `bench analyse` compares: a file that differs, is missing or was added makes the run INVALID (`LED-025`). Packing `requests.csv` with gzip is no change: the digest is of the content. A folder without `files` (of an older version, or whose master was killed) is judged without. Under `files`, `run.json` lists the SHA-256 of its own content too: of everything in it but `files`, as JSON with sorted keys, without spaces, in ASCII (`json.dumps(..., sort_keys=True, separators=(",", ":"))`). So an edit of its target, SLO, gates or ceiling is found as well. Our own commands that write run.json again (a stop, the calibration of the client, `bench recover`) list it anew; `bench recover` refuses a folder that is not as its run left it. The digests show a slip or an edit; they are no signature: who edits a file can list another digest, or none.
"""


def table(title: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"\n## {title}\n", "| column | unit | meaning |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {unit} | {text} |" for name, unit, text in rows]) + "\n"


def text() -> str:
    """The page."""
    out = HEAD
    out += table("requests.csv", [(name, unit, meaning) for name, (unit, meaning) in COLUMNS.items()])
    out += "\nFlags:\n\n" + "\n".join(f"- `{name}`: {meaning}" for name, meaning in FLAGS.items()) + "\n"
    out += table("stages.csv", [(name, unit, meaning) for name, (unit, meaning) in STAGE_MEANING.items()])
    out += table("inflight.csv", [(name, unit, meaning) for name, (unit, meaning) in INFLIGHT_MEANING.items()])
    out += table("server_metrics.csv", [(name, unit, meaning) for name, (unit, meaning) in SERVER_MEANING.items()])
    return out


PAGE = Path(__file__).resolve().parents[2] / "docs" / "ledger.md"

if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
