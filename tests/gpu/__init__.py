"""Checks on a real GPU: python -m pytest -m gpu tests/gpu prints one line for each."""
