"""Run a program that cannot outlive its parent: `python -I -S leash.py PARENT_PID PROGRAM ARGS...`.

The kernel is asked to kill this process when its parent dies, whatever way it dies; then the program takes
this process over and keeps the promise. A program of its own because nothing may run between fork and exec
of a process that has threads. Imports nothing of ours, and starts in about 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit("the parent is gone")
    try:
        os.execv(program[0], program)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.exit(f"{program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
