"""The benchmarks behind every figure in the documentation; one file each."""
