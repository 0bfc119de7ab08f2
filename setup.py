"""Compiles the scanner of traces too if STEPSPLIT_COMPILE=1; all else is in pyproject.toml.

Without it, and without a compiler, the package is pure Python with the same results.
"""

import os
import sys

from setuptools import Extension, setup

SCANNER = Extension(
    "stepsplit.analyzer.readers.kineto.event_scanner",
    ["analyzer/readers/kineto/event_scanner.c"],
    # One binary for Python 3.11 and all later ones: buffers are in its stable interface since then.
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    optional=True,
)

if os.environ.get("STEPSPLIT_COMPILE") == "1":
    made = setup(ext_modules=[SCANNER], options={"bdist_wheel": {"py_limited_api": "cp311"}})
    if made.have_run.get("build_ext"):
        outputs = made.get_command_obj("build_ext").get_outputs()
        if not all(map(os.path.exists, outputs)):
            sys.stderr.write("STEPSPLIT_COMPILE=1: not compiled; without the scanner of traces\n")
else:
    setup()
