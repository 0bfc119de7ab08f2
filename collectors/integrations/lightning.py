"""The recorder as a callback of Lightning, in either of its namespaces.

    Trainer(callbacks=[StepsplitCallback("runs/exp1")])

A step is a batch at whose end trainer.global_step has grown, with the batches accumulated before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Unpack

from stepsplit.collectors.integrations.late_run import LateRun
from stepsplit.collectors.integrations.library import library
from stepsplit.collectors.integrations.lightning_facts import facts_of
from stepsplit.collectors.integrations.options import Options


def _callback() -> Any:
    """The Callback of the namespace that the script uses; it may use `lightning` by default."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if name in sys.modules:
            return sys.modules[name].Callback
    try:
        return library("lightning.pytorch", "lightning").Callback
    except ImportError as missing:
        try:
            return library("pytorch_lightning", "pytorch-lightning").Callback
        except ImportError:
            raise missing from None


class StepsplitCallback(_callback()):  # type: ignore[misc]
    """Records a fit into the folder `out`; the options are those of profile_run."""

    def __init__(self, out: str | Path, **options: Unpack[Options]) -> None:
        super().__init__()
        self._run = LateRun(out, **options)
        self._done = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins: the strategy has set up its groups, and the sanity check is over."""
        self._done = trainer.global_step
        self._run.begin(lambda: facts_of(trainer, pl_module))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a step where an optimizer has stepped in this batch."""
        if trainer.global_step != self._done:
            self._done = trainer.global_step
            self._run.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the recording."""
        self._run.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keeps what was recorded so far."""
        self._run.end(failed=True)
