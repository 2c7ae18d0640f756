"""The Chinese pages keep step with the English ones: headings, code blocks, links, commands, keys."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from bench.__main__ import COMMANDS
from bench.commands.job_options import PROJECT
from bench.config import load_config
from tests.repo.write_cli_doc import load

PAIRS = [("README.md", "README.zh-CN.md")]
ARTICLE = PROJECT / "docs" / "from-article.zh-CN.md"


def outside_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(text: str) -> list[int]:
    """The levels of all headings, in order."""
    return [len(marks) for marks in re.findall(r"^(#+) ", outside_code(text), re.MULTILINE)]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_same_headings_same_code_and_chinese_text(english: str, chinese: str) -> None:
    one, two = ((PROJECT / name).read_text(encoding="utf-8") for name in (english, chinese))
    assert headings(one) == headings(two), f"{chinese}: its headings are not those of {english}"
    assert blocks(one) == blocks(two), f"{chinese}: its code blocks are not those of {english}"
    prose = re.sub(r"`[^`]*`|\([^)]*\)|https?://\S+", "", outside_code(two))
    letters = len(re.findall(r"[一-鿿]", prose))
    assert letters > 800 and letters > len(re.findall(r"[A-Za-z]+", prose))  # text, not a copy of the English page
    assert f"({chinese})" in one and f"({english})" in two  # each names the other


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_the_chinese_page_names_every_page_that_the_english_one_names(english: str, chinese: str) -> None:
    one, two = (set(re.findall(r"\]\((docs/[^)#]+)", (PROJECT / n).read_text(encoding="utf-8"))) for n in (english, chinese))
    assert one <= two


@pytest.mark.parametrize("page", ["README.zh-CN.md", "docs/from-article.zh-CN.md", "docs/ci.md", "docs/cli.md"])
def test_links_and_their_sections_exist(page: str) -> None:
    path = PROJECT / page
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text(encoding="utf-8")):
        name, _, section = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{page}: {target}"
        if section:
            titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert section in slugs, f"{page}: {target}"


def test_the_commands_of_the_article_page_exist_with_their_options() -> None:
    text = ARTICLE.read_text(encoding="utf-8")
    lines = [line for block in blocks(text) for line in block.splitlines()[1:-1]]
    inline = re.findall(r"`(bench [a-z-]+(?: --?[a-z-]+)?(?: [a-z]+)?)`", outside_code(text))
    assert len(lines) >= 9 and inline
    for line in lines + inline:
        words = shlex.split(line)
        assert words[0] == "bench" and words[1] in COMMANDS, line
        known = {o for p in load(words[1]).params if isinstance(p, click.Option) for o in p.opts}
        assert {w for w in words[2:] if w.startswith("-")} <= known, line


def test_the_keys_of_the_article_page_are_keys_of_the_config(tmp_path: Path) -> None:
    """And every key of the article's JSON that is checked stands in the table."""
    text = ARTICLE.read_text(encoding="utf-8")
    config = load_config(PROJECT / "configs" / "scheduler_bench.json", env={}).config.model_dump()
    for section, key in re.findall(r"`(scheduler|slo|admission|loadgen|target)\.(\w+)`", text):
        assert key in config[section], f"{section}.{key}"
    known = (PROJECT / "docs" / "config.md").read_text(encoding="utf-8")
    assert all(f"| {check} |" in known for check in re.findall(r"`(CFG-\d+)`", text))


def test_codes_of_the_article_page_are_codes_of_the_client() -> None:
    from bench.client.outcome import CODES

    text = ARTICLE.read_text(encoding="utf-8")
    assert set(re.findall(r"`((?:CH|SC|SV|CL)-[A-Z0-9-]+)`", text)) <= set(CODES)
