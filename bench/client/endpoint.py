"""The address of a service: a base URL checked and taken apart, and a key that can be sent in a header.

Input: text as users paste it. Output: `Endpoint`, or a `ChannelError` that says what is wrong and what to do.
Does not: look names up, connect, read the environment.

1. `/v1` is added when the base URL has no version segment (`/v1`, `/v3`, `/v1beta`), and never twice.
2. Trailing slashes and a pasted `/chat/completions` make no difference.
3. A query string (UTM parameters of a copied link) is refused, never dropped in silence.
4. The key is never part of a message: its length and its stray characters are.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from bench.client.errors import ChannelError
from bench.client.request import PATHS, dialect_fields

DEFAULT_PORTS = {"http": 80, "https": 443}
_VERSION = re.compile(r"v\d{1,3}(?:(?:alpha|beta)\d*)?$")
_ENDPOINTS = (*PATHS.values(), "/models")  # the first that fits is cut
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_LABELS = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?$")
_PATH = re.compile(r"[A-Za-z0-9\-._~!$&'()*+,;=:@/%]*$")
EXAMPLE = "http://127.0.0.1:8000/v1"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go; `host` without brackets, `base_path` with its version segment and no slash at the end."""

    scheme: str
    host: str
    port: int
    base_path: str

    @property
    def authority(self) -> str:
        """The value of the Host field."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def target(self, path: str) -> str:
        """Return the request target (path) for an API path such as `/chat/completions`."""
        return f"{self.base_path}/{path.lstrip('/')}"

    def url(self, path: str = "") -> str:
        """Return the full URL for an API path; the normalised base URL for none."""
        return f"{self.scheme}://{self.authority}{self.target(path) if path else self.base_path}"

    @property
    def is_local(self) -> bool:
        """The service runs on this host."""
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")


def parse_base_url(text: str) -> Endpoint:
    """Return the endpoint of a base URL; raises ChannelError (CH-URL) with the reason and the fix."""
    if not isinstance(text, str) or not text.strip():
        raise ChannelError("CH-URL", "the base URL is empty", f"set base_url, for example {EXAMPLE}")
    if text != text.strip():
        raise _refused("has spaces or a newline around it", "remove them (they come with copying)")
    if text[0] in "\"'`" or text[-1] in "\"'`":
        raise _refused("has quotes around it", "remove the quotes")
    if re.search(r"[\s\x00-\x1f\x7f\\<>\"{}|^`]", text):
        raise _refused("has a space, a control character or a placeholder inside", f"write it like {EXAMPLE}")
    if "://" not in text:
        raise _refused("has no scheme", f"put http:// or https:// in front, for example {EXAMPLE}")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise _refused("has a host or port that cannot be read", f"write it like {EXAMPLE}") from None
    _check_parts(parts, text)
    scheme = parts.scheme.lower()
    if port == 0:
        raise _refused("has port 0", "give the port the service listens on")
    return Endpoint(scheme, _host(parts.hostname or ""), port or DEFAULT_PORTS[scheme], _base_path(parts.path))


def _check_parts(parts: SplitResult, text: str) -> None:
    if parts.scheme.lower() not in DEFAULT_PORTS:
        raise _refused(f"has scheme {parts.scheme[:20]!r}", "only http and https are spoken here")
    if parts.username is not None or parts.password is not None:
        raise _refused("has a user or password in it", "give the key in the environment (BENCH_API_KEY), not here")
    if parts.query or "?" in text:
        tracking = "tracking parameters" if "utm_" in parts.query.lower() else "a query string"
        raise _refused(
            f"has {tracking} (everything after '?')",
            "cut it off at the '?': gateways take such an address for another path and answer 401 or 404",
        )
    if parts.fragment or "#" in text:
        raise _refused("has a fragment (everything after '#')", "cut it off at the '#'")
    if not _PATH.match(parts.path):
        raise _refused("has characters in its path that a URL cannot have", "percent-encode them")


def _host(host: str) -> str:
    if not host:
        raise _refused("has no host", f"write it like {EXAMPLE}")
    if ":" in host:
        return host
    try:
        ascii_host = host if host.isascii() else host.encode("idna").decode("ascii")
    except UnicodeError:
        raise _refused("has a host name that cannot be looked up", "check its spelling") from None
    if len(ascii_host) > 253 or not _LABELS.match(ascii_host):
        raise _refused("has a host name that cannot be looked up", "check its spelling")
    return ascii_host


def _base_path(path: str) -> str:
    path = re.sub(r"/{2,}", "/", path).rstrip("/")
    for endpoint in _ENDPOINTS:
        if path.endswith(endpoint):
            path = path[: -len(endpoint)]
            break
    if any(_VERSION.match(segment) for segment in path.split("/")):
        return path
    return f"{path}/v1"


def _refused(what: str, fix: str) -> ChannelError:
    return ChannelError("CH-URL", f"the base URL {what}", fix)


_ODD_KEY = {" ": "a space", "\t": "a tab", "\n": "a newline", "\r": "a carriage return", '"': "a quote", "'": "a quote"}


def check_key(key: str | None, *, needed: bool) -> None:
    """Raise ChannelError when the key cannot work: absent, or with characters that no header can carry.

    `needed`: an absent key is a fault (a service on this host often wants none).
    """
    if key is None or key == "":
        if needed:
            raise ChannelError(
                "CH-KEY-MISSING", "no API key is set" if key is None else "the API key is empty",
                "export BENCH_API_KEY=... in the shell that starts bench (without export it does not reach it)",
            )  # fmt: skip
        return
    stray = sorted({name for char, name in _ODD_KEY.items() if char in key})
    if not stray and not (key.isascii() and key.isprintable()):
        stray = ["a character outside printable ASCII"]
    if key.lower().startswith("bearer"):
        stray.append("the word Bearer in front")
    if key.startswith(("${", "$", "<")) or key.endswith(">"):
        stray.append("a placeholder that was not replaced")
    if stray:
        raise ChannelError(
            "CH-KEY-FORM", f"the API key ({len(key)} characters) has {' and '.join(stray)}",
            "set it again without; nothing of the key is shown here",
        )  # fmt: skip


def page_headers(page_url: str, base_url: str, api_key: str | None, path: str, auth: str = "auto") -> dict[str, str]:
    """Return the header field of the key for a page of the service itself; empty for a page of anybody else.

    The same scheme, host and port as the base URL: some servers (llama.cpp) ask for the key on their metrics page too.
    `path`, `auth`: as for a request.
    """
    try:
        page, service = urlsplit(page_url), parse_base_url(base_url)
        port = page.port or DEFAULT_PORTS.get(page.scheme)
    except (ValueError, ChannelError):
        return {}
    if not api_key or (page.scheme, page.hostname, port) != (service.scheme, service.host.lower(), service.port):
        return {}
    return {name: value for _, (name, value) in dialect_fields(path, api_key, auth).items() if api_key in value}
