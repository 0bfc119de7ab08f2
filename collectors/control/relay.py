"""Hands a plan on to the hosts that an attach cannot reach, through the store of the job."""

from __future__ import annotations

import threading
from itertools import count

from stepsplit.collectors.control.identity import identity, job_name
from stepsplit.collectors.control.wire import agents, ask_record, ask_status
from stepsplit.collectors.guard import guarded
from stepsplit.collectors.plan import Plan, plan

POLL_S = 2.0
"""How often one rank of each host asks whether there is a plan."""
_FOREVER_S = 1e9


def several_hosts() -> bool:
    """Whether the job has ranks on other hosts."""
    who = identity()
    return who.local_world_size < who.world_size


def hand_on(asked: Plan) -> None:
    """Leaves the plan for the other hosts, from one rank of this one."""
    if several_hosts() and identity().local_rank == 0:
        with guarded(identity().rank, "the other hosts: they do not hear of the attach"):
            from stepsplit.collectors import presence

            presence.tell(f"attach/{presence.next_number('attach')}", asked.text())


def relay_plans() -> None:
    """Listens, from one rank a host, for what is handed on, and asks the ranks of this host."""
    if several_hosts() and identity().local_rank == 0:
        threading.Thread(target=_relay, name="stepsplit-relay", daemon=True).start()


def _relay() -> None:
    with guarded(identity().rank, "the relay: attach to each host by itself"):
        from stepsplit.collectors import presence

        for number in count(1):
            word = presence.heard(f"attach/{number}", _FOREVER_S, POLL_S)
            if word is None:
                return
            _tell_ranks(plan(word))


def _tell_ranks(asked: Plan) -> None:
    """Those that were reached by the attach itself refuse: they are busy."""
    for pid in agents():
        status = ask_status(pid)
        if status is not None and status.job == job_name():
            ask_record(pid, asked, relayed=True)
