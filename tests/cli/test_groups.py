"""The options of groups and servers, together with others: what contradicts is one sentence."""

import argparse

import pytest

from evenstep.cli.groups import add_arguments, setup_of
from evenstep.core.errors import ConfigError


def options(*words, workers=None, resume=False, listen=None):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.set_defaults(workers=workers, resume=resume, listen=listen)
    return parser.parse_args(words)


def test_without_any_of_them_there_are_no_groups():
    assert setup_of(options(workers="4")) is None


def test_counts_and_names_make_a_setup():
    found = setup_of(options("--groups", "2", "--workers-per-group", "3"))
    assert (found.groups, found.workers, found.servers) == (2, 3, 1)
    assert setup_of(options("--framework", "allreduce", workers="2")).workers == 2


@pytest.mark.parametrize(
    ("words", "others", "message"),
    [
        (["--groups", "2"], {"workers": "4"}, "-n 4 with --groups or --workers-per-group: .* --workers-per-group"),
        (["--framework", "downpour"], {"workers": "4"}, "-n 4 with 2 groups: use --workers-per-group instead"),
        (["--servers", "1"], {"workers": "many"}, "'many' is not a number of workers; expected"),
        (["--servers", "1"], {"workers": "2", "resume": True}, "--resume with servers: .*; resume without servers"),
        (["--groups", "2"], {"listen": "10.0.0.1:7777"}, "--listen with --groups: groups run on one machine so far"),
    ],
)
def test_what_contradicts_is_one_sentence(words, others, message):
    with pytest.raises(ConfigError, match=message):
        setup_of(options(*words, **others))
