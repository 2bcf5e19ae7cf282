"""Short complete scripts on real data, one a method: `python -m examples.simclr` from the root of the sources."""
