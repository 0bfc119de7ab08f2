"""Found by Python at its start where `stepsplit record` has put this folder first: the agent.

Then runs the sitecustomize that it stands before. Nothing that goes wrong here reaches the program.
"""

import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


def _start_agent() -> None:
    text = os.environ.get("STEPSPLIT_PLAN")
    if not text:
        return
    _make_importable()
    from stepsplit.collectors.control.imports import when_imported

    def install() -> None:
        from stepsplit.collectors.control.agent import Agent
        from stepsplit.collectors.plan import plan

        Agent(plan(text)).install()

    when_imported("torch.optim.optimizer", install)


def _make_importable() -> None:
    """The collectors work where stepsplit is not installed: by where this file lies."""
    if importlib.util.find_spec("stepsplit") is not None:
        return
    folder = _HERE.parent
    parent: Any = types.ModuleType("stepsplit")
    parent.__path__ = []
    sys.modules["stepsplit"] = parent
    spec = importlib.util.spec_from_file_location(
        "stepsplit.collectors",
        folder / "__init__.py",
        submodule_search_locations=[str(folder)],
    )
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["stepsplit.collectors"] = parent.collectors = module
    spec.loader.exec_module(module)


def _run_shadowed() -> None:
    """The sitecustomize of the environment, which this one has hidden."""
    places = [place for place in sys.path if Path(place or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


try:
    _start_agent()
except Exception as error:  # noqa: BLE001 - the program must start as it would without us
    sys.stderr.write(f"stepsplit: no agent in this process: {error}\n")
# Where an attach runs this file in a process that is long under way, nothing was shadowed.
if __name__ == "sitecustomize":
    _run_shadowed()
