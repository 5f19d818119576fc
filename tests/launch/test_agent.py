"""How a machine comes to a run, with a head that is played here; `test_machines.py` has the real one."""

import socket
from contextlib import closing

import pytest

from evenstep.core.errors import ConfigError, UnreachableError
from evenstep.launch.agent import _connect, _job, _take_part, join
from evenstep.launch.connection import Lost, MachineConnection
from evenstep.launch.door import PROTOCOL, proof_of


@pytest.fixture
def ends():
    """The connection of a machine, and the head's end of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = _connect(server.getsockname(), None, 30.0)
        head = MachineConnection(server.accept()[0])
    with closing(mine), closing(head):
        yield mine, head


def test_where_nobody_listens_the_command_that_would_is_named():
    with socket.socket() as taken:  # and not listening: so nobody else does either
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(UnreachableError, match=rf"no head .*`evenstep run --listen 127.0.0.1:{port} SCRIPT`"):
            _connect(("127.0.0.1", port), None, 0.0)


def test_an_address_that_is_none_and_a_file_that_is_no_certificate_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        join("somewhere", 1)
    with pytest.raises(ConfigError, match=r"--cafile .* cannot be used"):
        join("127.0.0.1:1", 1, cafile=tmp_path / "none")


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ([{"protocol": 99}], f"the head speaks protocol 99, expected {PROTOCOL}"),
        ([{"protocol": PROTOCOL, "nonce": "n"}, {"refused": "no room"}], "the head refuses this machine: no room"),
        ([{"protocol": PROTOCOL, "nonce": "n"}, {"proof": "guess"}], "does not know the token, so it is not the head"),
    ],
)
def test_a_head_that_refuses_or_is_none_is_a_sentence(ends, said, sentence):
    mine, head = ends
    for message in said:
        head.send(message)
    with pytest.raises(ConfigError, match=sentence):
        _take_part(mine, 1, "secret")


def test_the_token_is_proved_and_never_sent(ends):
    mine, head = ends
    head.send({"protocol": PROTOCOL, "nonce": "n"})
    head.send({"refused": "not today"})
    with pytest.raises(ConfigError):
        _take_part(mine, 1, "secret")
    answer, _ = head.wait(30.0)
    assert answer["proof"] == proof_of("secret", "join", "n")
    assert "secret" not in str(answer)


def test_a_head_that_hangs_up_is_lost(ends):
    mine, head = ends
    head.close()
    with pytest.raises(Lost, match="is lost"):
        _take_part(mine, 1, "")


def test_a_job_is_the_heads_but_for_the_number_of_workers():
    said = {"script": "train.py", "is_module": False, "args": ["--fast"], "shards": 8, "step_timeout_s": 3.0}
    job = _job({**said, "resume": True, "recheck": None, "tolerate_wrong": 0}, 5)
    assert (str(job.script), job.args, job.num_workers, job.shards) == ("train.py", ("--fast",), 5, 8)
    assert (job.step_timeout_s, job.resume) == (3.0, True)
