"""What the step has to compute: parameters, FLOPs, and how well a step time uses the GPUs."""
