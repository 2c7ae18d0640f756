"""Colours are readable in both themes."""

from __future__ import annotations

import pytest

from reports import themes


def test_contrast_known_values():
    # WCAG's own anchors: black on white is 21, a colour on itself 1; #767676 on white is the 4.54 of the guideline.
    assert themes.contrast("#000000", "#FFFFFF") == pytest.approx(21.0)
    assert themes.contrast("#0072B2", "#0072B2") == pytest.approx(1.0)
    assert themes.contrast("#767676", "#FFFFFF") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", sorted(themes.MARKS))
def test_marks_have_three_to_one_on_what_lies_behind_them(name, dark):
    behind = [themes.TINTS["panel"], themes.TINTS["watermark"], themes.TINTS["wedge"]]
    for surface in behind:
        assert themes.contrast(themes.MARKS[name][dark], surface[dark]) >= 3.0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["text", "muted", "link", "pass", "fail", "invalid"])
def test_text_has_four_and_a_half_to_one_on_every_surface(name, dark):
    for surface in ("page", "panel", "sunk"):
        assert themes.contrast(themes.TEXT[name][dark], themes.SURFACES[surface][dark]) >= 4.5


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["pass", "fail", "invalid"])
def test_verdict_text_on_its_own_background(kind, dark):
    background = themes.SURFACES[f"{kind}_bg"][dark]
    assert themes.contrast(themes.TEXT[kind][dark], background) >= 4.5
    assert themes.contrast(themes.TEXT["text"][dark], background) >= 7


def test_text_that_stands_in_charts_is_readable():
    for name in ("slo", "tpot", "theory", "knee"):  # names of lines are written in the colour of the line
        for dark in (False, True):
            assert themes.contrast(themes.chart_text(name)[dark], themes.TINTS["panel"][dark]) >= 4.5, name


def test_heat_steps_differ_and_darken_evenly():
    for dark in (False, True):
        steps = [
            themes.contrast(themes.TINTS[f"heat_{k}"][dark], themes.TINTS["panel"][dark])
            for k in range(themes.HEAT_LEVELS)
        ]
        assert all(b > a * 1.2 for a, b in zip(steps, steps[1:], strict=False))


def test_both_themes_declare_the_same_variables():
    def names(text):
        return {part.split(":")[0] for part in text.split(";") if part}

    assert names(themes.css_variables(dark=False)) == names(themes.css_variables(dark=True))


def test_ink_falls_back_to_the_light_colour():
    assert themes.ink("ttft") == "var(--c-ttft,#0072B2)"
    assert themes.ink("stage_a").startswith("var(--c-stage-a,#")
    with pytest.raises(KeyError):
        themes.ink("no_such_meaning")
