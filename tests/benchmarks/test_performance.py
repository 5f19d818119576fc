"""The page of figures is what its generator makes of the records in the repository, and charts show what tables say."""

import argparse
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """Scripts import each other as neighbours."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def bars(text):
    return [
        (float(bar.get("x")), float(bar.get("x")) + float(bar.get("width")))
        for bar in ET.fromstring(text).iter(f"{SVG}rect")
    ]


def test_the_page_and_its_charts_are_what_the_records_say():
    import performance

    wanted = performance.pages(performance.WORDS.read_text(), performance.FOLDER)
    stale = [path for path, text in wanted.items() if (ROOT / "docs" / path).read_text() != text]
    assert not stale, "make performance"
    assert {path.name for path in (ROOT / "docs/charts").iterdir()} == {Path(p).name for p in wanted} - {
        "performance.md"
    }


def test_every_record_names_a_command_that_is_there_and_a_date_and_a_processor():
    import performance
    from results import Record

    for path in performance.FOLDER.glob("*.json"):
        record = Record.load(path)
        interpreter, script = record.command.split()[:2]
        assert interpreter == "python"
        assert "add_option(parser)" in (ROOT / script).read_text(), "it writes no JSON"
        assert record.date in performance.origin(record)
        assert {"GPU", "processor"} & set(record.machine)


def test_a_record_is_read_as_it_was_written(tmp_path, capsys, monkeypatch):
    import results

    monkeypatch.setattr("sys.argv", ["/some/where/engine.py", "--rounds", "1", "--json", "out.json"])
    record = results.Record.begin()
    assert record.command == "python benchmarks/engine.py --rounds 1"
    record.table(["what", "ratio"], results.shown(iter([("a", "0.5")])), values=["ratio"], labels=["what"], means="x")
    record.note("That is all.")
    record.save(tmp_path / "new" / "a.json")
    assert results.Record.load(tmp_path / "new" / "a.json") == record
    printed = capsys.readouterr()
    assert "| a    |   0.5 |" in printed.out
    assert "That is all." in printed.out
    assert printed.err == "a  0.5\n"


def test_json_is_an_option_in_either_spelling():
    import results

    parser = argparse.ArgumentParser()
    results.add_option(parser)
    assert parser.parse_args(["--json", "a"]).json == Path("a")
    assert results.command(["b.py", "--json=a", "--rows", "x y"]) == "python benchmarks/b.py --rows 'x y'"


def test_words_that_name_no_record_or_leave_one_out_are_refused(tmp_path):
    import performance

    with pytest.raises(ValueError, match=r"@none: there is no none\.json"):
        performance.pages("# Title\n@none\n", tmp_path)
    assert "Not measured yet: `make bench-none`" in performance.pages("@none?\n", tmp_path)["performance.md"]
    (tmp_path / "left.json").write_text((ROOT / "benchmarks/results/memory.json").read_text())
    with pytest.raises(ValueError, match="leaves out left; it needs a line @left"):
        performance.pages("# Title\n", tmp_path)


def test_bars_lie_on_both_sides_of_the_peer_by_their_logarithms():
    import charts
    from results import Chart, Table

    table = Table(
        ["what", "ratio", "goal"],
        [["half", "0.5", "1"], ["twice", "2.0", "-"], ["failed", "-", "-"], ["both", "0.5 / 4", "-"]],
    )
    (a, b), (c, d), (e, f), (g, h) = bars(charts.svg(table, Chart(["ratio"], ["what"], "x", goal="goal")))
    assert b == pytest.approx(c)
    assert (b - a, d - c) == pytest.approx(((b - a), (b - a)), abs=0.2)
    assert (f - e, h - g) == pytest.approx(((b - a), 2 * (b - a)), abs=0.2)


def test_bars_without_a_peer_begin_at_0():
    import charts
    from results import Chart, Table

    table = Table(["<what>", "s"], [["a & b", "0.5"], ["c", "1.0"]])
    text = charts.svg(table, Chart(["s"], ["<what>"], "seconds <s>", base=None))
    (a, b), (c, d) = bars(text)
    assert a == c
    assert d - c == pytest.approx(2 * (b - a), abs=0.2)
    with pytest.raises(ValueError, match="none of the columns s has a figure"):
        charts.svg(Table(["<what>", "s"], [["a", "-"]]), Chart(["s"], ["<what>"], ""))
