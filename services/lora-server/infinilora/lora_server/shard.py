"""What a process of a group is made of: its settings, its base, and its share of every adapter."""

import logging

from infinilora.kernels.slot_kernels import SlotKernels
from infinilora.link.widest import least_buffer_bytes
from infinilora.lora_server.settings import Settings
from infinilora.lora_server.shards import GroupFacts
from infinilora.pool.device import Device, HostDevice
from infinilora.pool.pool import PoolConfig
from infinilora.pool.share import Share
from infinilora.pool.tenancy import Limits
from infinilora.protocol.adapter import BaseCard, Site
from infinilora.protocol.errors import InvalidRequest
from infinilora.protocol.shards import Shape, Sharding

logger = logging.getLogger(__name__)

NARROWEST_BYTES = 2
"""Of a number of activations."""


class Shard:
    """One shard of a group of one base. `share` is None where the group is this process alone: it holds everything."""

    def __init__(self, settings: Settings, card: BaseCard, device: Device | None = None) -> None:
        """`device`: what the settings name. InvalidRequest for a shape, or link buffers, that do not fit the base."""
        self.settings = settings
        self.device = device or HostDevice()
        self.card = card
        self.sharding = Sharding(Shape.parse(settings.shape), card.num_layers, card.sites)
        self.share = Share.of_group(self.sharding, settings.shard) if self.sharding.shape.num_shards > 1 else None
        _check_buffers(settings, card)

    def owns(self, layer: int, site: int) -> bool:
        """Whether this shard computes any of a site."""
        return self.sharding.owns(self.settings.shard, layer, site)

    @property
    def facts(self) -> GroupFacts:
        settings, shape = self.settings, self.sharding.shape
        return GroupFacts(settings.group, self.card.fingerprint, shape, settings.pool_bytes, settings.slots)

    def kernels(self) -> SlotKernels:
        """For this share: native code declines what is another shard's, so that it is refused in words."""
        settings, num_layers = self.settings, self.card.num_layers + 1
        kernels = SlotKernels(
            num_slots=settings.slots, num_layers=num_layers, device=self.device.torch_device, threads=settings.threads
        )
        if self.share:
            for layer in range(num_layers):
                for site in Site:
                    if not self.owns(layer, site):
                        kernels.leave_to_python(layer, site)
        return kernels

    def pool_config(self) -> PoolConfig:
        settings, card = self.settings, self.card
        logger.info(
            "pool",
            extra={
                "base": card.name,
                "fingerprint": card.fingerprint,
                "device": str(self.device.torch_device),
                "pool_bytes": settings.pool_bytes,
                "num_slots": settings.slots,
                "slots_from": "setting" if settings.num_slots else "pool_bytes",
                "cache_dir": str(settings.cache),
            },
        )
        return PoolConfig(
            base=card.fingerprint,
            num_layers=card.num_layers,
            capacity_bytes=settings.pool_bytes,
            num_slots=settings.slots,
            cache_dir=settings.cache,
            cache_bytes=settings.cache_bytes,
            host_bytes=settings.host_bytes,
            loader_threads=settings.loader_threads,
            fetch_threads=settings.fetch_threads,
            load_share=settings.load_share,
            device=self.device,
            retry_s=settings.load_retry_s,
            limits=Limits(settings.max_bypass, settings.age_after_s, settings.max_wait_s),
            share=self.share,
        )


def _check_buffers(settings: Settings, card: BaseCard) -> None:
    """For the narrowest activations; an engine whose own are wider sees to it again as it opens a link."""
    found, wanted = settings.link_buffer_bytes, least_buffer_bytes(card.sites, width=NARROWEST_BYTES)
    if found < wanted:
        raise InvalidRequest(
            f"INFINILORA_LINK_BUFFER_BYTES is {found}; one row of the widest site of base {card.name} takes {wanted}, "
            f"and twice that in fp32"
        )
