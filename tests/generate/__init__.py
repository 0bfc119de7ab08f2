"""Writes the files that are generated: run each from tests/, as `python -m generate.docs_api`."""
