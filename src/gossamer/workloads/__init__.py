"""Floor 1: real models on real data, small enough for two cores."""
