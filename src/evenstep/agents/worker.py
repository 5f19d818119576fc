"""The script of workers on a cluster: runs the work that the process which forked them holds."""

from evenstep.agents.work import perform
from evenstep.core import env

__tracebackhide__ = True

if __name__ == "__main__":
    perform(env.read().worker)
