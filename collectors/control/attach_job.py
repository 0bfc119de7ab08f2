"""attach by whichever way the job can be reached: its agents, Kineto's protocol, or PEP 768."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from stepsplit.collectors.control.attach import Attached, attach, default_out, wait_for, written
from stepsplit.collectors.control.inject import inject
from stepsplit.collectors.control.kineto import Captured, capture, ranks_with_daemon
from stepsplit.collectors.control.proc import environment, family
from stepsplit.collectors.control.wire import agents, ask_status
from stepsplit.collectors.errors import CollectError
from stepsplit.collectors.packing import Packed, Packer
from stepsplit.collectors.paths import trace_path
from stepsplit.collectors.plan import Plan
from stepsplit.collectors.run_spec import RankInfo, RunSpec, write_run_json


def attach_and_wait(
    target: int | None, out: Path | None, plan_in: Callable[[Path], Plan], timeout_s: float
) -> str:
    """Records the job, and returns when that is done; what to say of it.

    plan_in: the plan for a folder. Raises CollectError.
    """
    folder = out or default_out(target)
    plan = plan_in(folder)
    if target is not None and not _has_agent(target):
        if ranks_with_daemon(target):
            return _by_kineto(target, plan, timeout_s)
        for pid in family(target):
            if environment(pid).get("RANK") is not None or pid == target:
                inject(pid, plan)
    return _by_agents(target, plan, timeout_s)


def _has_agent(target: int) -> bool:
    return any(pid in agents() and ask_status(pid) is not None for pid in family(target))


def _by_agents(target: int | None, plan: Plan, timeout_s: float) -> str:
    agreed = attach(target, plan)
    last = agreed.first + plan.steps - 1
    here, all_ranks = len(agreed.ranks), agreed.ranks[0].world_size
    elsewhere = f", the others are told: {all_ranks - here}" if all_ranks > here else ""
    _say(f"ranks {_listed(agreed)} record steps {agreed.first} to {last}{elsewhere}")
    for refusal in agreed.refused:
        _say(f"refused: {refusal}")
    if not wait_for(agreed, timeout_s, _say):
        raise CollectError(f"step {last} was not reached in {timeout_s:.0f} s: raise --timeout")
    if not written(agreed, timeout_s):
        raise CollectError(f"{plan.out}: not all of its files are there: was a rank lost?")
    return f"recorded: stepsplit analyze {plan.out}"


def _by_kineto(target: int, plan: Plan, timeout_s: float) -> str:
    _say("no agent; asking the profiler in each rank as a daemon does")
    captured = capture(target, plan, timeout_s)
    packer, folder = Packer(), Path(plan.out)
    packer.pack([Packed(each.trace, trace_path(folder, each.rank)) for each in captured])
    write_run_json(folder, _spec(plan, captured))
    if not packer.wait(timeout_s):
        raise CollectError(f"{folder}: still being packed: wait before you analyze it")
    return f"recorded {len(captured)} ranks: stepsplit analyze {plan.out}"


def _spec(plan: Plan, captured: tuple[Captured, ...]) -> RunSpec:
    """What the environments of the processes tell; their traces do not say which rank they are."""
    told = {each.pid: environment(each.pid) for each in captured}
    sizes = [int(env.get("WORLD_SIZE", "0")) for env in told.values()]
    host = Path("/proc/sys/kernel/hostname").read_text().strip()
    return RunSpec(
        name=plan.name,
        world_size=max(*sizes, len(captured), max(each.rank for each in captured) + 1),
        backend="",
        ranks=tuple(
            RankInfo(e.rank, int(told[e.pid].get("LOCAL_RANK", "0")), host, e.pid, "")
            for e in captured
        ),
    )


def _listed(agreed: Attached) -> str:
    return ", ".join(str(rank.rank) for rank in agreed.ranks)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
