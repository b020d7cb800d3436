"""Run a command with limits on memory, processor time and file size: `python confine.py MB SECONDS CMD...`.

Run as a file of its own by the gateway, before the program that reads what a stranger has uploaded. It sets
the limits on itself and becomes the command, so nothing is done between fork and exec of a threaded process.
"""

import os
import resource
import sys


def confine(memory_mb: int, cpu_s: int, command: list[str]) -> None:
    """Set the limits and replace this process. Does not return."""
    memory = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.execv(command[0], command)  # noqa: S606 - the gateway composes the command


if __name__ == "__main__":
    confine(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
