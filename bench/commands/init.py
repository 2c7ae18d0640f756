"""`bench init`: the first files of a new test, beside your own code. Never overwrites."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

USAGE_EXIT = 2

# The seed article's test against a service of one's own: sweep, SLO, limits that stop a costly mistake.
CONFIG: dict[str, Any] = {
    "model": "",
    "base_url": "",
    "slo": {"ttft_deadline_ms": 800, "tpot_deadline_ms": 100, "p95_target_ms": 45000, "attainment_target": 0.99},
    "loadgen": {
        "arrival_process": "poisson",
        "target_qps": 20,
        "duration_sec": 300,
        "input_len_range": [100, 2000],
        "output_len_dist": "lognormal",
        "output_len_mu": 5.0,
        "output_len_sigma": 0.6,
        "max_output_tokens": 1024,
        "seed": 1,
    },
    "sweep": {"qps": [5, 10, 15, 20, 25, 30, 35, 40]},
    "gates": [
        {"metric": "error_ratio", "operator": "<=", "value": 0.5, "at": "all", "abort": True},
    ],
    "limits": {"max_requests": 100000, "max_duration_sec": 7200},
}

ENV_EXAMPLE = """\
# Copy to .env (which git must ignore) and fill in. The key itself belongs in a file that only you can read.
BENCH_BASE_URL=https://your-service.example/v1
BENCH_MODEL=your-model
BENCH_API_KEY_FILE=/path/to/the/key
"""

COMPOSE = """\
# One run in a container:  docker compose run --rm bench
# SCHEDULER_BENCH is the folder of a scheduler-bench checkout; the other values come from .env.
services:
  bench:
    image: python:3.11-slim
    working_dir: /work
    environment:
      BENCH_BASE_URL: ${BENCH_BASE_URL:?set it in .env}
      BENCH_MODEL: ${BENCH_MODEL:?set it in .env}
      BENCH_API_KEY_FILE: /run/secrets/bench_api_key
    secrets: [bench_api_key]
    volumes:
      - .:/work
      - ${SCHEDULER_BENCH:?folder of the checkout}:/opt/scheduler-bench:ro
    init: true
    stop_grace_period: 2m
    ulimits:
      nofile: 65536
    command: >-
      sh -c "cp -r /opt/scheduler-bench /tmp/src && pip install -q -r /tmp/src/requirements.lock
      && pip install -q --no-deps -e /tmp/src && bench run --config CONFIG"
secrets:
  bench_api_key:
    file: ${BENCH_API_KEY_FILE:?set it in .env}
"""


@click.command(
    "init",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Write a first config, .env.example and a compose file.

    \b
    Example:
      bench init
      bench init load-test --name chat.json

    A file that is there already is left as it is. Fill in the address and the model, then: bench check, bench
    validate, bench run.
    """,
)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("."))
@click.option("--name", default="bench.json", show_default=True, help="Name of the config file.")
@click.option("--json", "as_json", is_flag=True, help="Print the written and the kept paths as one JSON object.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing on success.")
def command(folder: Path, name: str, as_json: bool, quiet: bool) -> None:
    """Write what is not there yet."""
    if Path(name).name != name or not name.endswith(".json"):
        raise click.UsageError(f"--name is {name!r}; a plain file name that ends in .json, such as bench.json")
    files = {
        name: json.dumps(CONFIG, indent=2) + "\n",
        ".env.example": ENV_EXAMPLE,
        "compose.yaml": COMPOSE.replace("CONFIG", name),
    }
    written, kept = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            path = folder / file
            try:
                with path.open("x", encoding="utf-8") as handle:  # x: fails when it exists, also as a dangling link
                    handle.write(text)
            except FileExistsError:
                kept.append(str(path))
            else:
                written.append(str(path))
    except OSError as error:
        where = error.filename or folder
        click.echo(f"bench init: {where}: {error.strerror}; choose a folder that can be written", err=True)
        sys.exit(USAGE_EXIT)
    if as_json:
        click.echo(json.dumps({"written": written, "kept": kept}))
    elif not quiet:
        for path_text in written:
            click.echo(f"written: {path_text}")
        for path_text in kept:
            click.echo(f"kept, was there: {path_text}")
        click.echo(f"next: copy {folder / '.env.example'} to .env in the folder where you call bench, and fill it in")
        click.echo(f"then: bench check --config {folder / name}")
