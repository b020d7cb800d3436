"""What the command takes from its environment, beside options. The only file of this room that reads it."""

import os


def child_env(**more: str) -> dict[str, str]:
    """The environment of a child: this one's, and `more` over it."""
    # Keeps a checkout's kernels/ from passing for the PyPI package of that name.
    return {**os.environ, "PYTHONSAFEPATH": "1", **more}
