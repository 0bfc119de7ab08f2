"""Forwards a plan through the job's store to the hosts that an attach cannot reach."""

from __future__ import annotations

import threading
from itertools import count

from stepsplit.collectors.attach import messages, sockets
from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.job.launcher import read_identity, read_job_name
from stepsplit.collectors.record.plan import RecordPlan, parse_plan

# Thirty years: the thread is a daemon and ends with the process.
_FOREVER_S = 1e9


def has_several_hosts() -> bool:
    """Whether the job has ranks on other hosts."""
    own_identity = read_identity()
    return own_identity.local_world_size < own_identity.world_size


def claim_recording(plan: RecordPlan, done: int) -> str:
    """Claims the next recording for all hosts of the job; why it is refused, or "".

    Attaches on two hosts at the same moment would otherwise each win the ranks of their host.
    """
    if not has_several_hosts():
        return ""

    from stepsplit.collectors.job import job_store

    own = plan.format_json()
    # The store keeps the first value, unless that is of a recording that is over.
    winner = job_store.claim_value("attach/claim", own, lambda text: _is_over(text, done))
    if winner == own:
        return ""
    other = parse_plan(winner)
    first = other.first or 0
    return f"an attach on another host records steps {first} to {first + other.steps - 1}"


def _is_over(claimed: str, done: int) -> bool:
    plan = parse_plan(claimed)
    return done >= (plan.first or 0) + plan.steps


def publish_plan(plan: RecordPlan) -> None:
    """Publishes the plan for the other hosts, from one rank of this host."""
    if has_several_hosts() and read_identity().local_rank == 0:
        with warn_on_failure(
            read_identity().rank, "the other hosts, which do not get the attach request"
        ):
            from stepsplit.collectors.job import job_store

            number = job_store.increment_counter("attach")
            job_store.set_store_value(f"attach/{number}", plan.format_json())


def forward_plans() -> None:
    """Waits on one rank per host for published plans, and passes them to the host's ranks."""
    if has_several_hosts() and read_identity().local_rank == 0:
        threading.Thread(
            target=_forward_published_plans, name="stepsplit-relay", daemon=True
        ).start()


def _forward_published_plans() -> None:
    with warn_on_failure(read_identity().rank, "the relay; attach to each host separately"):
        from stepsplit.collectors.job import job_store

        for number in count(1):
            text = job_store.wait_for_value(f"attach/{number}", _FOREVER_S, messages.POLL_S)
            if text is None:
                return
            # Ranks that already have the plan refuse as busy.
            plan = parse_plan(text)
            for pid in sockets.list_agents():
                status = messages.ask_status(pid)
                if status is not None and status.job == read_job_name():
                    messages.ask_record(pid, plan, relayed=True)
