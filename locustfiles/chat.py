"""Open-loop streamed chat completions: each arrival is sent when it is due.

    locust -f locustfiles/chat.py,shapes/sweep.py --headless --bench-config configs/demo.json
    locust -f locustfiles/chat.py                       # web page; the offered rate is a field of the start form
    locust -f locustfiles/chat.py,shapes/sweep.py --headless --processes 2

One user per worker process stands for its sender in Locust's counts; the pacing
loop has a greenlet of its own, since Locust moves users between workers when one
joins or is lost. Latencies start at the intended time of an arrival.
"""

from __future__ import annotations

import gevent
from locust import User, constant, task

from locustfiles.wiring import connect

connect(loop="open")


class ChatUser(User):
    """Stands for the sender of this worker's stripe."""

    wait_time = constant(0)
    fixed_count = 0

    @task
    def be_counted(self) -> None:
        gevent.sleep(1.0)
