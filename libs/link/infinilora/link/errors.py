"""What can go wrong on a link, as leaves under `InfiniLoraError`.

Unavailable
└── LinkError
    ├── LinkClosed     the peer is gone, or one end was closed
    ├── LinkTimeout    the peer did not answer by the deadline: quarantine the link
    ├── LinkNotOpened  what was agreed on could not be opened: `backend` says what
    └── LinkRefused    the peer answered with an error, kept as `refusal`
"""

from infinilora.protocol.errors import Unavailable, WireError


class LinkError(Unavailable):
    """The delta will not come over this link; the rows that need it must be run again."""


class LinkClosed(LinkError):
    """The other end closed or died, or this end was closed."""


class LinkTimeout(LinkError):
    """The deadline passed. The peer may still write: the pair must be quarantined, never reused."""


class LinkNotOpened(LinkError):
    """The server chose a back-end, and no link came of it."""

    def __init__(self, backend: str, message: str) -> None:
        super().__init__(message)
        self.backend = backend


class LinkRefused(LinkError):
    """The server answered a site call with an error. The link itself is sound."""

    def __init__(self, refusal: WireError) -> None:
        super().__init__(f"the LoRA server refused a site call: {refusal.code}: {refusal.message}")
        self.refusal = refusal
