"""`bench probe`: one streamed request, and what was recorded of it."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from bench.commands.options import quiet_option


@click.command(
    "probe",
    help="""Send one streamed request and print its ledger row and timeline as JSON: what belongs into a bug report.

    The request goes through the transport of the load test. No part of the key is printed.

    Exit code 0: the row is ok; 3: it is not, or base URL, model or key cannot be used; 2: the config is wrong, or base
    URL or model is not filled in.

    \b
    Example:
      bench probe --base-url http://127.0.0.1:8000/v1 --model demo-7b --max-tokens 16
    """,
)
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Config to take settings from.")
@click.option("--base-url", default="", help="Address of the service, with or without /v1.")
@click.option("--model", default="", help="Model name to ask for.")
@click.option("--endpoint", type=click.Choice(["chat", "completions", "responses", "messages"]), help="What it speaks.")
@click.option("--auth", type=click.Choice(["auto", "bearer", "x-api-key"]), help="How it wants the API key.")
@click.option("--max-tokens", type=click.IntRange(1, 1_000_000), default=32, show_default=True, help="Tokens to ask.")
@click.option("--prompt", default="Say in a few words why queues grow.", help="What to ask.", show_default=True)
@click.option("--read", type=click.Choice(["prompt", "lazy"]), default="prompt", show_default=True,
              help="lazy: as most streams of a run; no timeline and no texts then.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One line instead of indented JSON.")
@quiet_option("Only the status of the row, and its code.")
def command(
    config_path: Path | None,
    base_url: str,
    model: str,
    endpoint: str | None,
    auth: str | None,
    max_tokens: int,
    prompt: str,
    read: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Send one request."""
    from bench.client.errors import ChannelError
    from bench.client.probe import run_probe
    from bench.client.redact import json_text
    from bench.commands.check import exit_code_of
    from bench.config import ConfigError, api_key_from_environment, load_config

    overrides: dict[str, Any] = {"engine.embedded": False}
    if base_url:
        overrides["base_url"] = base_url
    if model:
        overrides["model"] = model
    if endpoint:
        overrides["target.endpoint"] = endpoint
    if auth:
        overrides["target.auth"] = auth
    try:
        resolved = load_config(config_path, overrides=overrides)
        if problems := resolved.placeholders():
            raise ConfigError(problems)
        key = api_key_from_environment(key_file=resolved.config.target.api_key_file)
        result = run_probe(resolved.config, key, max_tokens=max_tokens, prompt=prompt, read=read)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(exit_code_of(error.problems))
    except ChannelError as error:
        click.echo(f"{error.code}: {error}", err=True)
        sys.exit(3)
    row = result["row"]
    if quiet and not as_json:
        click.echo(" ".join(word for word in (row["status"], row["code"]) if word))
    else:
        click.echo(json_text(result, None if as_json else 2))
    sys.exit(0 if row["status"] == "ok" else 3)
