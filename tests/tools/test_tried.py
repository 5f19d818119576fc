"""The list of what the wheel was tried on is a page, and a failure is seen on it."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tried(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import tried

    return tried


def test_the_page_is_what_the_list_says(tried):
    rows = json.loads(tried.LIST.read_text())
    assert rows
    assert tried.PAGE.read_text() == tried.page(rows), "python tools/tried.py --page"


def test_a_failure_says_the_last_thing_that_was_said(tried):
    done = subprocess.CompletedProcess([], 1, "out", "first\nImportError: libx | liby\n")
    assert tried.verdict(done, "yes") == "failed: ImportError: libx / liby"
    assert tried.verdict(subprocess.CompletedProcess([], 0, "", "a warning"), "yes") == "yes"
