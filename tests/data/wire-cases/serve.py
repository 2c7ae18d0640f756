"""Replay server for raw HTTP answers (NAME.http), with chosen segmentation and pauses; loopback only.

Usage: `python serve.py --port 0 [--split S] [--gap-ms G] [--scale F] [--dir PATH]` prints `PORT n`; in a test:
`port, stop = serve.start(split="byte")`. Base URL of the client: `http://127.0.0.1:PORT/case/NAME`.
Any path below /case/NAME/ is accepted, so a wrong join of base URL and path shows in the log (`GET /__requests`).

The `replay` block of NAME.json: `split`; `gap_ms` between segments; `pauses` [{"at": offset, "ms": m}] before a byte;
`end`: `close` (FIN, the default), `reset` (RST), `hold` (open for `hold_ms`, then FIN), `keep` (another request may
follow), `drop_next` (another request is read, then the connection closes without a byte).
"""
from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOG_MAX = 10_000


@dataclass
class Options:
    """How this server replays; None leaves it to the case."""

    folder: Path = HERE
    split: str | None = None
    gap_ms: float | None = None
    scale: float = 1.0
    log: list[dict[str, Any]] = field(default_factory=list)


def load(folder: Path, name: str) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of a case and its replay block."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise FileNotFoundError(name)
    raw = (folder / f"{name}.http").read_bytes()
    about = folder / f"{name}.json"
    return raw, json.loads(about.read_text("utf-8")).get("replay", {}) if about.exists() else {}


def cuts(raw: bytes, split: str) -> set[int]:
    """Return the offsets at which a new segment starts (without 0 and the end)."""
    n = len(raw)
    if split == "whole":
        return set()
    if split == "byte":
        return set(range(1, n))
    if split.isdigit():
        return set(range(int(split), n, int(split)))
    if split == "line":
        return {m.end() for m in re.finditer(rb"\r\n|\n|\r", raw)} - {n}
    if split == "event":
        return {m.end() for m in re.finditer(rb"\n\n|\r\n\r\n|\r\r", raw)} - {n}
    if split.startswith("random"):
        generator = random.Random(int(split.partition(":")[2] or 1))
        found, at = set(), 0
        while at < n:
            at += generator.choice((1, 2, 3, 5, 8, 13, 21, 34, 55))
            found.add(at)
        return {at for at in found if at < n}
    raise ValueError(f"split {split!r}; allowed are whole, event, line, byte, a number, random:SEED")


def segments(raw: bytes, split: str, pauses: list[dict[str, float]]) -> Iterator[tuple[float, bytes]]:
    """Yield (milliseconds to wait before it, bytes) in order."""
    wait: dict[int, float] = {}
    for pause in pauses:
        wait[int(pause["at"])] = wait.get(int(pause["at"]), 0) + pause["ms"]
    start = 0
    for end in [*sorted(cuts(raw, split) | {at for at in wait if 0 < at < len(raw)}), len(raw)]:
        yield wait.get(start, 0), raw[start:end]
        start = end


def read_request(conn: socket.socket, held: bytes) -> tuple[dict[str, Any] | None, bytes]:
    """Return one request (content-length framing, all that the client uses) and the bytes after it."""
    while b"\r\n\r\n" not in held:
        data = conn.recv(65_536)
        if not data or len(held) > 1 << 24:
            return None, b""
        held += data
    head, _, rest = held.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    method, target, version = [*lines[0].split(" "), "", ""][:3]
    headers = [[part.strip() for part in line.partition(":")[::2]] for line in lines[1:]]
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    while len(rest) < length:
        data = conn.recv(65_536)
        if not data:
            return None, b""
        rest += data
    request = {"method": method, "target": target, "version": version, "headers": headers,
               "body": rest[:length].decode("utf-8", "replace")}
    return request, rest[length:]


def plain(conn: socket.socket, status: str, value: Any) -> None:
    """Send a JSON answer and nothing after it."""
    data = json.dumps(value, ensure_ascii=False).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    conn.sendall(head.encode() + data)


def replay_case(conn: socket.socket, options: Options, name: str) -> str:
    """Send one case; return what is to happen with the connection (`end`)."""
    raw, replay = load(options.folder, name)
    gap_ms = options.gap_ms if options.gap_ms is not None else replay.get("gap_ms", 0)
    first = True
    for wait_ms, segment in segments(raw, options.split or replay.get("split", "whole"), replay.get("pauses", [])):
        pause_ms = wait_ms * options.scale + (0 if first else gap_ms)
        if pause_ms:
            time.sleep(pause_ms / 1000.0)
        first = False
        conn.sendall(segment)
    if replay.get("end") == "hold":
        time.sleep(replay.get("hold_ms", 1000) * options.scale / 1000.0)
    return replay.get("end", "close")


def serve_connection(conn: socket.socket, options: Options, number: int) -> None:
    """Answer the requests of one connection."""
    conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    conn.settimeout(60)
    held, count, dropping = b"", 0, False
    try:
        while True:
            request, held = read_request(conn, held)
            if request is None:
                return
            count += 1
            if request["target"].startswith("/__requests"):
                plain(conn, "200 OK", list(options.log))
                return
            found = re.match(r"/case/([^/?]+)", request["target"])
            name = found.group(1) if found else ""
            if len(options.log) < LOG_MAX:
                options.log.append({**request, "case": name, "connection": number, "nth_on_connection": count})
            if dropping:
                return
            try:
                end = replay_case(conn, options, name)
            except FileNotFoundError:
                plain(conn, "404 Not Found", {"error": {"message": f"no case {name}"}})
                return
            if end == "reset":
                time.sleep(0.02)
                conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            dropping = end == "drop_next"
            if end not in ("keep", "drop_next"):
                # An orderly FIN: the peer reads everything before the socket goes away.
                conn.shutdown(socket.SHUT_WR)
                conn.settimeout(2)
                while conn.recv(65_536):
                    pass
                return
    except (OSError, ValueError):
        return
    finally:
        conn.close()


def accept_loop(server: socket.socket, options: Options) -> None:
    """One thread per connection, until the listening socket is closed."""
    number = 0
    while True:
        try:
            conn, _ = server.accept()
        except OSError:
            return
        number += 1
        threading.Thread(target=serve_connection, args=(conn, options, number), daemon=True).start()


def start(port: int = 0, **settings: Any) -> tuple[int, Callable[[], None]]:
    """Serve in a thread; return the port and a function that stops it."""
    server = socket.create_server(("127.0.0.1", port), backlog=512)
    threading.Thread(target=accept_loop, args=(server, Options(**settings)), daemon=True).start()

    def stop() -> None:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()

    return server.getsockname()[1], stop


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=HERE)
    parser.add_argument("--split")
    parser.add_argument("--gap-ms", type=float)
    parser.add_argument("--scale", type=float, default=1.0)
    given = parser.parse_args()
    server = socket.create_server(("127.0.0.1", given.port), backlog=512)
    print("PORT", server.getsockname()[1], flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        accept_loop(server, Options(folder=given.dir, split=given.split, gap_ms=given.gap_ms, scale=given.scale))


if __name__ == "__main__":
    main()
