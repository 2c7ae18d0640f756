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
import math
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


class Frame:
    """Axes drawn once for many curves: small multiples share a frame, and each adds one path.

    Input: a spec whose only line mark runs from the lower left to the upper right corner of
    the plot, over `domain` on a log x axis and 0..1 on the y axis. Drawing each of 2 x 40
    stages by itself would cost 4 s and 0.5 MB.
    """

    _CORNERS = re.compile(r'<path[^>]* d="M([-\d.]+),([-\d.]+)L([-\d.]+),([-\d.]+)"[^>]*/>')
    _TAGS = re.compile(r"<(/?)g([^>]*?)(/?)>")
    _SHIFT = re.compile(r'transform="translate\(([-\d.]+),([-\d.]+)\)"')

    def __init__(self, spec: dict[str, Any], domain: tuple[float, float]) -> None:
        inner, self.width, self.height = draw(spec)
        found = self._CORNERS.search(inner)
        if found is None:
            raise RuntimeError("the frame holds no line to read its scales from")
        x = y = 0.0
        stack: list[tuple[float, float]] = []
        for tag in self._TAGS.finditer(inner, 0, found.start()):
            if tag.group(1):
                x, y = stack.pop()
            elif not tag.group(3):
                stack.append((x, y))
                shift = self._SHIFT.search(tag.group(2))
                if shift:
                    x, y = x + float(shift.group(1)), y + float(shift.group(2))
        x0, y0, x1, y1 = (float(v) for v in found.groups())
        self._x, self._y = (x + x0, x + x1), (y + y0, y + y1)
        self._low, self._high = math.log(domain[0]), math.log(domain[1])
        self.inner = inner[: found.start()] + inner[found.end() :]

    def place(self, value: float, share: float) -> tuple[float, float]:
        """Pixels of a point."""
        part = (math.log(value) - self._low) / (self._high - self._low)
        return self._x[0] + part * (self._x[1] - self._x[0]), self._y[0] + share * (self._y[1] - self._y[0])

    def steps(self, points: list[list[float]]) -> str:
        """Path data of a step function that jumps at each point (right-continuous)."""
        placed = [self.place(v, s) for v, s in points]
        out = f"M{placed[0][0]:.1f},{placed[0][1]:.1f}"
        for px, py in placed[1:]:
            out += f"H{px:.1f}V{py:.1f}"
        return out


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
