"""The base engine: LoRA-free weights, KV cache, one scheduler, one step at a time."""
