"""The RL step by phase, and the long tail of its generation: rows of roles.json and report.json."""

from __future__ import annotations

from msgspec import Struct

from stepsplit.collectors.formats.rl_marks import PHASES


def name_phase(phase: str) -> str:
    """What a phase or mark is called on screens and pages."""
    return _NAMES.get(phase, phase) or "without a mark"


_NAMES: dict[str, str] = dict(PHASES.items())


class RoleTime(Struct, frozen=True):
    """Where the time of a rank went in a window; the parts add up to window_ns.

    Attributes:
        window_ns: Time of the window.
        compute_ns: Compute kernels run.
        transfer_ns: Else: communication transfers data.
        wait_ns: Else: communication waits for another rank.
        copy_ns: Else: a copy runs.
        idle_ns: Nothing runs, in the recorded steps of the rank.
        unrecorded_ns: Outside of the recorded steps of the rank.
    """

    window_ns: int
    compute_ns: int
    transfer_ns: int
    wait_ns: int
    copy_ns: int
    idle_ns: int
    unrecorded_ns: int


class PhaseRow(Struct, frozen=True):
    """The time of a role in one phase of the RL step, in the mean of its ranks and the RL steps.

    The rows of a role add up to its time, part by part.

    Attributes:
        role: Its name; "" in the report of one program.
        phase: generation, reward, reference, training, weight_sync or other, the name of a mark
            that is of no framework, or "" for the rest, also what is not recorded.
        is_known: Whether it is one of the phases, and not a mark or the rest.
        time: The parts of the phase.
    """

    role: str
    phase: str
    is_known: bool
    time: RoleTime


class PhaseStepRow(Struct, frozen=True):
    """The time of a rank in one phase of one RL step.

    Attributes:
        role: Its role.
        rank: Its number.
        step: The number of the RL step.
        phase: As in PhaseRow.
        time: The parts of the phase.
    """

    role: str
    rank: int
    step: int
    phase: str
    time: RoleTime


class TailRow(Struct, frozen=True):
    """One generation of a rank: how many sequences it decodes for over its time.

    Attributes:
        role: Its role.
        rank: Its number.
        step: The number of the RL step in which it ends.
        sequences: The most sequences that it decodes for at a time.
        last: Up to so many sequences at its end are the last ones.
        decode_ns: From its first decode step to its last one.
        tail_ns: Part of it, at its end, in which it decodes for the last sequences.
        batch: The mean number of sequences in equal parts of decode_ns.
    """

    role: str
    rank: int
    step: int
    sequences: int
    last: int
    decode_ns: int
    tail_ns: int
    batch: tuple[float, ...]


class LongTail(Struct, frozen=True):
    """The long tail of a role's generation, in the mean of the RL steps.

    Attributes:
        role: Its name; "" in the report of one program.
        decode_ns: Time in which a rank decodes, in the mean of its ranks.
        tail_ns: Part of it for the last sequences, in the mean of its ranks.
        longest_rank: The rank that decodes longest for its last sequences.
        longest_ns: How long it does.
        sequences: The most sequences that a rank decodes for at a time.
        last: Up to so many sequences are the last ones.
        empty: The share of places in the batch, over the time of decoding, that are empty, 0..1.
        saved_ns: By how much the RL step would be shorter at most if every rank ended its
            generation when it comes to its last sequences: by how much the last one would end
            earlier, without the time in which another role works meanwhile.
    """

    role: str
    decode_ns: int
    tail_ns: int
    longest_rank: int
    longest_ns: int
    sequences: int
    last: int
    empty: float
    saved_ns: int


class RlStep(Struct, frozen=True):
    """The RL step of a job whose ranks are one program.

    Attributes:
        steps: The RL steps in the means.
        step_ns: Their mean.
        phases: Its time by phase.
        tails: The long tail of its generation; empty without one that is known.
        lacks: What is not known, one sentence each.
    """

    steps: int
    step_ns: int
    phases: tuple[PhaseRow, ...]
    tails: tuple[LongTail, ...] = ()
    lacks: tuple[str, ...] = ()
