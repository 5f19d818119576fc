"""The scripts of docs/ray.md run."""

import pytest

from guests import execute


@pytest.mark.parametrize(("number", "ends"), [(0, "True"), (1, "100")])
def test_the_scripts_of_the_page_do_what_they_say(ray, number, ends):
    assert ray.call(execute, "ray.md", number).splitlines()[-1] == ends
