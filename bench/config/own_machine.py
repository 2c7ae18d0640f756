"""Whether an address is this machine's.

Input: a URL, or none. Output: yes or no. Does not: look a name up.

The embedded engine runs on this machine: an address elsewhere was given in its place, and may be anybody's service.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit


def is_own_machine(url: Any) -> bool:
    """True for a loopback address or `localhost`, and for no address: the engine that a run starts by itself."""
    if not url:
        return True
    try:
        host = urlsplit(str(url)).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
