"""Damage, mutations and planted bugs: what the tests do to files and to the code."""
