"""Numbers as the report prints them: one rounding, one word for what is absent.

Input: values of `analysis.json` (None = absent, inf = did not finish).
Output: short texts. Does not: compute a statistic.
"""

from __future__ import annotations

import math
from typing import Any

from bench.records.analysis import Percentiles
from reports.words import Words

THIN = "\u202f"  # narrow no-break space between number and unit


def number(value: Any) -> float | None:
    """A float, or None for what is absent; "inf" and "-inf" become infinities, NaN is absent."""
    if value is None or isinstance(value, bool):
        return None
    try:
        out = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(out) else out


def finite(value: Any) -> float | None:
    """A finite float or None."""
    out = number(value)
    return out if out is not None and math.isfinite(out) else None


class Figures:
    """Formatters that speak one language."""

    def __init__(self, words: Words) -> None:
        self.words = words

    def duration(self, value_s: Any) -> str:
        """Seconds as `412 ms`, `41.2 ms`, `0.84 ms` or `12.3 s`."""
        value = number(value_s)
        if value is None:
            return self.words("not_measured")
        if math.isinf(value):
            return self.words("did_not_finish")
        size = abs(value)
        if size >= 10:
            return f"{value:,.1f}{THIN}s"
        if size >= 0.1:
            return f"{value * 1e3:,.0f}{THIN}ms"
        if size >= 0.01:
            return f"{value * 1e3:.1f}{THIN}ms"
        return f"{value * 1e3:.2f}{THIN}ms" if size else f"0{THIN}ms"

    def rate(self, value_qps: Any, unit: bool = False) -> str:
        """A rate with one decimal."""
        return self.plain(value_qps, 1) + (
            f"{THIN}{self.words('unit_qps')}" if unit and number(value_qps) is not None else ""
        )

    def capacity(self, value_qps: Any, up: bool = False) -> str:
        """A capacity figure, rounded down (`up`: an upper bound, rounded up), as in the sentences of the analysis."""
        value = finite(value_qps)
        if value is None:
            return self.plain(value_qps, 1)
        size = 10 if value >= 1 else 100 if value >= 0.1 else 1000
        cut = math.ceil(value * size - 1e-9) if up else math.floor(value * size + 1e-9)
        return f"{cut / size:,.{len(str(size)) - 1}f}"

    def capacity_span(self, low: Any, high: Any) -> str:
        """`[low, high]` of a capacity figure or an empty text."""
        if number(low) is None or number(high) is None:
            return ""
        return f"[{self.capacity(low)}, {self.capacity(high, up=True)}]"

    def asked(self, value_qps: Any) -> str:
        """An offered rate as it was asked: 15, 22.5."""
        value = number(value_qps)
        return self.words("not_measured") if value is None else f"{value:g}"

    def share(self, value: Any, decimals: int = 2) -> str:
        """A share 0..1 as percent."""
        out = number(value)
        if out is None:
            return self.words("not_measured")
        if math.isinf(out):
            return "∞"
        text = f"{out * 100:.{decimals}f}"
        if out < 1 and text == f"{100:.{decimals}f}":  # 100 % is said only when it is all of them
            text = f"{100 - 10**-decimals:.{decimals}f}"
        return f"{text}{THIN}%"

    def signed_share(self, value: Any, decimals: int = 1) -> str:
        """A relative difference as `+1.2 %`."""
        out = number(value)
        return self.words("not_measured") if out is None else f"{out * 100:+.{decimals}f}{THIN}%".replace("-", "−")

    def plain(self, value: Any, decimals: int = 1) -> str:
        """A number with thousands separators."""
        out = number(value)
        if out is None:
            return self.words("not_measured")
        return "∞" if math.isinf(out) else f"{out:,.{decimals}f}"

    def count(self, value: Any) -> str:
        """A whole number with thousands separators."""
        return self.plain(value, 0)

    def significant(self, value: Any) -> str:
        """Four significant digits, for parameters of unknown size."""
        out = number(value)
        if out is None:
            return self.words("not_measured")
        return "∞" if math.isinf(out) else f"{out:.4g}"

    def measure(self, value: Any, unit: str) -> str:
        """A value of a gate or a parameter in its unit."""
        if number(value) is None:
            return self.words("not_measured")
        if unit == "s":
            return self.duration(value)
        if unit in ("ratio", "share"):
            return self.share(value)
        if unit in ("1/s", "qps", "req/s"):
            return self.rate(value, unit=True)
        return self.significant(value) + (f"{THIN}{unit}" if unit and unit != "1" else "")

    def percentile(self, p: Percentiles | None, name: str) -> str:
        """A percentile, or the word for why there is none."""
        if p is None or not p.n:
            return self.words("not_measured")
        if name in p.withheld:
            return self.words("withheld")
        return self.duration(getattr(p, name))

    def interval(self, low: Any, high: Any, how: Any) -> str:
        """`[low, high]` or an empty text."""
        return f"[{how(low)}, {how(high)}]" if number(low) is not None and number(high) is not None else ""
