"""How a recording is written: by which NCCL, and what it leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Nccl = Literal["2.17", "2.27"]
Missing = Literal["cut_windows", "no_args", "lost_events", "no_steps"]


@dataclass(frozen=True, slots=True)
class Style:
    """How a recording is written; as it stands, nothing is missing.

    nccl: under 2.17 kernels have older names and no arguments, so that only record_param_comms
    around a launch tells of its call, without Seq. numbered: kernels of collectives state their
    Seq. descriptions: "none" leaves the groups without any, which torch calls undefined. run_json:
    run.json lies beside the traces.

    missing: "cut_windows" begins and ends each rank's recording 1 to 5 communication kernels late
    and early; "no_args" leaves out all that is said of calls and groups, the default group aside;
    "lost_events" lacks 2 % of the compute kernels with their launches; "no_steps" has no
    ProfilerStep.
    """

    nccl: Nccl = "2.27"
    numbered: bool = True
    descriptions: Literal["as_is", "none"] = "as_is"
    run_json: bool = True
    missing: Missing | None = None

    @property
    def states_seq(self) -> bool:
        """Whether the kernels of collectives state their number."""
        return self.numbered and self.kernels_have_args

    @property
    def kernels_have_args(self) -> bool:
        """Whether the kernels of calls say what they carry."""
        return self.nccl == "2.27" and self.missing != "no_args"


WHOLE = Style()
