"""`python -m engine.serve`: the embedded engine as a process of its own.

Input: a config file; options. Output: one line `READY http://HOST:PORT` on standard output when it accepts, then
only answers over HTTP; problems go to standard error. Exit codes: 0 after SIGTERM, SIGINT or the parent's end, 1
after a bug in a step (the traceback is on standard error), 2 for a bad config or option, 3 when it cannot listen.
Does not: daemonise, write files, or listen on other addresses than 127.0.0.1 unless told.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.config import load_config
from bench.config.errors import ConfigError
from engine.http_app import App
from engine.http_fleet import Fleet
from engine.http_loop import new_event_loop, tune_process
from engine.http_server import Server
from engine.live import LiveError, Table
from engine.settings import EngineConfig

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
DEFAULT_MODEL = "embedded-engine"


def build_parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m engine.serve", description="Serve the embedded engine over HTTP.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="config file (JSON or YAML)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port; 0 lets the system choose (default)")
    parser.add_argument("--api-key-file", type=Path, metavar="F", help="ask for this key on /v1 routes")
    parser.add_argument("--active", type=Path, metavar="FILE",
                        help="active.json of a rollout, put in force at the start when it is there")
    parser.add_argument("--json", action="store_true", help='say READY as JSON: {"ready": "http://HOST:PORT"}')
    parser.add_argument("--parent-pid", type=int, metavar="P", help="exit when process P is gone")
    parser.add_argument("--keep-alive-s", type=float, default=5.0, help="idle connections close after this (default 5)")
    return parser


async def watch_parent(pid: int, stop: asyncio.Event) -> None:
    """Set `stop` when process `pid` has ended (also while it is a zombie)."""
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            stop.set()
            return
        except OSError:
            descriptor = -1
        if descriptor >= 0:
            asyncio.get_running_loop().add_reader(descriptor, stop.set)
            return
    while not stop.is_set():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            stop.set()
        except PermissionError:
            pass
        await asyncio.sleep(0.5)


def changed(config_path: Path, changes: Mapping[str, Any]) -> EngineConfig:
    """The settings of the config with some keys changed. Raises ValueError."""
    try:
        return EngineConfig.from_config(load_config(config_path, overrides=dict(changes)).config)
    except ConfigError as problem:
        raise ValueError(str(problem)) from None


async def serve(app: App, options: argparse.Namespace) -> int:
    """Run until a signal or the parent's end; returns the exit code."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    # Not loop.add_signal_handler: closing the loop would put the default action back, and a second signal during the
    # exit would turn exit code 0 into a death by signal.
    for number in SIGNALS:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    crashed: list[bool] = []

    def crash() -> None:
        crashed.append(True)
        stop.set()

    for driver in app.fleet.drivers:
        driver.on_crash = crash
    server = Server(app, keep_alive_s=options.keep_alive_s)
    try:
        port = await server.start(options.host, options.port)
    except OSError as problem:
        print(f"engine: cannot listen on {options.host}:{options.port}: {problem.strerror or problem}; "
              "choose another --port, or 0", file=sys.stderr)
        return 3
    watcher = None
    if options.parent_pid is not None:
        watcher = loop.create_task(watch_parent(options.parent_pid, stop))
    host = f"[{options.host}]" if ":" in options.host else options.host
    with contextlib.suppress(BrokenPipeError):
        address = f"http://{host}:{port}"
        print(json.dumps({"ready": address}) if options.json else f"READY {address}", flush=True)
    await stop.wait()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if watcher is not None:
        watcher.cancel()
    server.stop()
    await asyncio.sleep(0)
    return 1 if crashed else 0


def main(arguments: list[str] | None = None) -> int:
    """Start the engine; returns the exit code."""
    options = build_parser().parse_args(arguments)
    table = None
    try:
        config = load_config(options.config).config
        if options.active is not None and options.active.exists():
            table = Table.read(json.loads(options.active.read_text(encoding="utf-8")))
        settings = EngineConfig.from_config(config)
        key = None
        if options.api_key_file is not None:
            key = options.api_key_file.read_bytes().strip()
            if not key:
                raise ValueError(f"{options.api_key_file} is empty; write the key into it")
    except (ConfigError, ValueError, OSError) as problem:
        print(f"engine: {problem}", file=sys.stderr)
        return 2

    async def run() -> int:
        fleet = Fleet(settings, output_mu=config.loadgen.output_len_mu, output_sigma=config.loadgen.output_len_sigma,
                      resolve=lambda changes: changed(options.config, changes))
        app = App(fleet, model=config.model or DEFAULT_MODEL, api_key=key,
                  guard_debug=key is not None and options.host not in LOOPBACK)
        if table is not None:
            try:
                app.rollout.apply(table)
            except LiveError as problem:
                print(f"engine: {options.active}: {problem}", file=sys.stderr)
                return 2
        tune_process()
        return await serve(app, options)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(run())


if __name__ == "__main__":
    raise SystemExit(main())
