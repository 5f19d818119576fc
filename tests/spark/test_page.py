"""The scripts of docs/spark.md run."""

import pytest

from guests import execute


@pytest.mark.parametrize(("number", "begins"), [(0, "True True\n"), (1, ""), (2, "True 200\n")])
def test_the_scripts_of_the_page_do_what_they_say(spark, number, begins):
    out = spark.call(execute, "spark.md", number)
    assert out.startswith(begins)
    assert "False" not in out
    assert "True" in out
