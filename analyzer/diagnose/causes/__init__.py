"""Why steps take as long as they do: one module a cause, listed here.

Each cause finds its traces in a recording and says what a step would take without it, by a replay
of the dependency graph. cause.py says what an entry has.
"""

from stepsplit.analyzer.diagnose.causes.below_limit import BELOW_LIMIT
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry
from stepsplit.analyzer.diagnose.causes.compile_time import COMPILE_TIME
from stepsplit.analyzer.diagnose.causes.extra_reductions import EXTRA_REDUCTIONS
from stepsplit.analyzer.diagnose.causes.few_microbatches import FEW_MICROBATCHES
from stepsplit.analyzer.diagnose.causes.find_unused import FIND_UNUSED
from stepsplit.analyzer.diagnose.causes.host_bound import HOST_BOUND
from stepsplit.analyzer.diagnose.causes.host_idle import (
    ALLOCATION,
    DATA_LOADING,
    GC_PAUSE,
    HOST_SYNC,
)
from stepsplit.analyzer.diagnose.causes.late_rank import HOST_STALL, SLOW_COPY
from stepsplit.analyzer.diagnose.causes.launch_order import LAUNCH_ORDER
from stepsplit.analyzer.diagnose.causes.load_imbalance import UNEVEN_RANKS, UNEVEN_STAGES
from stepsplit.analyzer.diagnose.causes.lost_overlap import LOST_OVERLAP
from stepsplit.analyzer.diagnose.causes.other_steps import OTHER_STEPS
from stepsplit.analyzer.diagnose.causes.redundant_gathers import REDUNDANT_GATHERS
from stepsplit.analyzer.diagnose.causes.slow_gemms import FP32_GEMMS, UNALIGNED_GEMMS
from stepsplit.analyzer.diagnose.causes.slow_link import SLOW_LINK
from stepsplit.analyzer.diagnose.causes.slow_rank import SLOW_RANK
from stepsplit.analyzer.diagnose.causes.small_collectives import SMALL_COLLECTIVES
from stepsplit.analyzer.diagnose.causes.uneven_work import UNEVEN_WORK

CAUSES: tuple[CauseEntry, ...] = (
    SLOW_RANK,
    DATA_LOADING,
    COMPILE_TIME,
    ALLOCATION,
    GC_PAUSE,
    HOST_STALL,
    SLOW_COPY,
    SLOW_LINK,
    UNEVEN_WORK,
    UNEVEN_RANKS,
    UNEVEN_STAGES,
    HOST_SYNC,
    HOST_BOUND,
    FP32_GEMMS,
    UNALIGNED_GEMMS,
    BELOW_LIMIT,
    LOST_OVERLAP,
    LAUNCH_ORDER,
    FEW_MICROBATCHES,
    REDUNDANT_GATHERS,
    EXTRA_REDUCTIONS,
    FIND_UNUSED,
    SMALL_COLLECTIVES,
    OTHER_STEPS,
)
"""In the order in which causes of equal gain are listed."""
