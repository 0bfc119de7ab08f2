"""Compiles the scanner of traces too if STEPSPLIT_COMPILE=1; all else is in pyproject.toml.

Without it, and without a compiler, the package is pure Python with the same results.
"""

import os

from setuptools import Extension, setup

SCANNER = Extension(
    "stepsplit.analyzer.readers.kineto.event_scanner",
    ["analyzer/readers/kineto/event_scanner.c"],
    optional=True,
)

setup(ext_modules=[SCANNER] if os.environ.get("STEPSPLIT_COMPILE") == "1" else [])
