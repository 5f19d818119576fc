"""The page of a run as a person sees it, in a real browser, and as others may not."""

import json
import os
import re
import signal
import textwrap
import urllib.error
import urllib.request

import pytest
from browser import Browser

import processes
from evenstep.cli.main import main
from evenstep.core.control import ask
from evenstep.picture.svg import colour
from workers import Cli, cli_run

TREE = """[
    [...document.querySelectorAll('#tree rect')].map(e => e.getAttribute('fill')),
    document.querySelectorAll('#tree polyline').length,
    [...document.querySelectorAll('#tree text')].map(e => e.textContent),
]"""
SCRIPT = """
    import sys
    import time
    import torch
    import evenstep

    with evenstep.Run(shards=4, page=len(sys.argv) > 1) as run:
        net = torch.nn.Linear(4, 1)
        net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), 1e-2))
        run.checkpoint("checkpoints", every=10**9)
        data = torch.utils.data.TensorDataset(torch.randn(80, 4))
        for batch in run.batches(data, 8, epochs=10**6):
            run.log("<b>rate</b>", 1e-2)
            run.step(batch, lambda part: (time.sleep(0.02), net(part[0]).pow(2).mean())[1])
"""


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path) as browser:
        yield browser


@pytest.fixture
def run(request, tmp_path, monkeypatch):
    """A run that goes on until it is stopped: its command line, the address of its page, and its token."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    by_script = getattr(request, "param", None) == "asked for by the script"
    with Cli(
        "run", "-n", "2", "--weights", "1,1", *(["train.py", "page"] if by_script else ["--page", "train.py"])
    ) as cli:
        assert processes.until(lambda: "token" in cli.stderr, 30.0)
        url, token = re.search(r"page (\S+), its buttons need the token (\S+)", cli.stderr).groups()
        assert processes.until(lambda: ask_page(url)[0] == 200 and ask_page(url)[1]["step"] > 3, 60.0)
        yield cli, url, token


def ask_page(url, path="/status", *, method="GET", **headers):
    request = urllib.request.Request(
        url + path, method=method, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read()) if path != "/metrics" else reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    except OSError:
        return 0, {}


def test_what_happens_is_seen_as_it_happens(run, browser, capsys):
    cli, url, token = run
    browser.open(url)
    browser.until(lambda: browser.text("#state") == "live", "it is live")
    assert "train.py · 4 shards · generation 1 · started" in browser.text("#about")
    assert figure(browser, "workers") == "2"
    assert [browser.js(f"document.querySelectorAll('.curve h3')[{n}].textContent") for n in (0, 1)] == [
        "loss",
        "<b>rate</b>",
    ]
    line = browser.js("document.querySelector('polyline').getBoundingClientRect().toJSON()")
    assert line["width"] > 150, "the loss is drawn over all steps"
    assert browser.text("#shards").split("\n") == ["worker 0: shards 0\u20131", "worker 1: shards 2\u20133"]
    leaves, lines, below = browser.js(TREE)
    assert leaves == [colour(0), colour(0), colour(1), colour(1)], "as in the picture that `evenstep graph` makes"
    assert (lines, below) == (6, ["0", "1", "2", "3"])
    assert not browser.js("document.querySelector('#faultless').hidden")
    assert browser.js("document.querySelector('#several').hidden"), "there is one machine"
    assert_agrees_with_status(browser, cli.pid, capsys)

    victim = next(w["pid"] for w in ask({"status": True}, cli.pid)["workers"] if w["worker"] == 1)
    os.kill(victim, signal.SIGKILL)
    lost = f"worker 1 (pid {victim}) was killed by SIGKILL at step"
    see(browser, lambda: lost in browser.text("#events"), "it is lost")
    see(browser, lambda: "2 workers from now on: 0, 1" in browser.text("#events"), "and replaced")
    recovered = re.search(r"step \d+ is committed, (\d+\.\d{3}) s after a worker was lost", browser.text("#events"))[1]
    see(browser, lambda: f"{recovered} s" in browser.text("#faults"), "how long it took")
    assert lost in browser.text("#faults")
    see(browser, lambda: figure(browser, "replaced") == "1" and str(victim) not in browser.text("#workers"), "another")
    assert figure(browser, "slowest recovery") == f"{recovered} s"
    assert_agrees_with_status(browser, cli.pid, capsys)

    for keys in ("a wrong one", token):
        browser.js("document.querySelector('#token').select()")
        browser.type("#token", f"{keys}\t\ue007")  # on to the first button, and press it
        said = "buttons need the token" if keys != token else "3 workers from the next step on"
        see(browser, lambda said=said: said in browser.text("#answer"), "the answer")
    see(browser, lambda: figure(browser, "workers") == "3", "one more")
    for button, where in (("checkpoint", "#checkpoints"), ("fingerprint", "#fingerprint")):
        browser.js(f"document.querySelector('button[name={button}]').click()")
        see(browser, lambda where=where: re.search(r"step-\d{9}|[0-9a-f]{64} after step", browser.text(where)), button)
    assert len(browser.complaints()) == 1, "the wrong token"
    looks_right_on_every_screen(browser)
    names = browser.js("performance.getEntriesByType('resource').map(e => e.name)")
    assert all(name.startswith(url) for name in names), "nothing is asked of anybody else"
    assert token not in browser.js("[location.href, document.cookie, document.documentElement.outerHTML].join()")

    browser.js("window.confirm = () => true")
    browser.js("document.querySelector('button[name=stop]').click()")
    done = cli.wait()
    assert done.code == 75, done.stderr
    assert "SIGTERM: stopping after this step" in done.stderr
    browser.until(lambda: browser.text("#state") == "over", "it is over")


def see(browser, condition, what):
    """Wait for what the page will show; it looks at once, not a second later."""

    def looked():
        browser.js("look()")
        return condition()

    browser.until(looked, what)


def figure(browser, name):
    return browser.text(f"[data-figure='{name}'] dd")


def assert_agrees_with_status(browser, pid, capsys):
    """The page shows what `evenstep status` prints: who the workers are, exactly; steps go on meanwhile."""

    def status():
        assert main(["status", "--job", str(pid)]) == 0
        return [
            tuple(map(int, found))
            for found in re.findall(r"worker (\d+)  pid (\d+)  step (\d+)", capsys.readouterr().out)
        ]

    def shown():
        return [tuple(map(int, line.split()[:3])) for line in browser.text("#workers").splitlines() if line.strip()]

    before, old = status(), shown()
    browser.until(lambda: shown()[0][2] > max(old[0][2], before[0][2]), "it has looked again")
    rows, after = shown(), status()
    assert [row[:2] for row in rows] == [row[:2] for row in after]
    assert all(low[2] <= row[2] <= high[2] for low, row, high in zip(before, rows, after, strict=True))


def contrast(browser, selector):
    shown = browser.js(f"""(() => {{ const e = document.querySelector({selector!r});
        return [getComputedStyle(e).color, getComputedStyle(e.closest('section')).backgroundColor]; }})()""")
    lights = []
    for shade in shown:
        parts = [int(part) / 255 for part in re.findall(r"\d+", shade)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05), lights[1]


def looks_right_on_every_screen(browser):
    for scheme, dark in (("light", False), ("dark", True)):
        browser.emulate("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for selector in (
            "#workers td",
            "#events span",
            "#shards li",
            "#faults td",
            "#fingerprint",
            ".curve .scale span",
        ):
            ratio, behind = contrast(browser, selector)
            assert ratio > 4.5, f"{selector} can be read in {scheme}"
            assert (behind < 0.2) == dark
    for width in (1400, 768, 340):
        browser.emulate("setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        browser.js("(document.querySelector('[data-figure=loss] dd').textContent = '1234567890.12345678')")
        assert browser.js("document.documentElement.scrollWidth") <= width, "nothing sticks out"


def test_strangers_see_nothing_and_press_nothing(run):
    _, url, token = run
    bearer = f"Bearer {token}"
    assert ask_page(url, Host="evil.example")[0] == 403
    assert ask_page(url, Sec_Fetch_Site="cross-site")[0] == 403
    assert ask_page(url, "/press/add", method="POST")[0] == 401
    assert ask_page(url, "/press/add", method="POST", Authorization="Bearer x")[0] == 401
    assert ask_page(url, "/press/add", method="POST", Authorization=bearer, Origin="http://evil.example")[0] == 403
    assert ask_page(url, "/press/explode", method="POST", Authorization=bearer)[0] == 404
    status, found = ask_page(url)
    assert (status, found["wanted"]) == (200, 2), "nothing has changed"
    port = url.rpartition(":")[2]
    done = cli_run("run", "--page", port, "train.py")
    assert done.code == 2
    assert (
        f"--page {port}: the port cannot be used: [Errno 98] Address already in use; name another port" in done.stderr
    )
    assert token not in json.dumps(found)
    code, text = ask_page(url, "/metrics")
    assert code == 200
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["evenstep_run_workers"].samples[0].value == 2
    seconds = families["evenstep_run_worker_seconds"].samples
    assert {(s.labels["worker"], s.labels["in"]) for s in seconds} == {
        (w, phase) for w in "01" for phase in ("compute", "wait", "update", "exchange")
    }


@pytest.mark.parametrize("run", ["asked for by the script"], indirect=True)
def test_a_run_goes_on_without_its_page(run):
    cli, url, _ = run
    workers = {w["pid"] for w in ask({"status": True}, cli.pid)["workers"]}
    (page,) = set(processes.descendants(cli.pid)) - workers
    os.kill(page, signal.SIGKILL)
    assert processes.until(lambda: "the page was killed by SIGKILL; the run goes on without it" in cli.stderr)
    step = ask({"status": True}, cli.pid)["workers"][0]["step"]
    assert processes.until(lambda: ask({"status": True}, cli.pid)["workers"][0]["step"] > step)
    cli.kill(signal.SIGTERM)
    assert cli.wait().code == 75
    assert ask_page(url)[0] == 0


def test_every_group_has_a_page_and_the_button_of_one_stops_all(tmp_path, monkeypatch, browser):
    monkeypatch.chdir(tmp_path)
    script = textwrap.dedent(SCRIPT).replace('run.checkpoint("checkpoints", every=10**9)', "pass")
    (tmp_path / "train.py").write_text(script)
    with Cli("run", "--groups", "2", "--workers-per-group", "1", "--page", "train.py") as cli:
        invited = r"group (\d): page (\S+), its buttons need the token (\S+)"
        assert processes.until(lambda: len(re.findall(invited, cli.stderr)) == 2, 60.0)
        pages = {int(group): (url, token) for group, url, token in re.findall(invited, cli.stderr)}
        for group, (url, _) in pages.items():
            assert processes.until(lambda url=url: ask_page(url)[1].get("step", 0) > 3, 60.0)
            assert ask_page(url)[1]["group"] == group
        url, token = pages[1]
        browser.open(url)
        browser.until(lambda: "train.py · group 1 · 4 shards" in browser.text("#about"), "which group it is of")
        assert ask_page(url, "/press/stop", method="POST", Authorization=f"Bearer {token}")[0] == 200
        done = cli.wait()
    assert done.code == 75, done.stderr
    assert done.stderr.count("stopped by SIGTERM after step") == 2, "each after its step"
