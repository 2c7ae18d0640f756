"""Open-loop streamed chat completions: each arrival is sent when it is due.

    locust -f locustfiles/chat.py,shapes/sweep.py --headless --bench-config configs/demo.json
    locust -f locustfiles/chat.py                       # web page; the offered rate is a field of the start form
    locust -f locustfiles/chat.py,shapes/sweep.py --headless --processes 2

One user per worker process holds the pacing loop; its count stays constant
through the run. Latencies start at the intended time of an arrival.
"""

from __future__ import annotations

from locust import User, constant, task

from locustfiles.wiring import connect

connect(loop="open")


class ChatUser(User):
    """Sends the arrivals of this worker's stripe, stage after stage."""

    wait_time = constant(0)
    fixed_count = 0

    @task
    def send_what_is_due(self) -> None:
        self.environment.bench.generator.run()
