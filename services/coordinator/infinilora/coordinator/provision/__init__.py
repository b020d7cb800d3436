"""How large the LoRA tier must be: pure arithmetic over popularity, sizes and speeds. The planner runs it too."""
