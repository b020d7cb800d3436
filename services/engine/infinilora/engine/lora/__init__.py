"""Where LoRA deltas come from: remote, local, or nowhere; one interface."""
