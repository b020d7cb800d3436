"""What an engine offers a group once a link of theirs has failed: pure but for what is logged.

An rdma link that could not be opened, or that ended while both processes live on, is not tried again between these two:
the next one is of the offers after it. So is a cuda link that could not be opened; one that was open and ended is: the
memory was shared, and what ends it is a deadline. A group that comes back, in another incarnation, is offered all.
"""

import logging
from dataclasses import replace

from infinilora.engine.lora.choose import Group
from infinilora.link.open import LinkSettings

logger = logging.getLogger(__name__)


class GroupOffers:
    """`_failed`: (group, back-end) -> the incarnation with which that link failed."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._failed: dict[tuple[str, str], str] = {}

    def to(self, group: Group) -> LinkSettings:
        """What a link to the group may be now."""
        settings = self._settings
        if self._failed.get((group.name, "rdma")) == group.incarnation:
            settings = replace(settings, rdma=None)
        if self._failed.get((group.name, "cuda")) == group.incarnation:
            settings = replace(settings, cuda=None)
        return settings

    def failed(self, group: Group, backend: str, reason: str, *, was_open: bool = False) -> None:
        """A link over `backend` was chosen, and did not open or has ended. Ignored where nothing else is offered."""
        has_other = self._settings.tcp_host is not None or self._settings.directory is not None
        if has_other and (backend == "rdma" or (backend == "cuda" and not was_open)):
            self._failed[group.name, backend] = group.incarnation
            extra = {"group": group.name, "backend": backend, "group_incarnation": group.incarnation}
            logger.warning("link failed, the next one to this group goes another way", extra=extra | {"reason": reason})
