"""How long a step takes: kernels, what communication they cannot hide, bubble, optimizer."""
