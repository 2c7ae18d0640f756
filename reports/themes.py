"""The report's colours and the look of its charts, one meaning per colour.

Input: nothing. Output: CSS custom properties for the light and the dark
theme, `ink(name)` for chart specs, and the Vega-Lite config.
Does not: know any chart.

1. A chart names a colour by its meaning, never by its value. The value in a
   spec is `var(--c-NAME,#light)`, so one SVG serves both themes and print,
   and a viewer that drops the style sheet still shows the light colours.
2. Marks have a contrast of at least 3:1 and text of at least 4.5:1 on every
   surface of their theme (WCAG 1.4.11 and 1.4.3; checked by a test).
3. Colour is never the only sign: series differ in dash and symbol too.

Source: palettes computed in `reference/ux.md`, from Okabe-Ito, darkened or
lightened until they pass.
"""

from __future__ import annotations

from typing import Any

FONT = 'system-ui, -apple-system, "Segoe UI", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif'
CHART_FONT = "system-ui, 'Segoe UI', 'Noto Sans CJK SC', sans-serif"

# name -> (light on #ffffff, dark on #171c23); names up to "layer_client" colour marks.
MARKS: dict[str, tuple[str, str]] = {
    "ttft": ("#0072B2", "#56B4E9"),
    "tpot": ("#007A5A", "#3FC79A"),
    "e2e": ("#AA3377", "#E39AC3"),
    "slo": ("#D55E00", "#FF9A5C"),
    "theory": ("#5A636E", "#9AA5B1"),
    "joint": ("#1F2733", "#E6EAEF"),
    "completed": ("#5A636E", "#9AA5B1"),
    "knee": ("#1F2733", "#E6EAEF"),
    "layer_channel": ("#0072B2", "#56B4E9"),
    "layer_script": ("#8A6A00", "#E3C25B"),
    "layer_scheduler": ("#AA3377", "#E39AC3"),
    "layer_client": ("#5A636E", "#9AA5B1"),
    "model_b": ("#8A6A00", "#E3C25B"),
}
# Marks that are readable as a line but too pale for letters.
TEXT_OF_MARK: dict[str, tuple[str, str]] = {"slo": ("#B34A00", "#FFA56E")}
# Tints behind marks: decoration, so no contrast is asked of them.
TINTS: dict[str, tuple[str, str]] = {
    "panel": ("#FFFFFF", "#171C23"),
    "grid": ("#E8EBEF", "#2A323C"),
    "axis": ("#8D97A3", "#667180"),
    "watermark": ("#CFEBDD", "#17453A"),
    "wedge": ("#E9EDF2", "#242C36"),
    "stage_a": ("#F1F4F7", "#1D242C"),
    "stage_b": ("#E4E9EE", "#262F39"),
    "warmup": ("#F6E7D2", "#3D3322"),
    "drain": ("#E4DFF0", "#332D47"),
    "waste": ("#F8DCC8", "#4A2F1D"),
    "heat_0": ("#D6E6F2", "#17354A"),
    "heat_1": ("#A5CBE4", "#1E5074"),
    "heat_2": ("#5FA3CF", "#2C76A8"),
    "heat_3": ("#1F78B4", "#56A9DE"),
    "heat_4": ("#0B4A75", "#A9DCFA"),
}
TEXT: dict[str, tuple[str, str]] = {
    "text": ("#1C222B", "#E6EAEF"),
    "muted": ("#56606B", "#A3AEBA"),
    "link": ("#00609A", "#7CC4F0"),
    "pass": ("#006B4F", "#4FD0A5"),
    "fail": ("#B34A00", "#FFA56E"),
    "invalid": ("#7A5200", "#E9C46A"),
}
SURFACES: dict[str, tuple[str, str]] = {
    "page": ("#F6F8FA", "#0F1318"),
    "panel": ("#FFFFFF", "#171C23"),
    "sunk": ("#F1F4F7", "#1D242C"),
    "pass_bg": ("#E7F5EF", "#12302A"),
    "fail_bg": ("#FDEFE6", "#382214"),
    "invalid_bg": ("#FBF3DE", "#332A14"),
}
LINES: dict[str, tuple[str, str]] = {
    "line": ("#DDE2E8", "#2C3540"),
    "line_strong": ("#7C8794", "#6E7A88"),
}
HEAT_LEVELS = 5
# Numbers on an axis whose ticks are given: without the 6, d3 takes the digits from the ticks' distance and 10 becomes
# 1e+1.
PLAIN = ",.6~f"


def _all() -> dict[str, tuple[str, str]]:
    return {**MARKS, **{f"{k}_text": v for k, v in TEXT_OF_MARK.items()}, **TINTS, **TEXT, **SURFACES, **LINES}


def ink(name: str) -> str:
    """The colour `name` as a CSS value with its light value as fallback."""
    return f"var(--c-{name.replace('_', '-')},{_all()[name][0]})"


def text_ink(name: str) -> str:
    """The colour for letters that name the mark `name`."""
    return ink(f"{name}_text" if name in TEXT_OF_MARK else name)


def css_variables(dark: bool) -> str:
    """The declarations of one theme, for a rule body."""
    return "".join(f"--c-{k.replace('_', '-')}:{v[1 if dark else 0]};" for k, v in _all().items())


def chart_text(name: str) -> tuple[str, str]:
    """(light, dark) colour for a name written beside the mark `name`: the mark's own where text needs no more."""
    return TEXT_OF_MARK.get(name, MARKS[name])


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two `#rrggbb` colours, 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def chart_config() -> dict[str, Any]:
    """The Vega-Lite config of every chart."""
    axis = {
        "domainColor": ink("axis"),
        "tickColor": ink("axis"),
        "gridColor": ink("grid"),
        "labelColor": ink("muted"),
        "titleColor": ink("muted"),
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "labelPadding": 5,
        "labelSeparation": 5,
        "tickSize": 4,
        "gridWidth": 1,
    }
    return {
        "background": "transparent",
        "aria": False,
        "font": CHART_FONT,
        "padding": 4,
        "axis": axis,
        "axisX": {"grid": False, "zindex": 1},
        "axisY": {
            "domain": False,
            "ticks": False,
            "titleAngle": 0,
            "titleAlign": "left",
            "titleAnchor": "end",
            "titleX": 0,
            "titleY": -22,
            "titleBaseline": "bottom",
        },
        "view": {"stroke": None},
        "line": {"strokeWidth": 2, "strokeCap": "round", "strokeJoin": "round"},
        "text": {"fontSize": 12, "color": ink("text")},
        "title": {"color": ink("text"), "fontSize": 13, "fontWeight": 600, "anchor": "start"},
    }
