"""The definition of every op, in NumPy and float64. README.md holds the equations; the kernels follow this code."""
