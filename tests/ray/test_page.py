"""The scripts of docs/ray.md run."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "ray.md"
SCRIPTS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def execute(cluster, number):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(SCRIPTS[number], str(PAGE), "exec"), {"__name__": "page"})
    return out.getvalue().splitlines()[-1]


@pytest.mark.parametrize(("number", "ends"), [(0, "True"), (1, "100")])
def test_the_scripts_of_the_page_do_what_they_say(ray, number, ends):
    assert ray.call(execute, number) == ends
