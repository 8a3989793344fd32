"""Device building blocks of kernels and emitted formulas."""
