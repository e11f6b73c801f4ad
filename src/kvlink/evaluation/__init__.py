"""How good, how fast: benchmarks and the files that hold their results."""
