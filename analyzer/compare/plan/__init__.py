"""Which layout a job should take: a search over all that fit, ranked by the model."""
