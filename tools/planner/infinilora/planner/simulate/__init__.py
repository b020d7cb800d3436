"""A fleet in virtual time: the services' own policies over cost models, docs/decisions/0011-simulator.md."""
