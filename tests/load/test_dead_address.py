"""A service that cannot even be connected to holds up nobody: each arrival's wait begins when it is due."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from .conftest import CONFIG

LIMIT_S = 1.0


def test_no_arrival_waits_for_the_connection_of_another(run_locust: Any, tmp_path: Path) -> None:
    config = tmp_path / "dead.json"
    target = {**CONFIG.get("target", {}), "connect_timeout_sec": LIMIT_S}
    config.write_text(json.dumps({**CONFIG, "target": target}), encoding="utf-8")
    # A full backlog drops what comes, as a firewall does.
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    held = [socket.socket() for _ in range(3)]
    for sock in held:
        sock.setblocking(False)
        sock.connect_ex(listener.getsockname())
    ran = run_locust(
        "--qps-stages", "20", "--bench-config", str(config), url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    )
    for sock in (*held, listener):
        sock.close()
    rows = ran.rows()
    assert len(rows) > 30 and {row["code"] for row in rows} == {"CH-TO-CONNECT"}, ran.err[-500:]
    assert f"is complete: {ran.run_dir}; next: bench analyse {ran.run_dir}" in ran.err, ran.err[-500:]
    assert all(row["sent_s"] == "" for row in rows)
    # done = due + limit when it began at its time; had it queued behind others, the waits would add up to 30 s and more
    waits = sorted(float(row["done_s"]) - float(row["intended_s"]) for row in rows)
    assert waits[0] >= LIMIT_S - 0.01 and waits[len(waits) // 2] < LIMIT_S + 0.3
