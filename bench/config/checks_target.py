"""Config checks about the service: address, model, timeouts, headers, body fields.

Input: a `Config` whose single values are right.
Output: findings, registered by `reads`.
Does not: open a connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from bench.config.findings import Finding, reads
from bench.config.json_body import ALLOWED, body_fault
from bench.config.schema import Config

# What example configs and pages write where a real address or name belongs.
PLACEHOLDER_PARTS = ("your-", "your_", "你的", "<", ">", "${", "{{", "changeme", "change-me", "replace-me")
# Names that are set aside for examples and hold no service (RFC 2606).
EXAMPLE_DOMAINS = ("example.com", "example.net", "example.org", "example.invalid")
EXAMPLE_ENDING = ".example"


def is_placeholder(text: str) -> bool:
    """Whether a base URL or model was never filled in: empty, or the words of an example."""
    lower = text.strip().lower()
    return lower == "" or any(part in lower for part in PLACEHOLDER_PARTS) or _is_example_host(lower)


def _is_example_host(url: str) -> bool:
    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return False
    under = any(host == domain or host.endswith("." + domain) for domain in EXAMPLE_DOMAINS)
    return under or host.endswith(EXAMPLE_ENDING)


@reads("base_url", "engine.embedded")
def _base_url(config: Config) -> Iterator[Finding]:
    if config.engine.embedded and is_placeholder(config.base_url):
        return
    url = config.base_url
    if is_placeholder(url):
        yield Finding(
            "CFG-012",
            ("base_url",),
            f"is {_shown(url)}, an example's placeholder" if url.strip() else "is empty",
            "the address of the service, such as http://localhost:8000/v1",
            "set BENCH_BASE_URL (or TAOTOKEN_BASE_URL), here or in .env, or base_url in the config, or set "
            "engine.embedded to true for the engine that comes with the tool",
        )
        if not url.strip():
            return
    wrong = url_fault(url)
    if wrong:
        yield Finding("CFG-011", ("base_url",), wrong[0], "http(s)://host[:port][/path]", wrong[1])


def _shown(url: str) -> str:
    """A placeholder address without user, password, query and fragment."""
    rest = url.strip().partition("#")[0].partition("?")[0]
    scheme, slashes, place = rest.rpartition("://")
    return f'"{scheme}{slashes}{place.rpartition("@")[2]}"'[:61]


def url_fault(url: str) -> tuple[str, str] | None:
    """(what is wrong, what to do) with a base URL, or None. Shows no query: it may hold a secret."""
    if url != url.strip() or any(char.isspace() or ord(char) < 32 for char in url):
        return "holds blanks or line breaks", "remove them"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no address ({error})", "write http://host:port/path"
    if parts.scheme not in ("http", "https"):
        return (
            f'has the scheme "{parts.scheme[:20]}"' if "://" in url else "has no scheme",
            "begin it with http:// or https://",
        )
    if not parts.hostname:
        return "has no host", "write http://host:port/path"
    if "@" in parts.netloc:
        return "holds a user or password", "remove it; the key goes into BENCH_API_KEY"
    if parts.query or "?" in url:
        names = [pair.partition("=")[0] for pair in parts.query.split("&") if pair]
        tracking = any(name.lower().startswith("utm") for name in names)
        return (
            "has a query string" + (" of tracking parameters (utm)" if tracking else ""),
            "remove everything from the question mark on; the plain API address is meant",
        )
    if parts.fragment or "#" in url:
        return "has a fragment", "remove everything from # on"
    if port == 0:
        return "has port 0", "write the port that the service listens on"
    path = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/responses", "/messages"):
        if path.endswith(ending):
            return "ends in the endpoint", f"cut {ending}; it is added (target.endpoint)"
    return None


@reads("model", "engine.embedded")
def _model(config: Config) -> Iterator[Finding]:
    if config.engine.embedded:
        return
    if is_placeholder(config.model):
        yield Finding(
            "CFG-012",
            ("model",),
            f'is "{config.model.strip()[:40]}", an example\'s placeholder' if config.model.strip() else "is empty",
            "a model ID of the service",
            "set BENCH_MODEL (or TAOTOKEN_MODEL_ID), here or in .env, or model in the config",
        )
    elif config.model != config.model.strip() or any(ord(char) < 32 for char in config.model):
        yield Finding(
            "CFG-006", ("model",), "has blanks at an end or control characters", "the exact model ID", "remove them"
        )


@reads(
    "target.connect_timeout_sec",
    "target.first_token_timeout_sec",
    "target.idle_timeout_sec",
    "target.total_timeout_sec",
    "slo.ttft_deadline_ms",
)
def _timeouts(config: Config) -> Iterator[Finding]:
    target = config.target
    for name in ("connect_timeout_sec", "first_token_timeout_sec", "idle_timeout_sec"):
        value = getattr(target, name)
        if value > target.total_timeout_sec:
            yield Finding(
                "CFG-037",
                ("target", name),
                f"is {value:g}, above total_timeout_sec ({target.total_timeout_sec:g})",
                f"at most {target.total_timeout_sec:g}",
                "lower it or raise total_timeout_sec",
            )
    deadline_s = config.slo.ttft_deadline_ms / 1000
    if target.first_token_timeout_sec < deadline_s:
        yield Finding(
            "CFG-037",
            ("target", "first_token_timeout_sec"),
            f"is {target.first_token_timeout_sec:g}, below slo.ttft_deadline_ms ({deadline_s:g} s)",
            f"at least {deadline_s:g}",
            "raise it: requests that meet the SLO would be cut off",
        )


# Fields of the request body that the plan decides.
PLANNED_FIELDS = (
    "model",
    "messages",
    "prompt",
    "input",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "ignore_eos",
    "n",
)


@reads("target.endpoint", "target.pin_length", "target.extra_body", "engine.embedded")
def _endpoint(config: Config) -> Iterator[Finding]:
    target = config.target
    if target.endpoint in ("chat", "completions"):
        return
    if config.engine.embedded:
        yield Finding(
            "CFG-047",
            ("target", "endpoint"),
            f"is {target.endpoint}, and engine.embedded is true",
            "chat, completions",
            "set one of these, or send to a service of your own",
        )
    elif target.pin_length and not {"min_tokens", "min_new_tokens"} & set(target.extra_body):
        yield Finding(
            "CFG-046",
            ("target", "pin_length"),
            f"is true, but {target.endpoint} has no field that asks for a whole answer: each shorter one is `short`, "
            "and more than 1 % of them make a stage INVALID",
            "false, or a field of the service such as min_tokens in target.extra_body",
            "set target.pin_length to false where answers may end by themselves",
        )


# Header fields that say how a request is framed and where it goes; the client writes them itself.
OWN_HEADERS = (
    "connection",
    "content-encoding",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
)


@reads("target.extra_body", "target.extra_headers", "target.proxy", "target.metrics_url", "target.tls_verify")
def _target(config: Config) -> Iterator[Finding]:
    for name in config.target.extra_body:
        if name in PLANNED_FIELDS:
            yield Finding(
                "CFG-038",
                ("target", "extra_body", name),
                "is set by the plan",
                "",
                "remove it; see loadgen and target for the key that sets it",
            )
    for name, value in config.target.extra_body.items():
        if found := body_fault(value):
            fix = "write it as a text, or as a number that fits"
            yield Finding("CFG-005", ("target", "extra_body", name, *found[0]), found[1], ALLOWED, fix)
    for name, value in config.target.extra_headers.items():
        if (
            not name.isascii()
            or any(char in name for char in ' \t\r\n:()<>@,;\\"/[]?={}')
            or any(ord(c) < 32 and c != "\t" or ord(c) > 255 for c in value)
        ):
            yield Finding(
                "CFG-006",
                ("target", "extra_headers"),
                "holds a name or value that HTTP does not allow",
                "one line of plain characters",
                "correct the header",
            )
        elif name.strip().lower() in OWN_HEADERS:
            yield Finding(
                "CFG-006",
                ("target", "extra_headers", name),
                "is a header that frames the request; the client writes it",
                "headers that only add something",
                "remove it",
            )
    for name in ("proxy", "metrics_url"):
        url = getattr(config.target, name)
        fault = url_fault(url) if url and name == "proxy" else None
        if url and not url.startswith(("http://", "https://")):
            fault = ("has no http(s) scheme", "begin it with http://")
        if fault:
            yield Finding("CFG-006", ("target", name), fault[0], "http(s)://host:port", fault[1])
    if not config.target.tls_verify:
        yield Finding(
            "CFG-044",
            ("target", "tls_verify"),
            "is false",
            "true",
            "name the authority in target.ca_file instead: the key goes to whoever answers",
        )
