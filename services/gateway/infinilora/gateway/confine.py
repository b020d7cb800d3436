"""Run a command within limits, no longer than its parent lives: `python confine.py PARENT MB SECONDS CMD...`.

Run as a file of its own by the gateway, before the program that reads what a stranger has uploaded. It sets
the limits on itself and becomes the command, so nothing is done between fork and exec of a threaded process.
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def confine(parent: int, memory_mb: int, cpu_s: int, command: list[str]) -> None:
    """Set the limits and replace this process. Does not return.

    Limits memory, processor time and the size of files. A parent that is killed outright takes the process with it.
    """
    memory = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask to be told
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - the gateway composes the command


if __name__ == "__main__":
    confine(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
