"""The `infinilora` command."""
