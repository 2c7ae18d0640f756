"""Settings and their checks: `load_config` for the config, `api_key` for the key."""

from __future__ import annotations

from bench.config.errors import PROBLEMS, ConfigError, Problem
from bench.config.load import Resolved, load_config
from bench.config.schema import Config
from bench.config.secrets import api_key, api_key_from_environment

__all__ = [
    "PROBLEMS",
    "Config",
    "ConfigError",
    "Problem",
    "Resolved",
    "api_key",
    "api_key_from_environment",
    "load_config",
]
