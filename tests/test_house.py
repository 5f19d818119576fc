"""The house rules that a script can check: one name for one class, and a test for each module of the core packages."""

import re
from collections import defaultdict
from pathlib import Path

from untested import PACKAGES, untested

SOURCE = Path(__file__).parents[1] / "src" / "evenstep"


def test_no_two_classes_have_the_same_name():
    places = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in re.findall(r"^ *class (\w+)", path.read_text(), re.MULTILINE):
            places[name].append(str(path.relative_to(SOURCE)))
    assert {name: there for name, there in places.items() if len(there) > 1} == {}


def test_every_module_of_the_core_packages_has_a_test_of_its_name():
    assert {package: found for package in PACKAGES if (found := untested(package))} == {}


def test_a_module_without_a_test_would_be_found(tmp_path, monkeypatch):
    (tmp_path / "src" / "plan").mkdir(parents=True)
    (tmp_path / "src" / "plan" / "tree.py").touch()
    (tmp_path / "src" / "plan" / "new.py").touch()
    (tmp_path / "tests" / "plan").mkdir(parents=True)
    (tmp_path / "tests" / "plan" / "test_tree.py").touch()
    monkeypatch.setattr("untested.SOURCE", tmp_path / "src")
    monkeypatch.setattr("untested.TESTS", tmp_path / "tests")
    assert untested("plan") == ["plan/new.py"]
