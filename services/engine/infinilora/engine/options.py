"""How this engine holds its model, by its settings: for a whole engine, or for one shard of it."""

from infinilora.engine.assemble import ModelOptions
from infinilora.engine.settings import Settings


def model_options(settings: Settings, num_shards: int = 1) -> ModelOptions:
    """The threads are the engine's: its shards have equal parts of them."""
    return ModelOptions(
        directory=settings.model,
        served_name=settings.served_name,
        load_format=settings.load_format,
        device=settings.device,
        dtype=settings.dtype,
        threads=max(1, settings.threads // num_shards),
        kv_bytes=settings.kv_bytes,
        kv_block=settings.kv_block,
        max_model_len=settings.max_model_len,
        max_running=settings.max_running,
    )
