"""What a job is asked to do, and how it says that it cannot: options, error, exit codes.

Used by: `bench run`, `bench demo` and `bench simulate`. Does not: read a file or start anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
EXIT_USAGE, EXIT_CHANNEL, EXIT_INVALID, EXIT_INTERRUPTED = 2, 3, 4, 130


@dataclass
class JobOptions:
    """What the command line said."""

    config: Path
    shape: str = "sweep"
    run_dir: Path | None = None
    qps: str = ""
    stage_duration_s: float = 0.0
    repeats: int = 0
    seed: int = 0
    processes: int = 0
    base_url: str = ""
    model: str = ""
    users: int = 0  # closed loop with this concurrency; 0 = open loop
    workers: int = 0  # on other machines; 0 = none
    bind: str = "127.0.0.1:5557"  # where these connect to
    part: str = ""  # which part of the plan, such as 1/4; empty = all of it
    meet: str = "127.0.0.1:5560"  # where part 1 waits for the others
    wait_s: float = 0.0  # for a service that is not up yet
    lang: str = "en"
    preflight: bool = True
    quiet: bool = False
    remarks: bool = True  # say how many remarks there are on the config
    as_json: bool = False
    baseline: Path | None = None  # run folder that the new run is compared with
    client_calibration: Path | None = None  # file of `bench calibrate-client`; None: the one beside the runs
    command: list[str] = field(default_factory=list)


class JobError(Exception):
    """The job cannot go on; `exit_code` says whose fault it is."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code
