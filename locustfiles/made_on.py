"""What a run is made on: versions and the machine, for `run.json`. Holds no host name and no user name."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from typing import Any


def versions() -> dict[str, str]:
    """Python and the packages that the numbers depend on."""
    names = ("locust", "gevent", "numpy", "pandas", "scipy", "pydantic")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def host() -> dict[str, Any]:
    """What the numbers were made on; holds no host name and no user name."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            model = next((line.split(":", 1)[1].strip() for line in handle if line.startswith("model name")), "")
    except OSError:
        pass
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "cpu": model,
        "cores": os.cpu_count(),
        "timer_s": time.get_clock_info("monotonic").resolution,
    }
