"""Whether requests name their tenant and class to the service.

Input: the config. Output: yes or no. Does not: send.

The names are fields of the request body (`tenant`, `request_class`), as the embedded engine reads them
(docs/engine-http.md); another service may refuse fields that it does not know.
"""

from __future__ import annotations

from bench.config.own_machine import is_own_machine
from bench.config.schema import Config


def wanted(config: Config) -> bool:
    """`target.send_labels`, else yes for `engine.embedded` at an address of this machine."""
    asked = config.target.send_labels
    return config.engine.embedded and is_own_machine(config.base_url) if asked is None else asked
