"""The end of a run: one fingerprint, shown once, unless the run is quiet."""

import pytest

import evenstep


@pytest.mark.parametrize("quiet", [True, False])
def test_the_fingerprint_is_shown_once_unless_the_run_is_quiet(capsys, quiet):
    with evenstep.Run(quiet=quiet, progress=False) as run:
        expected = run.fingerprint()
    run.close()
    assert capsys.readouterr().out == ("" if quiet else f"fingerprint {expected}\n")


def test_a_run_that_fails_shows_none(capsys):
    with pytest.raises(ZeroDivisionError), evenstep.Run(progress=False):
        1 / 0  # noqa: B018  # it is the error that matters
    assert capsys.readouterr().out == ""
