"""Measured minus predicted, and what explains it."""
