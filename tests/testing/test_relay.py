"""Links between namespaces that are slow to deliver, lose packets, or do not lead everywhere."""

import sys

import pytest

from namespaces import Namespaces, needs_relay

pytestmark = pytest.mark.long

ASK = """
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(float(sys.argv[3]))
begin, heard = time.monotonic(), 0
for _ in range(int(sys.argv[2])):
    sock.sendto(b"?", (sys.argv[1], 7))
for _ in range(int(sys.argv[2])):
    try:
        heard += len(sock.recv(1))
    except TimeoutError:
        break
print(heard, time.monotonic() - begin)
"""
ANSWER = """
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
sock.bind(("", 7))
print("ready", flush=True)
while True:
    sock.sendto(*sock.recvfrom(1))
"""


def ask(network, machine, other, count=1, wait_s=5.0):
    """How many of so many questions are answered, and how long all of that takes."""
    words = (network.addresses[other], str(count), str(wait_s))
    out, _ = network.start(machine, sys.executable, "-c", ASK, *words).communicate()
    heard, seconds = out.split()
    return int(heard), float(seconds)


def answering(network, machine):
    assert network.start(machine, sys.executable, "-c", ANSWER).stdout.readline() == "ready\n"


@needs_relay
def test_everything_takes_its_time_in_both_directions_and_machines_can_be_parted():
    with Namespaces(3, delay_s=0.1) as network:
        answering(network, 1)
        ask(network, 0, 1)  # who asks first asks for the way as well
        heard, seconds = ask(network, 0, 1)
        assert heard == 1
        assert 0.2 <= seconds < 4.0
        assert ask(network, 2, 1)[0] == 1
        network.part(1, 2)
        assert ask(network, 2, 1, wait_s=1.0)[0] == 0
        assert ask(network, 0, 1)[0] == 1
        network.mend(1)
        assert ask(network, 2, 1)[0] == 1


@needs_relay
def test_a_part_of_the_packets_is_lost():
    with Namespaces(2, loss=0.2) as network:
        answering(network, 1)
        assert any(ask(network, 0, 1, 5, wait_s=1.0)[0] for _ in range(10))  # the way is known then
        heard, _ = ask(network, 0, 1, 400, wait_s=3.0)
        assert 0.5 < heard / 400 < 0.78, "0.64 get through both ways"
