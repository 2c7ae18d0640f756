"""Pages are rendered once per session: one takes about two seconds."""

from __future__ import annotations

import re
from functools import cache

import pytest

from reports.html import render
from tests.reports import examples


@cache
def _page(name: str, lang: str, live: bool) -> str:
    return render(examples.ALL[name](), lang=lang, live=live)


def page(name: str, lang: str = "en", live: bool = True) -> str:
    """The rendered page of one example."""
    return _page(name, lang, live)


def text_of(html: str) -> str:
    """What a reader can read: no scripts, no styles, no tags, white space folded."""
    html = re.sub(r"<(script|style)\b.*?</\1>", " ", html, flags=re.S)
    html = re.sub(r"<[^>]+>", " ", html)
    for entity, char in (("&lt;", "<"), ("&gt;", ">"), ("&#39;", "'"), ("&#34;", '"'), ("&amp;", "&")):
        html = html.replace(entity, char)
    return " ".join(html.replace("\u202f", " ").split())


@pytest.fixture(scope="session")
def pages():
    """`pages(name, lang="en", live=True)`: a rendered example, made once."""
    return page
