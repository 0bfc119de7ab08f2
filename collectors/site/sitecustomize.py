"""Starts the agent: `stepsplit record` puts this folder first on PYTHONPATH.

It then runs the sitecustomize of the environment that it shadows. An error in here never reaches
the program.
"""

import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_COLLECTORS = _HERE.parent


def _start_agent() -> None:
    """Installs the agent when torch is imported; other processes load only this file."""
    text = os.environ.get("STEPSPLIT_PLAN")
    if not text:
        return

    def install() -> None:
        _make_importable()
        from stepsplit.collectors.attach.agent import Agent
        from stepsplit.collectors.record.plan import parse_plan

        Agent(parse_plan(text)).install()

    imports = _load_module("_stepsplit_imports", _COLLECTORS / "probes" / "imports.py")
    imports.when_imported("torch.optim.optimizer", install)


def _make_importable() -> None:
    """Makes stepsplit.collectors importable from this folder if stepsplit is not installed."""
    parent: Any = types.ModuleType("stepsplit")
    parent.__path__ = []
    if importlib.util.find_spec("stepsplit") is not None:
        # Installed; or an unrelated folder of that name, which has no collectors.
        if importlib.util.find_spec("stepsplit.collectors") is not None:
            return
        parent = importlib.import_module("stepsplit")
    sys.modules["stepsplit"] = parent
    places = [str(_COLLECTORS)]
    parent.collectors = _load_module("stepsplit.collectors", _COLLECTORS / "__init__.py", places)


def _load_module(name: str, file: Path, places: list[str] | None = None) -> Any:
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=places)
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _run_shadowed() -> None:
    """Runs the sitecustomize of the environment that this one shadows."""
    places = [place for place in sys.path if Path(place or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _start_agent()
except Exception as error:  # noqa: BLE001 - the program must start as it would without us
    sys.stderr.write(f"stepsplit: no agent in this process: {error}\n")
# If an attach runs this file in a running process, no sitecustomize was shadowed.
if __name__ == "sitecustomize":
    _run_shadowed()
