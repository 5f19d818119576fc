"""The status page as a person sees it, in a real browser."""

import re

import pytest
import torch
from browser import Browser
from torch import nn

from evenstep.server import ParameterServer, connect

HOSTILE = "<img src=x onerror=document.title='got in'>" + "-and-a-very-long-name" * 7
TORN = """[...document.querySelectorAll("#table th, #table td:not(:first-child)")].filter(cell => {
    const range = document.createRange(); range.selectNodeContents(cell);
    const lines = new Set([...range.getClientRects()].map(line => line.top)).size;
    return lines > cell.textContent.split(" ").length; }).map(cell => cell.textContent)"""
TOKEN = "a-token-that-nobody-must-see"


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path) as browser:
        yield browser


def serve(**options):
    net = nn.Linear(40, 25)
    return ParameterServer(net, torch.optim.SGD(net.parameters(), 0.1), transports=("http",), **options)


def figure(browser, name):
    return browser.text(f"[data-figure='{name}'] dd")


def contrast(browser, selector):
    """Of an element's text against the card that it lies on, as WCAG counts it."""
    shown = browser.js(f"""(() => {{ const e = document.querySelector({selector!r});
        return [getComputedStyle(e).color, getComputedStyle(e.closest('section')).backgroundColor]; }})()""")
    lights = []
    for colour in shown:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05), lights[1]


def test_versions_workers_throughput_and_events_are_seen_as_they_happen(browser):
    with (
        serve(staleness=None) as server,
        connect(server.url, worker="ada") as ada,
        connect(server.url, worker=HOSTILE) as hostile,
    ):
        gradients = {name: torch.ones_like(value) for name, value in ada.get_parameters().items()}
        for _ in range(5):
            ada.update_parameters(gradients)
        browser.open(server.url)
        browser.until(lambda: browser.text("#state") == "live", "it is live")
        assert figure(browser, "version") == "5"
        assert "asynchronous · SGD · 2 parameters, 4.00 KiB · started" in browser.text("#about")
        assert re.search(r"^ada\s+5\s+0\s+(now|\d+ s ago)\s+registered$", browser.text("#workers"), re.M)
        assert re.search(
            rf"^{re.escape(HOSTILE)}\s+0\s+5\s+(now|\d+ s ago)\s+registered$", browser.text("#workers"), re.M
        )
        assert browser.js("document.title") == "evenstep server", "names are text"
        assert re.search(r"(now|s ago)\s+worker 'ada' registered", browser.text("#events"))
        assert (browser.text("#low"), browser.text("#high")) == ("0", "5")
        line = browser.js("document.querySelector('polyline').getBoundingClientRect().toJSON()")
        assert line["width"] > 500, "the line is drawn from side to side"
        assert line["height"] > 100, "and from the lowest version to the highest"

        browser.js("window.mark = 'the same page'")
        server.store.register("vanishing")
        server.store.attendance.workers.registered["vanishing"].seen_s -= 30  # and never gives a sign of life again

        def it_moves():
            hostile.update_parameters(gradients)
            rates = [figure(browser, name) for name in ("updates / s", "received / s", "sent / s")]
            return rates[0] not in ("…", "0.00") and rates[1] not in ("…", "0 B") and rates[2] == "0 B"

        browser.until(it_moves, "throughput is seen")
        count = hostile.update_parameters(gradients)
        browser.until(lambda: figure(browser, "version") == f"{count}", "the page follows")
        assert browser.text("#high") == f"{count}"
        browser.until(
            lambda: re.search(r"^vanishing\s+\d+ s ago\s+dropped$", browser.text("#workers"), re.M), "dropped"
        )
        assert "worker 'vanishing' was dropped: no sign of life for 30 s" in browser.text("#events")
        assert browser.js("window.mark") == "the same page", "nothing was loaded again"
        looks_right_on_every_screen(browser)
        assert browser.complaints() == []

        server.stop()
        browser.until(lambda: browser.text("#state") == "no answer", "a server that is gone")
        assert figure(browser, "version") == f"{count}", "the last that it said"
        server.start()
        browser.until(lambda: browser.text("#state") == "live", "and back")


def looks_right_on_every_screen(browser):
    for scheme, dark in (("light", False), ("dark", True)):
        browser.emulate("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for selector in ("#workers td", "#events span", "tr.gone td.dropped", "#high"):
            ratio, behind = contrast(browser, selector)
            assert ratio > 4.5, f"{selector} can be read in {scheme}"
            assert (behind < 0.2) == dark
    for width in (1400, 768, 340):
        browser.emulate("setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        assert browser.js("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        assert browser.js("document.querySelector('#workers').getBoundingClientRect().right") <= width
        assert browser.js(TORN) == [], "no word is torn"


def test_a_token_is_asked_for_and_goes_nowhere_but_to_the_server(browser):
    with serve(staleness=None, token=TOKEN) as server:
        browser.open(server.url)
        browser.until(lambda: browser.text("#state") == "locked", "it asks")
        assert "The token that the server printed" in browser.text("#ask")
        assert browser.text("#shown") == ""
        browser.type("#token", "wrong\ue007")
        browser.until(lambda: browser.text("#trouble") == "That is not the token of this server.", "it says so")
        assert len(browser.complaints()) == 1, "the refusal"
        browser.type("#token", f"{TOKEN}\ue007")
        browser.until(lambda: browser.text("#state") == "live", "it is shown")
        assert browser.text("#ask") == ""
        browser.open(server.url)
        browser.until(lambda: browser.text("#state") == "live", "this tab remembers it")
        assert browser.complaints() == []
        places = "[location.href, document.cookie, ...performance.getEntriesByType('resource').map(e => e.name), "
        kept = browser.js(places + "...Object.values(localStorage), document.documentElement.outerHTML].join()")
        assert "/status" in kept
        assert TOKEN not in kept
        assert server.service.status()["refused"] == {"401": 1}, "it asked once without knowing it, and not again"
