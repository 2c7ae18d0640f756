"""The static drawing of a chart, and the bundle that makes it live; both from vl-convert.

Input: Vega-Lite specs. Output: SVG text without any style attribute, script
or style element; the JavaScript of vega-embed.
Does not: touch the network.

1. The SVG shows without scripts and under a style policy of `'none'`:
   presentation attributes only.
2. The bundle costs 1.5 s to make, so it is kept in the user's cache folder,
   under a name that holds the versions and with its checksum inside.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import vl_convert

VEGA_LITE = "6.4"

_NOISE = re.compile(
    r' (?:aria-[a-z]+|role|class|pointer-events)="[^"]*"| (?:fill-|stroke-)?opacity="1"'
    r'|<path[^>]* d="M0,0h0v0h0Z"[^>]*/>|<path[^>]*display="none"[^>]*/>'
)
_EMPTY = re.compile(r"<g(?: transform=\"translate\([^)]*\)\")?></g>")
_PLACES = re.compile(r' (?:d|transform)="[^"]*"')
_LONG = re.compile(r"(\d\.\d)\d+")
_ROOT = re.compile(r'<svg[^>]*viewBox="([^"]+)"[^>]*>')


def draw(spec: dict[str, Any]) -> tuple[str, int, int]:
    """(inner SVG markup, width, height) of one spec, in px."""
    svg = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    head = _ROOT.search(svg)
    if head is None:
        raise RuntimeError("vl-convert gave no SVG root with a viewBox")
    _, _, width, height = (round(float(v)) for v in head.group(1).split())
    inner = svg[head.end() : svg.rindex("</svg>")]
    inner = _NOISE.sub("", inner)
    inner = _PLACES.sub(lambda place: _LONG.sub(r"\1", place.group()), inner)
    before = ""
    while before != inner:
        before, inner = inner, _EMPTY.sub("", inner)
    return inner, width, height


@lru_cache(maxsize=1)
def bundle() -> str:
    """JavaScript that sets `window.vegaEmbed`."""
    name = f"vega-embed-{vl_convert.__version__}-{VEGA_LITE}.js"
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(root) / "scheduler-bench" / name
    try:
        stored = path.read_text(encoding="utf-8")
        digest, _, text = stored.partition("\n")
        if digest == hashlib.sha256(text.encode()).hexdigest():
            return text
    except OSError:
        pass
    text = vl_convert.javascript_bundle(vl_version=VEGA_LITE)
    if "</script" in text.lower() or "<!--" in text:
        raise RuntimeError("the vega bundle holds a script end tag and cannot be placed in a page")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(hashlib.sha256(text.encode()).hexdigest() + "\n" + text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        pass
    return text
