"""One simulated world that hosts the machines of the product, for seeds with faults and for replays of traces. Pure."""
