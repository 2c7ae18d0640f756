"""Names of points: none stands on another name or on a point, in the drawing itself too."""

from __future__ import annotations

import random
import re

import pytest

from reports import charts_capacity, charts_little, svg
from reports.charts import Context, phone_spec, static_spec
from reports.figures import Figures
from reports.labels import _box, _meet, sides
from reports.words import Words
from tests.reports import examples


def drawn(inner: str) -> list[tuple[float, float, float, float]]:
    """Boxes of the names of points (letters of 11 px), by the widths of digits in DejaVu Sans."""
    boxes = []
    for found in re.finditer(r"<text ([^>]*)>([^<]*)</text>", inner):
        look, text = found.groups()
        if 'font-size="11px"' not in look or not re.fullmatch(r"[\d.]+", text):
            continue
        x, y = map(float, re.search(r"translate\(([-\d.]+),([-\d.]+)\)", look).groups())
        wide = 6.3 * len(text)
        left = x - wide if 'text-anchor="end"' in look else x
        boxes.append((left, y - 9, left + wide, y))
    return boxes


@pytest.mark.parametrize("rates", [(2, 4, 6), (5, 10, 15, 20, 25, 30, 35, 40), tuple(range(1, 41)), (20, 21, 22, 22.5)])
@pytest.mark.parametrize("spec", [phone_spec, static_spec])
def test_no_name_stands_on_another(rates, spec):
    words = Words("en")
    ctx = Context(examples.sweep(rates), words, Figures(words))
    for chart in (charts_capacity.token_speed(ctx), charts_little.law(ctx)):
        boxes = drawn(svg.draw(spec(chart))[0])
        assert len(boxes) >= 2
        for i, a in enumerate(boxes):
            assert [b for b in boxes[i + 1 :] if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]] == []


def test_of_the_repeats_of_a_rate_one_is_named():
    words = Words("en")
    ctx = Context(examples.sweep((5, 10, 15), repeats=3), words, Figures(words))
    inner = svg.draw(static_spec(charts_little.law(ctx)))[0]
    names = re.findall(r'<text [^>]*font-size="11px"[^>]*>([\d.]+)</text>', inner)
    assert sorted(names, key=float) == ["5", "10", "15"]


def test_a_name_without_room_is_left_out_and_the_next_side_is_tried():
    assert sides([(50, 50, "5")], 100) == ["right"]
    assert sides([(50, 50, "5"), (58, 42, "6")], 100)[0] == "left"  # the other point stands where the name would
    crowd = [(50.0 + i, 50.0, "100") for i in range(9)]
    assert sides(crowd, 100).count("") >= 5


def test_what_is_free_in_a_small_drawing_is_free_in_a_large_one():
    draw = random.Random(3)
    for _ in range(50):
        points = [(draw.uniform(0, 290), draw.uniform(0, 270), "10") for _ in range(12)]
        found = sides(points, 290)
        assert any(found)
        wide = [(3.1 * x, 1.1 * y, name) for x, y, name in points]
        boxes = [_box(*p, side) for p, side in zip(wide, found, strict=True) if side]
        pairs = [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if _meet(a, b)]
        assert len(pairs) <= 1  # names on opposite sides of two near points may change places
