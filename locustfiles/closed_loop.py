"""Closed loop: each user sends, waits for the end of the answer, and sends again.

    locust -f locustfiles/closed_loop.py --headless -u 16 -r 16 --bench-config configs/demo.json --stage-duration 60

Users = concurrency. For comparison with tools that have only this: a slow
service slows this load down, so the report says which loop it came from.
A latency here starts at the send, since nothing was due before.
"""

from __future__ import annotations

from locust import User, constant, task

from locustfiles.wiring import connect

connect(loop="closed")


class ClosedLoopUser(User):
    """One unit of concurrency."""

    wait_time = constant(0)

    @task
    def send_and_wait(self) -> None:
        self.environment.bench.generator.closed_turn()
