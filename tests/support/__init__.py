"""Builders, real processes and what a machine must have, for the tests."""
