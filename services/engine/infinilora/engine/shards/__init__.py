"""One engine as several processes: the head tells the others what to run (docs/decisions/0008)."""
