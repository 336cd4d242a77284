"""Every op in plain mx operations: what runs where Metal is absent, and what the Metal kernels are compared with."""
