"""Metal kernels through MLX, and the same ops in plain MLX where Metal is absent."""
