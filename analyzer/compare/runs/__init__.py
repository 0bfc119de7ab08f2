"""One run against another: the candidate less the baseline."""
