"""A report says what differs: from the golden table, and from a report that was written elsewhere."""

import json
from dataclasses import replace

import pytest
import torch

from evenstep.arithmetic.probe import golden, probe
from evenstep.arithmetic.processor import Processor
from evenstep.cli import doctor
from evenstep.cli.main import main
from evenstep.core.errors import ConfigError
from evenstep.doctor.checks import Finding, Software
from evenstep.doctor.report import Diagnosis, read_report

SOFTWARE = Software(f"{golden().torch}+cpu", golden().torch, "2024.2", "3.12.0", "AVX2", "glibc 2.36", "Linux 6.1")
HERE = Diagnosis(
    "here",
    "portable",
    Processor("AuthenticAMD", "AMD EPYC", "family 25, model 17", ("avx2", "fma")),
    SOFTWARE,
    {"MKL_CBWR": "COMPATIBLE"},
    [Finding("kernel", "ok", "6.1"), Finding("load", "note", "9.0", "wait")],
    dict(golden().operations),
)
OTHER = {**golden().operations, "exp": "0" * 12, "lstm": "1" * 12}


def test_a_machine_as_golden_as_the_table_is_healthy():
    assert HERE.differ == []
    assert HERE.healthy
    text = "\n".join(HERE.lines())
    assert f"all {len(HERE.operations)} operations have the bits of the golden table" in text
    assert "note  load           9.0" in text
    assert "-> wait" in text


def test_operations_that_differ_from_the_table_are_named():
    ill = replace(HERE, operations=OTHER)
    assert ill.differ == ["exp", "lstm"]
    assert not ill.healthy
    assert list(ill.lines())[-1].endswith("differ from the golden table: exp, lstm")


@pytest.mark.parametrize(
    "changes", [{"arithmetic": "native"}, {"software": replace(SOFTWARE, torch="9.9.0")}, {"operations": {}}]
)
def test_where_the_table_says_nothing_nothing_is_claimed(changes):
    report = replace(HERE, **changes)
    assert report.differ is None
    assert report.healthy
    assert "the golden table is for portable arithmetic" in list(report.lines())[-1]


def test_what_makes_runs_fail_is_unhealthy():
    assert not replace(HERE, findings=[Finding("kernel", "bad", "4.1", "upgrade")]).healthy


def test_a_report_survives_being_written(tmp_path):
    path = tmp_path / "there.json"
    path.write_text(HERE.to_json())
    assert json.loads(path.read_text())["differ"] == []
    assert read_report(path) == HERE


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"differ": [], "processor": {}}'])
def test_a_file_that_is_no_report_is_refused_with_the_way_to_make_one(tmp_path, text):
    path = tmp_path / "there.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"is not a machine's report .* `evenstep doctor --json > there.json`"):
        read_report(path)


def test_two_machines_are_compared_by_facts_and_operations(capsys):
    there = replace(
        HERE,
        host="there",
        processor=Processor("GenuineIntel", "Xeon", "family 6, model 207", ("avx2",)),
        operations=OTHER,
    )
    assert doctor._compare(HERE, there) == 1
    lines = capsys.readouterr().out.splitlines()
    mine = "AMD EPYC (AuthenticAMD, family 25, model 17, avx2 fma)"
    assert lines[0] == f"processor: {mine} here, Xeon (GenuineIntel, family 6, model 207, avx2) there"
    assert lines[1] == f"2 of {len(OTHER)} operations differ from there: exp, lstm"
    assert doctor._compare(HERE, replace(HERE, host="there")) == 0
    assert capsys.readouterr().out == f"all {len(OTHER)} operations are as on there\n"


def test_what_only_one_machine_computed_is_not_called_equal(capsys):
    fewer = {name: digest for name, digest in HERE.operations.items() if name not in ("exp", "lstm")}
    assert doctor._compare(HERE, replace(HERE, host="there", operations=fewer)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 operations were computed on one of the two only")
    assert lines[1] == f"all {len(fewer)} operations are as on there"
    assert doctor._compare(HERE, replace(HERE, host="there", operations={})) == 1
    assert "all" not in capsys.readouterr().out


def test_another_arithmetic_there_is_pointed_out(capsys):
    doctor._compare(HERE, replace(HERE, arithmetic="native"))
    assert "use --arithmetic native, as there" in capsys.readouterr().out


def test_the_command_checks_its_file_before_it_computes_anything(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("EVENSTEP_ARITHMETIC", "native")
    assert main(["doctor", "--arithmetic", "native", "--compare", str(tmp_path / "none.json")]) == 2
    assert "is not a machine's report" in capsys.readouterr().err


def test_the_probe_leaves_torch_as_it_was():
    torch.manual_seed(3)
    before = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    found = probe(["exp", "randn", "adamw"])
    assert list(found) == ["exp", "adamw", "randn"]
    assert all(len(digest) == 12 for digest in found.values())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == before[1:]


def test_the_probe_notes_what_torch_cannot_compute(monkeypatch):
    monkeypatch.setattr("evenstep.arithmetic.probe.cases", lambda: [("odd", lambda: torch.ones(2) @ torch.ones(3))])
    assert probe()["odd"].startswith("error: inconsistent tensor size")
