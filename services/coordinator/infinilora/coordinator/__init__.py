"""The coordinator: membership, heat, placement, leadership."""
