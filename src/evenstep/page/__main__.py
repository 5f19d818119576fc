"""`python -m evenstep.page SEGMENT_FD LISTENER_FD PID`: the page of a run that no supervisor looks after.

The first line of standard input is the token; when standard input ends, so has the run. Until someone looks, nothing is
imported that takes time.
"""

import os
import select
import socket
import sys

from evenstep.native import core


def main() -> int:
    """Wait until someone looks, then serve."""
    segment_fd, listener_fd, pid = map(int, sys.argv[1:])
    core.die_with_parent()
    if os.getppid() != pid:
        return 1
    token = b""
    while not token.endswith(b"\n"):  # not with sys.stdin, which would read ahead
        if not (more := os.read(0, 1)):
            return 0
        token += more
    listener = socket.socket(fileno=listener_fd)
    if 0 in select.select([0, listener_fd], [], [])[0]:
        return 0
    from evenstep.page.serving import serve  # imported here since it brings torch and a web server
    from evenstep.transport.segment import Segment

    return serve(Segment(segment_fd), pid, listener, token.decode().strip(), over=0)


if __name__ == "__main__":
    sys.exit(main())
