"""One chart of several attainment curves with their intervals, for `bench simulate --compare`.

Input: cells (fields of `analysis.compare.Cell`). Output: a standalone SVG text.
Does not: compute; a cell without an interval is drawn without a band.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import vl_convert

from reports.svg import VEGA_LITE

# Told apart by colour, dash and symbol, as everywhere in the reports (Okabe and Ito's colours).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444")
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [10, 4], [1, 3])
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke")


def overlay_svg(cells: Sequence[Any], target: float | None = None) -> str:
    """The curves of all variants over offered rate."""
    return vl_convert.vegalite_to_svg(spec(cells, target), vl_version=VEGA_LITE)


def spec(cells: Sequence[Any], target: float | None = None) -> dict[str, Any]:
    """The Vega-Lite spec of the overlay."""
    names = list(dict.fromkeys(c.variant for c in cells))
    rows = [{"x": c.offered_qps, "y": c.attainment, "variant": c.variant,
             "low": c.attainment if c.low is None else c.low, "high": c.attainment if c.high is None else c.high}
            for c in cells]
    pick = [i % len(_COLOURS) for i in range(len(names))]
    colour = {"field": "variant", "type": "nominal", "title": None,
              "legend": {"symbolOpacity": 1},
              "scale": {"domain": names, "range": [_COLOURS[i] for i in pick]}}
    dash = {"field": "variant", "type": "nominal", "scale": {"domain": names, "range": [_DASHES[i] for i in pick]}}
    shape = {"field": "variant", "type": "nominal", "scale": {"domain": names, "range": [_SHAPES[i] for i in pick]}}
    x = {"field": "x", "type": "quantitative", "title": "offered requests/s", "scale": {"zero": False, "padding": 12}}
    y = {"field": "y", "type": "quantitative", "title": "share of all arrivals that meet the SLO (SIMULATED)",
         "scale": {"domain": [0, 1]}, "axis": {"format": ".0%"}}
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "area", "opacity": 0.14}, "encoding": {
            "x": x, "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}, "color": colour}},
        {"mark": {"type": "line"}, "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dash}},
        {"mark": {"type": "point", "filled": True, "size": 50, "opacity": 1},
         "encoding": {"x": x, "y": y, "color": colour, "shape": shape}},
    ]
    if target is not None:
        layers.append({
            "data": {"values": [{"y": target}]}, "mark": {"type": "rule", "strokeDash": [8, 4], "color": "#777"},
            "encoding": {"y": {"field": "y", "type": "quantitative"}},
        })
    return {"width": 640, "height": 320, "background": "white", "data": {"values": rows}, "layer": layers}
