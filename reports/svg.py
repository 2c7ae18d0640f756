"""The static drawing of a chart, and the bundle that makes it live; both from vl-convert.

Input: Vega-Lite specs. Output: SVG text without any style attribute, script
or style element; the JavaScript of vega-embed, packed.
Does not: touch the network.

1. The SVG shows without scripts and under a style policy of `'none'`:
   presentation attributes only.
2. Drawing happens in one thread of its own: vl-convert has one engine per process and gives
   the interpreter free meanwhile, so specs are built while earlier ones are drawn. `warm` starts
   the engine (0.5 s), which costs nothing while a run is still being analysed.
3. The bundle costs 1.5 s to make, so it is kept in the user's cache folder,
   under a name that holds the versions and with its checksum inside. It is gzip in base64:
   0.4 MB of a page instead of 0.9 MB; the browser unpacks it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import vl_convert

VEGA_LITE = "6.4"

_NOISE = re.compile(
    r' (?:aria-[a-z]+|role|class|pointer-events)="[^"]*"| (?:fill-|stroke-)?opacity="1"'
    r'|<path[^>]* d="M0,0h0v0h0Z"[^>]*/>|<path[^>]*display="none"[^>]*/>'
)
_EMPTY = re.compile(r"<g(?: transform=\"translate\([^)]*\)\")?></g>")
_PLACES = re.compile(r' (?:d|transform)="[^"]*"')
_LONG = re.compile(r"(\d\.\d)\d+")
_SYMBOL = re.compile(r'<path transform="translate\((-?[\d.]+),(-?[\d.]+)\)" d="([^"]+)"([^>]*)/>')
_COMMAND = re.compile(r"([A-Za-z])([^A-Za-z]*)")
_NUMBER = re.compile(r"-?[\d.]+")
_CIRCLE = re.compile(r"M(-?[\d.]+),0A\1,\1,0,1,1,-\1,0A\1,\1,0,1,1,\1,0$")
MANY = 6  # neighbours of one shape and look that are worth one path
_ROOT = re.compile(r'<svg[^>]*viewBox="([^"]+)"[^>]*>')
Drawing = tuple[str, int, int]  # inner SVG markup, width, height in px


@lru_cache(maxsize=1)
def _artist() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "draw")


def submit(spec: dict[str, Any]) -> Future[Drawing]:
    """`draw(spec)` in the drawing thread; drawings are made in the order in which they are handed in."""
    return _artist().submit(draw, spec)


def warm() -> None:
    """Start the drawing engine in the background; call it before a long computation that ends in drawings."""
    submit(_warm_spec())


def _warm_spec() -> dict[str, Any]:
    """A chart with what most charts have: code that the engine meets here it need not read and compile later."""
    axis = {"field": "x", "type": "quantitative", "title": "x"}
    colours = {"domain": ["a", "b"], "range": ["#111", "#222"]}
    series = {"field": "s", "type": "nominal", "legend": None, "scale": colours}
    signs = {"x": axis, "y": {**axis, "scale": {"type": "log"}, "axis": {"format": ",~f"}}, "color": series}
    marks = ("line", "area", "point", "rect", "rule")
    layers: list[dict[str, Any]] = [{"mark": mark, "encoding": signs} for mark in marks]
    layers.append({"mark": "text", "encoding": {**signs, "text": {"field": "s", "type": "nominal"}}})
    rows = [{"x": 1, "s": "a"}, {"x": 50, "s": "b"}]
    return {"width": 300, "height": 200, "data": {"values": rows}, "layer": layers}


def draw(spec: dict[str, Any]) -> Drawing:
    """(inner SVG markup, width, height) of one spec, in px."""
    svg = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    head = _ROOT.search(svg)
    if head is None:
        raise RuntimeError("vl-convert gave no SVG root with a viewBox")
    _, _, width, height = (round(float(v)) for v in head.group(1).split())
    inner = svg[head.end() : svg.rindex("</svg>")]
    inner = _NOISE.sub("", inner)
    inner = merged_symbols(inner)
    inner = _PLACES.sub(lambda place: _LONG.sub(r"\1", place.group()), inner)
    before = ""
    while before != inner:
        before, inner = inner, _EMPTY.sub("", inner)
    return inner, width, height


def merged_symbols(inner: str) -> str:
    """The markup with runs of equal symbols as one path each: a scatter of 1,500 points in 20 kB, not 200."""
    out: list[str] = []
    run: list[re.Match[str]] = []
    end = 0

    def close() -> None:
        out.append(_one_path(run) if len(run) >= MANY else "".join(m.group() for m in run))
        run.clear()

    for found in _SYMBOL.finditer(inner):
        if run and (found.start() != end or found.groups()[2:] != run[-1].groups()[2:]):
            close()
        if not run:
            out.append(inner[end : found.start()])
        run.append(found)
        end = found.end()
    close()
    return "".join(out) + inner[end:]


def _one_path(run: list[re.Match[str]]) -> str:
    shape, look = run[0].group(3), run[0].group(4)
    circle = _CIRCLE.match(shape)
    fill = re.search(r' fill="([^"]*)"', look)
    if circle and fill and "stroke=" not in look:  # a round cap on a line without length is a disc
        look = re.sub(r' (?:fill|stroke-width)="[^"]*"', "", look).replace("fill-opacity", "stroke-opacity")
        width = 2 * float(circle.group(1))
        look = f' fill="none" stroke="{fill.group(1)}" stroke-width="{width:g}" stroke-linecap="round"{look}'
        return f'<path d="{"".join(f"M{m.group(1)},{m.group(2)}h0" for m in run)}"{look}/>'
    (dx, dy), tail = _relative(shape)
    places = (f"M{float(m.group(1)) + dx:.1f},{float(m.group(2)) + dy:.1f}{tail}" for m in run)
    return f'<path d="{"".join(places)}"{look}/>'


def _relative(shape: str) -> tuple[tuple[float, float], str]:
    """The first point of a symbol and the rest of its path from there."""
    start = at = (0.0, 0.0)
    tail = ""
    for command, text in _COMMAND.findall(shape):
        v = [float(n) for n in _NUMBER.findall(text)]
        if command == "M":
            start = at = (v[0], v[1])
        elif command in "LA":
            tail += command.lower() + ",".join(
                f"{n:g}" for n in [*v[:-2], round(v[-2] - at[0], 2), round(v[-1] - at[1], 2)]
            )
            at = (v[-2], v[-1])
        elif command in "hv":
            tail += command + f"{round(v[0], 2):g}"
            at = (at[0] + v[0], at[1]) if command == "h" else (at[0], at[1] + v[0])
        elif command in "Zz":
            tail, at = tail + "z", start
        else:
            raise RuntimeError(f"a symbol holds the path command {command}")
    return start, tail


class Frame:
    """Axes drawn once for many curves: small multiples share a frame, and each adds one path.

    Input: a spec whose only line mark runs from the lower left to the upper right corner of
    the plot, over `domain` on a log x axis and 0..1 on the y axis; with `top` both axes are
    linear, y 0..`top`. Drawing each of 2 x 40 stages by itself would cost 4 s and 0.5 MB.
    """

    _CORNERS = re.compile(r'<path[^>]* d="M([-\d.]+),([-\d.]+)L([-\d.]+),([-\d.]+)"[^>]*/>')
    _TAGS = re.compile(r"<(/?)g([^>]*?)(/?)>")
    _SHIFT = re.compile(r'transform="translate\(([-\d.]+),([-\d.]+)\)"')

    def __init__(self, drawing: Drawing, domain: tuple[float, float], top: float | None = None) -> None:
        inner, self.width, self.height = drawing
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
        self._top = top
        self._low, self._high = domain if top is not None else (math.log(domain[0]), math.log(domain[1]))
        self.inner = inner[: found.start()] + inner[found.end() :]

    def place(self, value: float, share: float) -> tuple[float, float]:
        """Pixels of a point."""
        if self._top is not None:
            share /= self._top
        part = ((value if self._top is not None else math.log(value)) - self._low) / (self._high - self._low)
        return self._x[0] + part * (self._x[1] - self._x[0]), self._y[0] + share * (self._y[1] - self._y[0])

    def steps(self, points: list[list[float]]) -> str:
        """Path data of a step function that jumps at each point (right-continuous)."""
        placed = [self.place(v, s) for v, s in points]
        out = f"M{placed[0][0]:.1f},{placed[0][1]:.1f}"
        for px, py in placed[1:]:
            out += f"H{px:.1f}V{py:.1f}"
        return out


class Bundle(NamedTuple):
    """The code that sets `window.vegaEmbed`."""

    packed: str  # base64 of its gzip
    digest: str  # base64 of its SHA-256, for the page's policy


def cache_folder() -> Path:
    """Where things that cost time to make are kept between runs; it need not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "scheduler-bench"


@lru_cache(maxsize=1)
def bundle() -> Bundle:
    """The code that makes charts live, from the cache or made anew."""
    path = cache_folder() / f"vega-embed-{vl_convert.__version__}-{VEGA_LITE}.packed"
    try:
        check, digest, packed = path.read_text(encoding="ascii").split("\n")
        if check == _sha256(digest + packed):
            return Bundle(packed, digest)
    except (OSError, ValueError):
        pass
    text = vl_convert.javascript_bundle(vl_version=VEGA_LITE)
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text("\n".join((_sha256(digest + packed), digest, packed)), encoding="ascii")
        temporary.replace(path)
    except OSError:
        pass
    return Bundle(packed, digest)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
