"""The manual is built without a warning, has everything public, asks nobody else for anything, and can be searched."""

import contextlib
import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Browser

pytest.importorskip("material", reason="the manual needs pip install 'evenstep[docs]'")
pytest.importorskip("mkdocstrings", reason="the manual needs pip install 'evenstep[docs]'")
pytestmark = pytest.mark.timeout(300)  # it is built once, which a busy machine may take its time for
ROOT = Path(__file__).parents[2]
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("manual")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(out)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Fetched(HTMLParser):
    """What a browser asks for when it shows a page."""

    def __init__(self, text):
        super().__init__()
        self.urls = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag in FETCHED and found.get("rel") not in ("canonical", "prev", "next"):
            self.urls.append(found.get(FETCHED[tag]) or "")


def test_warnings_are_errors():
    assert "\nstrict: true\n" in (ROOT / "mkdocs.yml").read_text()


def test_no_page_asks_another_place_for_anything(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        elsewhere = [url for url in Fetched(page.read_text()).urls if "//" in url]
        assert not elsewhere, page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"""(url\(|@import)\s*['"]?(https?:)?//""", sheet.read_text()), sheet


def test_what_is_fetched_is_seen():
    page = '<link rel="stylesheet" href="https://a/b.css"><script src="c.js"></script><link rel="next" href="d.html">'
    assert Fetched(page).urls == ["https://a/b.css", "c.js"]


def test_everything_public_is_in_the_reference(site, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import manual

    for package in manual.PUBLIC:
        text = (site / f"reference/{package or 'evenstep'}.html").read_text()
        module = f"evenstep.{package}".rstrip(".")
        missing = [name for name in manual.public_names(package) if f'id="{module}.{name}"' not in text]
        assert not set(missing) - {"data"}, package  # which has a page of its own


def test_all_commands_and_decisions_are_there(site):
    commands = (site / "reference/commands.html").read_text()
    assert all(
        f"usage: evenstep {name} " in commands for name in ("run", "join", "scale", "verify", "doctor", "server")
    )
    listed = (site / "adr/index.html").read_text()
    for path in (ROOT / "docs/adr").glob("*.md"):
        assert f'href="{path.stem}.html"' in listed


@contextlib.contextmanager
def served(folder):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_search_box_finds_a_page_from_a_server_and_from_a_folder_and_asks_nobody_else(site, tmp_path):
    with served(site) as url, Browser(tmp_path) as browser:
        for place in (url, site.as_uri()):
            browser.open(f"{place}/index.html")
            browser.js("document.querySelector('[data-md-toggle=search]').click()")
            box = "[data-md-component=search-query]"
            browser.js(f"document.querySelector('{box}').value = 'portable arithmeti'")  # each key is a search
            browser.type(box, "c")
            links = "[...document.querySelectorAll('.md-search-result__link')].map(each => each.href)"
            again = f"document.querySelector('{box}').dispatchEvent(new Event('keyup'))"  # it may not have listened yet

            def found(links=links, again=again):
                return browser.js(again) and any("processors.html" in link for link in browser.js(links))

            browser.until(found, place)
            asked = browser.js("performance.getEntriesByType('resource').map(each => each.name)")
            assert asked or place != url, "of files the browser keeps no list"
            assert all(each.startswith((place, "data:", "blob:")) for each in asked), place
