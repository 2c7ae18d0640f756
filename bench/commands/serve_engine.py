"""`bench serve-engine`: start the embedded engine in the foreground.

Input: options. Output: the engine's READY line; it runs until Ctrl-C.
Does not: arithmetic or HTTP; the engine is a process of its own that takes this one's place.
"""
from __future__ import annotations

import os
import sys
from pathlib import Path

import click


@click.command()
@click.option("--config", "config_path", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True,
              help="Config file whose model, scheduler, admission and engine sections are served.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; others can reach the "
              "engine only when you give another one.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True,
              help="Port; 0 lets the system choose.")
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Ask for the key in this file on the /v1 routes.")
@click.option("--active", type=click.Path(dir_okay=False, path_type=Path),
              help="active.json of a rollout: the engine starts at the stage it was at.")
@click.option("--json", "as_json", is_flag=True, help='The line that says READY as JSON: {"ready": "http://..."}.')
def command(
    config_path: Path, host: str, port: int, api_key_file: Path | None, active: Path | None, as_json: bool
) -> None:
    """Start the embedded engine and leave it running until Ctrl-C.

    It speaks the OpenAI API with a simulated GPU behind a real scheduler; /metrics, /debug/state and
    /debug/requests show what it does.

    \b
    Example:
      bench serve-engine --config configs/demo.json --port 8000
    """
    arguments = [sys.executable, "-m", "engine.serve", "--config", str(config_path), "--host", host,
                 "--port", str(port)]
    if api_key_file is not None:
        arguments += ["--api-key-file", str(api_key_file)]
    if active is not None:
        arguments += ["--active", str(active)]
    if as_json:
        arguments += ["--json"]
    os.execv(sys.executable, arguments)
