"""The scripts of docs/spark.md run."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
SCRIPTS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def execute(session, number):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(SCRIPTS[number], str(PAGE), "exec"), {"__name__": "page"})
    return out.getvalue()


@pytest.mark.parametrize(("number", "begins"), [(0, "True True\n"), (1, ""), (2, "True 200\n")])
def test_the_scripts_of_the_page_do_what_they_say(spark, number, begins):
    out = spark.call(execute, number)
    assert out.startswith(begins)
    assert "False" not in out
    assert "True" in out
