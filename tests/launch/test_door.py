"""Who is let in by a head: whoever knows the token and is alike; anybody else hears why not."""

import socket
import ssl
import time
from contextlib import closing
from pathlib import Path

import pytest

import certificates
from evenstep.core.errors import ConfigError
from evenstep.launch.connection import Lost, MachineConnection
from evenstep.launch.door import PROTOCOL, HeadDoor, Listen, is_loopback, proof_of, read_token, split_address
from evenstep.launch.likeness import difference, likeness


class Host:
    """A head that lets in whoever calls itself so."""

    def __init__(self):
        self.admitted, self.said = [], []

    def job(self):
        return {"script": "train.py"}

    def admit(self, connection, said):
        if said.get("name") != "good":
            return "it is not good"
        self.admitted.append(connection)
        connection.send({"welcome": 1})
        return None


@pytest.fixture
def host():
    host = Host()
    yield host
    for connection in host.admitted:
        connection.close()


def talk(door, connection, message=None, *, proof=None):
    """Say something, let the door have its turns, and return the answer."""
    if message is not None:
        connection.send(message)
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        door.accept()
        door.turn(time.monotonic())
        if found := connection.receive():
            return found[0][0]
    raise AssertionError("no answer")


def knock(door):
    return MachineConnection(socket.create_connection(("127.0.0.1", door.port)))


def test_a_machine_that_knows_the_token_and_is_alike_is_let_in(host):
    with (
        closing(HeadDoor(Listen("127.0.0.1", token="secret"), host, host.said.append)) as door,
        closing(knock(door)) as machine,
    ):
        nonce = talk(door, machine)["nonce"]
        mine = {"protocol": PROTOCOL, "proof": proof_of("secret", "join", nonce), "nonce": "n"}
        answer = talk(door, machine, mine)
        assert answer == {"proof": proof_of("secret", "head", "n"), "job": {"script": "train.py"}}
        assert talk(door, machine, {"name": "good"}) == {"welcome": 1}
    assert len(host.admitted) == 1
    assert host.said == []


@pytest.mark.parametrize(
    ("mine", "why"),
    [
        ({"protocol": PROTOCOL, "proof": proof_of("guess", "join", "?"), "nonce": "n"}, "does not know the token"),
        ({"protocol": 99}, "does not speak protocol"),
        ({"protocol": PROTOCOL, "proof": "é", "nonce": "n"}, "does not know the token"),
    ],
)
def test_a_machine_that_does_not_is_refused_with_a_sentence(host, mine, why):
    with (
        closing(HeadDoor(Listen("127.0.0.1", token="secret"), host, host.said.append)) as door,
        closing(knock(door)) as machine,
    ):
        talk(door, machine)
        assert why in talk(door, machine, mine)["refused"]
        with pytest.raises(Lost):
            machine.wait(30.0)
    assert "was refused" in host.said[0]


def test_a_machine_that_is_not_alike_hears_what_differs(host):
    with closing(HeadDoor(Listen("127.0.0.1"), host, host.said.append)) as door, closing(knock(door)) as machine:
        nonce = talk(door, machine)["nonce"]
        talk(door, machine, {"protocol": PROTOCOL, "proof": proof_of("", "join", nonce), "nonce": "n"})
        assert talk(door, machine, {"name": "bad"}) == {"refused": "it is not good"}


def test_a_stranger_that_says_nothing_or_nonsense_holds_up_nobody(host):
    with (
        closing(HeadDoor(Listen("127.0.0.1"), host, host.said.append)) as door,
        closing(knock(door)),
        closing(knock(door)) as loud,
        closing(knock(door)) as machine,
    ):
        loud._socket.send(b"x" * 100000)
        nonce = talk(door, machine)["nonce"]
        answer = talk(door, machine, {"protocol": PROTOCOL, "proof": proof_of("", "join", nonce), "nonce": "n"})
        assert "job" in answer
        door.turn(time.monotonic() + 60.0)
        assert door._arriving == []


def test_an_address_that_others_can_reach_needs_a_token(host):
    with pytest.raises(ConfigError, match=r"--listen 0.0.0.0:0 can be reached from other machines.*--token-file"):
        HeadDoor(Listen("0.0.0.0"), host, host.said.append)
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")


def test_an_address_in_use_and_a_certificate_that_is_none_are_named(host, tmp_path):
    with (
        closing(HeadDoor(Listen("127.0.0.1"), host, host.said.append)) as door,
        pytest.raises(ConfigError, match="Address already in use; name a free address"),
    ):
        HeadDoor(Listen("127.0.0.1", door.port), host, host.said.append)
    (tmp_path / "cert").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"--certfile .* cannot be used"):
        HeadDoor(Listen("127.0.0.1", certfile=tmp_path / "cert"), host, host.said.append)


def test_with_a_certificate_the_connection_is_tls_and_others_get_nowhere(host, tmp_path):
    certfile, keyfile = certificates.make(tmp_path)
    listen = Listen("127.0.0.1", certfile=Path(certfile), keyfile=Path(keyfile))
    context = ssl.create_default_context(cafile=certfile)
    with closing(HeadDoor(listen, host, host.said.append)) as door, closing(knock(door)) as plain:
        plain.send({"protocol": PROTOCOL, "proof": "", "nonce": ""})
        sock = socket.create_connection(("127.0.0.1", door.port))
        with closing(MachineConnection(sock, context, host="localhost")) as machine:
            machine.flush()
            nonce = talk(door, machine)["nonce"]
            mine = {"protocol": PROTOCOL, "proof": proof_of("", "join", nonce), "nonce": "n"}
            assert "job" in talk(door, machine, mine)
            assert isinstance(machine._socket, ssl.SSLSocket)
        with pytest.raises(Lost):
            talk(door, plain)
    stranger = ssl.create_default_context()
    with closing(HeadDoor(listen, host, host.said.append)) as door:
        sock = socket.create_connection(("127.0.0.1", door.port))
        with (
            closing(MachineConnection(sock, stranger, host="localhost")) as machine,
            pytest.raises(Lost, match="certificate"),
        ):
            talk(door, machine)


def test_addresses_and_token_files_are_read_or_refused(tmp_path):
    assert split_address("10.0.0.1:7777", "--listen") == ("10.0.0.1", 7777)
    assert split_address("[::1]:7777", "--listen") == ("::1", 7777)
    for text in ("10.0.0.1", ":7777", "host:port", "host:99999"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            split_address(text, "--listen")
    assert read_token(None) == ""
    (tmp_path / "token").write_text("secret\n")
    assert read_token(tmp_path / "token") == "secret"
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_token(tmp_path / "token")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")


def test_what_differs_between_machines_is_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    ours = likeness(script, 8)
    assert difference(likeness(script, 8), ours) is None
    script.write_text("print(2)")
    assert "script" in (difference(likeness(script, 8), ours) or "")
    assert difference({**ours, "torch": "0.1"}, ours) == f"torch is 0.1 there, but {ours['torch']} on the head"
    assert "number of shards is 4 there, but 8 on the head" in (difference({**ours, "number of shards": 4}, ours) or "")
    with pytest.raises(ConfigError, match="it must be on every machine"):
        likeness(tmp_path / "elsewhere.py", 8)
    with pytest.raises(ConfigError, match="the head runs the module no_such_module, which this machine does not have"):
        likeness("no_such_module", 8)
    assert likeness("json.tool", 8)
