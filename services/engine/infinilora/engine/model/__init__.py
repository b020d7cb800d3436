"""The decoder: a description of the architecture, its weights, and one forward pass over a mixed batch."""
