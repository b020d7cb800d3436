"""Which tokens of which sequences run in the next step: pure policy, without tensors, clock or I/O."""
