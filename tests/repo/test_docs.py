"""Pages that are written from tables in the code are up to date."""
from __future__ import annotations

from tests.repo import write_ledger_doc


def test_the_ledger_page_is_the_column_tables() -> None:
    assert write_ledger_doc.PAGE.read_text(encoding="utf-8") == write_ledger_doc.text(), (
        "docs/ledger.md is old: run python -m tests.repo.write_ledger_doc"
    )
