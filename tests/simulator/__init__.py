"""A causal simulator of training jobs: what truly happened, and the traces that tell of it."""
