"""Run a command within limits, no longer than its parent lives: `python confine.py PARENT MB SECONDS FILES_MB CMD...`.

Run as a file of its own by the gateway, before the program that reads what a stranger has uploaded. It sets
the limits on itself and becomes the command, so nothing is done between fork and exec of a threaded process.
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
_MAPS = 4
"""Files of the largest size that may be mapped at once."""


def confine(parent: int, memory_mb: int, cpu_s: int, files_mb: int, command: list[str]) -> None:
    """Set the limits and replace this process. Does not return.

    Limits memory, processor time and the size of any file. A parent that is killed outright takes the process with it.
    Files that are mapped for reading need address space and no memory, so the two are limited apart.
    """
    memory, file = memory_mb << 20, files_mb << 20
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_AS, (memory + _MAPS * file,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file, file))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask to be told
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - the gateway composes the command


if __name__ == "__main__":
    parent, memory_mb, cpu_s, files_mb = map(int, sys.argv[1:5])
    confine(parent, memory_mb, cpu_s, files_mb, sys.argv[5:])
