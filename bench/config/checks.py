"""What keys of a config must mean together: all checks, ready to run.

Input: a `Config` whose single values are right, and the paths that were not.
Output: `run`: findings, errors and warnings, with the numbers that led to them.
Does not: read files, open sockets, know line numbers.
"""

from __future__ import annotations

# Importing these modules registers their checks.
from bench.config import checks_engine, checks_load, checks_target
from bench.config.checks_engine import affine_batch_bound, naive_batch_bound
from bench.config.checks_load import p95_output_tokens
from bench.config.checks_target import is_placeholder, url_fault
from bench.config.findings import Finding, run
from bench.config.limits import limit_problems

__all__ = [
    "Finding",
    "affine_batch_bound",
    "checks_engine",
    "checks_load",
    "checks_target",
    "is_placeholder",
    "limit_problems",
    "naive_batch_bound",
    "p95_output_tokens",
    "run",
    "url_fault",
]
