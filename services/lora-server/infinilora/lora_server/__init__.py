"""The LoRA server: a shard of a group that holds adapters and computes deltas."""
