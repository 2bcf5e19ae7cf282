"""Short complete scripts on real data, one per method: `python -m examples.simclr` from the root of the sources."""
