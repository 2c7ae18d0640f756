"""Starts the embedded engine as a child process and stops it again.

Input: the path of a config. Output: `EngineProcess` with the base URL, the process id and `stop()`.
Does not: speak HTTP, or leave anything running: the child exits by itself when this process is gone.
"""
from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

READY_LIMIT_S = 30.0
STOP_LIMIT_S = 5.0


class EngineStartError(RuntimeError):
    """The engine did not come up; the text says why, `exit_code` is its own."""

    def __init__(self, message: str, exit_code: int | None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineProcess:
    """A running engine."""

    def __init__(self, process: subprocess.Popen[bytes], base_url: str) -> None:
        self._process = process
        self.base_url = base_url
        self.pid = process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def stop(self) -> int:
        """End the engine and wait for it; returns its exit code. May be called twice."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()


def start_engine(
    config_path: str | os.PathLike[str], *, api_key_file: str | os.PathLike[str] | None = None,
    log_path: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None, host: str = "127.0.0.1",
    port: int = 0,
) -> EngineProcess:
    """Start the engine of a config and wait until it accepts; raises `EngineStartError`.

    `log_path`: where its standard error is appended (default: this process's standard error).
    `env`: variables added to this process's environment.
    """
    command = [sys.executable, "-m", "engine.serve", "--config", os.fspath(config_path), "--host", host,
               "--port", str(port), "--parent-pid", str(os.getpid())]
    if api_key_file is not None:
        command += ["--api-key-file", os.fspath(api_key_file)]
    log = open(log_path, "ab") if log_path is not None else None  # noqa: SIM115 (the child keeps it)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                                   env={**os.environ, **(env or {})}, start_new_session=True)
    finally:
        if log is not None:
            log.close()
    assert process.stdout is not None
    line = _read_line(process)
    process.stdout.close()
    if line.startswith("READY "):
        return EngineProcess(process, line.removeprefix("READY ").strip())
    if process.poll() is None:
        process.kill()
    code = process.wait()
    hint = _tail(Path(log_path)) if log_path is not None else "see its messages above"
    raise EngineStartError(f"the embedded engine did not start (exit code {code}): {hint}", code)


def _read_line(process: subprocess.Popen[bytes]) -> str:
    """The first line of the child's standard output; empty when it ended or took too long."""
    assert process.stdout is not None
    until = time.monotonic() + READY_LIMIT_S
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while b"\n" not in data and (left := until - time.monotonic()) > 0:
            if selector.select(left):
                piece = os.read(process.stdout.fileno(), 4096)
                if not piece:
                    process.wait()
                    break
                data += piece
    return data.decode(errors="replace").partition("\n")[0]


def _tail(path: Path) -> str:
    """The last lines of a log file."""
    lines = path.read_text(errors="replace").strip().splitlines()[-20:]
    return "\n".join(lines) if lines else f"{path} is empty"
