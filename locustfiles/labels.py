"""Whether requests name their tenant and class to the service.

Input: the config. Output: yes or no. Does not: send.

The names are fields of the request body (`tenant`, `request_class`), as the embedded engine reads them
(docs/engine-http.md); another service may refuse fields that it does not know.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from bench.config.schema import Config


def wanted(config: Config) -> bool:
    """`target.send_labels`, else yes for `engine.embedded` at an address of this machine.

    The embedded engine runs on this machine: another address was given in its place, and may be anybody's.
    """
    asked = config.target.send_labels
    return config.engine.embedded and _is_here(config.base_url) if asked is None else asked


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
