"""What an engine offers a group once a link of theirs has failed: pure but for what is logged.

An rdma link that could not be opened, or that ended while both processes live on, is not tried again between these two:
the next one is of the offers after it. A group that comes back, in another incarnation, is offered all of them.
"""

import logging
from dataclasses import replace

from infinilora.engine.lora.choose import Group
from infinilora.link.open import LinkSettings

logger = logging.getLogger(__name__)


class GroupOffers:
    """`_failed`: the incarnation with which a group's rdma link failed."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._failed: dict[str, str] = {}

    def to(self, group: Group) -> LinkSettings:
        """What a link to the group may be now."""
        has_failed = self._failed.get(group.name) == group.incarnation
        return replace(self._settings, rdma=None) if has_failed else self._settings

    def failed(self, group: Group, backend: str, reason: str) -> None:
        """A link over `backend` was chosen, and did not open or has ended. Ignored where rdma alone is offered."""
        has_other = self._settings.tcp_host is not None or self._settings.directory is not None
        if backend == "rdma" and has_other:
            self._failed[group.name] = group.incarnation
            extra = {"group": group.name, "group_incarnation": group.incarnation, "reason": reason}
            logger.warning("rdma link failed, the next one to this group goes another way", extra=extra)
