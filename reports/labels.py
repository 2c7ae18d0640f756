"""Where the names of points may stand in a chart without standing on each other or on a point.

Input: points in pixels of the smallest drawing, with their names. Output: for each name its side, or that it is left
out. Does not: draw. In a wider drawing the points move apart and the names keep their size, so what is free here stays
free there too, but for names on opposite sides of two near points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from reports.charts import PHONE, data
from reports.themes import ink

LETTER = 6.6  # px of a digit of 11 px letters
HEIGHT = 11.0
RADIUS = 6.0  # of a point
# side -> (align, dx, dy) of a mark_text with a middle baseline
SIDES = {
    "right": ("left", 8, -8),
    "left": ("right", -8, -8),
    "below": ("left", 8, 9),
    "below_left": ("right", -8, 9),
}
Box = tuple[float, float, float, float]


def sides(points: Sequence[tuple[float, float, str]], width: float) -> list[str]:
    """A key of `SIDES` for each point (x, y, name), "" where its name has no room within 0 to `width`."""
    taken: list[Box] = [(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for x, y, _ in points]
    out = []
    for i, (x, y, name) in enumerate(points):
        found = ""
        for side in SIDES if name else ():
            box = _box(x, y, name, side)
            others = taken[:i] + taken[i + 1 :]
            if box[0] >= -RADIUS and box[2] <= width + 4 * RADIUS and not any(_meet(box, other) for other in others):
                found = side
                taken.append(box)
                break
        out.append(found)
    return out


def point_names(
    rows: Sequence[dict[str, Any]], placed: Sequence[tuple[float, float, str]], x: alt.X, y: alt.Y, field: str
) -> list[alt.Chart]:
    """Layers with the names of `rows`, one for each side; `placed`: the rows in px of the phone drawing."""
    found = sides(placed, PHONE)
    layers = []
    for side, (align, dx, dy) in SIDES.items():
        mine = [row for row, where in zip(rows, found, strict=True) if where == side]
        if mine:
            names = alt.Chart(data(mine)).mark_text(
                align=align, baseline="middle", dx=dx, dy=dy, color=ink("muted"), fontSize=11
            )
            layers.append(names.encode(x=x, y=y, text=alt.Text(f"{field}:N")))
    return layers


def _box(x: float, y: float, name: str, side: str) -> Box:
    align, dx, dy = SIDES[side]
    wide = LETTER * len(name)
    left = x + dx if align == "left" else x + dx - wide
    return left, y + dy - HEIGHT / 2, left + wide, y + dy + HEIGHT / 2


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
