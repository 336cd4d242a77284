"""Apple GPUs by MLX: Metal kernels, and beside them the same ops in plain mx operations (``twin``)."""
