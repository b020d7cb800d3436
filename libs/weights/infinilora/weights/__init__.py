"""Adapter files: PEFT rules, the packed file, checks. No torch."""
