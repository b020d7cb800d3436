"""LoRA kernels: one definition, a torch reference, a compiled CPU implementation, Triton."""
