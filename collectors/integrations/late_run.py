"""A recording that begins within a framework's loop, where the job is known and not before."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar, Unpack

from stepsplit.collectors.guard import guarded
from stepsplit.collectors.integrations.options import Options
from stepsplit.collectors.mesh_like import MeshLike
from stepsplit.collectors.presence import job
from stepsplit.collectors.profiler import ProfiledRun, profile_run
from stepsplit.collectors.run_spec import ModelSpec, Training

_Spec = TypeVar("_Spec", ModelSpec, Training)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a framework knows of its own run; None is unknown."""

    mesh: MeshLike = None
    model: ModelSpec | None = None
    training: Training | None = None


class LateRun:
    """One recording: begin() in the running job, step() after each step, end().

    Raises ValueError at once for options that make no recording; after that it raises nothing. It
    records once: what trains again in the same process is left alone.
    """

    def __init__(self, out: str | Path, **options: Unpack[Options]) -> None:
        # Where the job changes its folder meanwhile, the files still go where the user meant.
        self._out, self._options = Path(out).absolute(), options
        self._run: ProfiledRun | None = profile_run(self._out, **options)
        self._began = False

    def begin(self, facts: Callable[[], Facts]) -> None:
        """Begins before the first step, with what the framework knows now."""
        if self._began:
            return
        self._began = True
        known = Facts()
        with guarded(job()[0], "what its framework knows of the run"):
            known = facts()
        with guarded(job()[0], "the recording"):
            self._run = profile_run(self._out, **_filled(self._options, known))
            self._run.start()
            atexit.register(self.end, failed=True)

    def step(self) -> None:
        """Ends a training step."""
        if self._began and self._run is not None:
            self._run.step()

    @contextmanager
    def around(self, facts: Callable[[], Facts]) -> Iterator[None]:
        """begin() and end() around what trains within."""
        self.begin(facts)
        try:
            yield
        except BaseException:
            self.end(failed=True)
            raise
        self.end()

    def end(self, failed: bool = False) -> None:
        """Ends the recording; failed: the training did, and no rank waits for another."""
        run, self._run = self._run, None
        atexit.unregister(self.end)
        if self._began and run is not None:
            run.stop(failed)


def _filled(options: Options, facts: Facts) -> Options:
    """The options, with what they leave open as the framework knows it."""
    filled = options.copy()
    if filled.get("mesh") is None:
        filled["mesh"] = facts.mesh
    filled["model"] = _merged(options.get("model"), facts.model)
    filled["training"] = _merged(options.get("training"), facts.training)
    return filled


def _merged(stated: _Spec | None, known: _Spec | None) -> _Spec | None:
    """The fields that the user stated, and for the others those that are known."""
    if stated is None or known is None:
        return stated or known
    return replace(known, **{k: v for k, v in asdict(stated).items() if v is not None})
