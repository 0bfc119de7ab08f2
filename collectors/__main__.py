"""Command line of the collectors: python -m stepsplit.collectors record|attach|gather."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeAlias

from stepsplit.collectors.attach.client import attach_and_wait
from stepsplit.collectors.attach.processes import find_ranks_of_plan
from stepsplit.collectors.attach.stop_watch import ExplainStop
from stepsplit.collectors.formats.file_names import build_record_path
from stepsplit.collectors.formats.rank_record import RankRecord, read_record
from stepsplit.collectors.formats.run_spec import RUN_FILE
from stepsplit.collectors.guard import CollectError, warn
from stepsplit.collectors.job.launcher import is_rank, read_identity
from stepsplit.collectors.record.command import (
    check_out,
    choose_out,
    describe_module_names,
    describe_recorded,
    interrupt_on_signals,
    name_signal,
    record,
    remove_if_empty,
    run_finish_hook,
)
from stepsplit.collectors.record.environment import NcclLogs
from stepsplit.collectors.record.gather import gather
from stepsplit.collectors.record.plan import RecordPlan
from stepsplit.collectors.record.remote_folder import (
    RemoteFolder,
    is_url,
    open_remote_folder,
    show_url,
)
from stepsplit.collectors.safe_io.regular_file import read_regular
from stepsplit.collectors.safe_io.safe_text import escape_controls, guard_output

# As click and argparse end for words of the command line that they cannot use.
BAD_INPUT = 2
DEFAULT_FIRST = 10
"""First step that `record` records by default: most jobs have reached a steady state by then."""


def main(arguments: Sequence[str] | None = None, explain_stop: ExplainStop | None = None) -> int:
    """Runs one subcommand and returns its exit status.

    explain_stop: says for `attach` why the steps of the job have stopped. The status is 2 for bad
    input; for `record` it is the status of the recorded command.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = _Parser(prog="stepsplit")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_record(verbs)
    _add_attach(verbs, explain_stop)
    verb = verbs.add_parser(
        "gather",
        usage="stepsplit gather FOLDER ... --out DIR",
        description="Merge the folders that the hosts of one run wrote to their local disks.",
    )
    verb.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="one per host")
    verb.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the merged recording"
    )
    verb.set_defaults(run=_gather)
    try:
        with guard_output():
            options, unknown = parser.parse_known_args(argv)
            if unknown:
                given = " ".join(unknown)
                raise CollectError(f"{given} is no option: see stepsplit {argv[0]} --help")
            status: int = options.run(options)
        return status
    except SystemExit as done:
        return int(done.code or 0)
    except (CollectError, ValueError) as error:
        warn(str(error))
        return BAD_INPUT


class _Parser(argparse.ArgumentParser):
    """Reports bad usage on one line, like other bad input."""

    def error(self, message: str) -> NoReturn:
        raise CollectError(f"{message}: see {self.prog} --help")


_Verbs: TypeAlias = "argparse._SubParsersAction[_Parser]"


def _add_record(verbs: _Verbs) -> None:
    verb = verbs.add_parser(
        "record",
        usage="stepsplit record [options] -- COMMAND [ARGUMENT ...]",
        description="Run an unmodified training command and record some steps of each rank.",
    )
    _add_recording_options(
        verb,
        "folder of the recording (default: the next free runs/record), or a URL for fsspec, such as"
        " s3://bucket/runs/1, to which it is copied",
    )
    verb.add_argument(
        "--first",
        type=int,
        default=DEFAULT_FIRST,
        metavar="N",
        help="first step to record, counted from 0 (default %(default)s); a job that ends before"
        " has its first steps recorded",
    )
    verb.add_argument(
        "--standby", action="store_true", help="do not record until stepsplit attach requests it"
    )
    verb.add_argument(
        "--nccl-calls",
        action="store_true",
        help="have NCCL log every call, not only its startup; at most 256 MiB are kept",
    )
    verb.add_argument(
        "--nccl-inspector",
        action="store_true",
        help="time each collective with NCCL's Inspector (NCCL 2.28.3 and later)",
    )
    verb.add_argument(
        "--role",
        default="",
        metavar="ROLE",
        help="what the command does in a job of several roles, such as rollout: it is recorded in"
        " DIR/ROLE",
    )
    verb.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="training command, such as torchrun ... train.py",
    )
    verb.add_argument(
        "--finish-hook",
        type=_split_words,
        metavar="CMD",
        help="command to run once the recording is written, such as 'stepsplit upload --to URL';"
        " its last argument is the recording's folder, and it is ended after 30 minutes",
    )
    _add_overwrite(verb)
    verb.set_defaults(run=_record)


def _record(options: argparse.Namespace) -> int:
    command = options.command[options.command[:1] == ["--"] :]
    if not command:
        raise CollectError("no command given; use: stepsplit record -- torchrun ... train.py")
    remote = _open_remote(options)
    here = options.out and remote is None
    if options.role and not here:
        raise CollectError("--role needs --out, a local folder that the roles of the job share")
    out = Path(options.out).absolute() if here else choose_out(os.environ)
    name = options.name or (remote.name if remote else "")
    first_step = None if options.standby else options.first
    plan = _build_plan(options, name, out, first_step, options.role)
    out = Path(plan.out)
    each_rank = is_rank(os.environ)
    if not each_rank:
        # A rank started by srun must not stop: it may be a restart of the job.
        check_out(out, options.overwrite)
    if remote:
        remote.check(speaks=not each_rank or read_identity().rank == 0)
    start_s = time.time()
    status = record(command, plan, NcclLogs(options.nccl_calls, options.nccl_inspector))
    exit_status = 128 - status if status < 0 else status
    # The training's status is returned whatever becomes of the rest.
    try:
        with interrupt_on_signals():
            _finish(options, plan, remote, status, start_s)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        reason = str(error) or type(error).__name__
        warn(f"{reason}: what follows the training ends here; the recording is in {out}")
    return exit_status


def _finish(
    options: argparse.Namespace,
    plan: RecordPlan,
    remote: RemoteFolder | None,
    status: int,
    start_s: float,
) -> None:
    """Says what was recorded, copies it, and runs the hook."""
    out = Path(plan.out)
    each_rank = is_rank(os.environ)
    # The ranks that srun starts next to this one have the same plan.
    remaining: dict[int, int] = {}
    if not each_rank and find_ranks_of_plan(plan):
        # The last ranks may be just about to end.
        time.sleep(1.0)
        remaining = find_ranks_of_plan(plan)
    if remaining:
        ended = f"was killed ({name_signal(-status)})" if status < 0 else "has ended"
        ranks = ", ".join(f"{rank} (process {pid})" for rank, pid in sorted(remaining.items()))
        copied = "; it is not copied" if remote else ""
        warn(f"the command {ended}, but ranks {ranks} go on; what they record is in {out}{copied}")
        return
    # NCCL's logs are still written by ranks that go on.
    remove_if_empty(out, plan.role)
    identity = read_identity() if each_rank else None
    speaks = identity is None or identity.rank == 0
    recorded = speaks and _report_recording(plan, start_s)
    if remote:
        if recorded:
            place = escape_controls(remote.shown)
            sys.stderr.write(f"copying it to {place}; Ctrl-C or SIGTERM ends that\n")
        copied_to = remote.copy(out, identity)
        if recorded and copied_to:
            sys.stderr.write(f"copied to {escape_controls(copied_to)}\n")
    if recorded and options.finish_hook:
        run_finish_hook(options.finish_hook, out)


def _split_words(text: str) -> list[str]:
    """The words of a command, as a shell splits it; nothing in it is expanded."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {text!r}") from None
    if not words:
        raise argparse.ArgumentTypeError("the command is empty")
    return words


def _open_remote(options: argparse.Namespace) -> RemoteFolder | None:
    """The folder at the URL of --out, if it is one. Raises CollectError for what does not go
    together."""
    url = options.out if options.out and is_url(options.out) else ""
    if options.standby and (url or options.finish_hook):
        raise CollectError("--standby leaves the recording to stepsplit attach: copy that one")
    if options.standby and options.role:
        raise CollectError("--standby leaves the recording to stepsplit attach, which has no roles")
    if url and options.overwrite:
        raise CollectError("--overwrite: nothing at a URL is replaced; choose another --out")
    return open_remote_folder(url) if url else None


def _report_recording(plan: RecordPlan, start_s: float) -> bool:
    """Says what was recorded, or why nothing was; without a trace, no folder remains.

    Returns whether there is a trace.
    """
    out = Path(plan.out)
    traces = [path for path in out.glob("rank*_trace.json*") if path.stat().st_mtime >= start_s]
    if traces:
        n_ranks = len({path.name.removesuffix(".gz") for path in traces})
        written = _read_records(out)
        if names := describe_module_names(written):
            sys.stderr.write(f"{names}\n")
        steps = _explain_early_steps(plan, written)
        sys.stderr.write(f"{escape_controls(describe_recorded(n_ranks, out, steps))}\n")
        return True
    if plan.first is not None:
        warn(
            "no trace was recorded: unless a rank gives the reason above, no process of the command"
            f" has ended two steps of an optimizer, or a signal ended it before step {plan.first}"
        )
    # A dump of the Flight Recorder is of use without a trace; a record is not.
    records = set(out.glob("rank*_record.json"))
    if not set(out.glob("rank*")) - records and not is_rank(os.environ):
        for path in (*records, out / RUN_FILE):
            path.unlink(missing_ok=True)
    remove_if_empty(out, plan.role)
    return False


def _read_records(out: Path) -> list[RankRecord]:
    """The records in the folder; each rank of srun reads its own: else each would read all."""
    own = [build_record_path(out, read_identity().rank)] if is_rank(os.environ) else None
    records = []
    for path in own or out.glob("rank*_record.json"):
        with suppress(OSError, ValueError):
            records.append(read_record(read_regular(path)))
    return records


def _explain_early_steps(plan: RecordPlan, records: Sequence[RankRecord]) -> str:
    """Which ranks have their first steps because they ended before those of the plan."""
    if plan.first is None:
        return ""
    early, others = [], 0
    for each in records:
        is_early = each.first_step - each.steps_before < plan.first - plan.warmup
        early += [each.rank.rank] if is_early else []
        others += not is_early
    if not early:
        return ""
    if not others:
        return f", its first steps because the job ended before step {plan.first}"
    ranks = ", ".join(map(str, sorted(early)[:_MOST_NAMED])) + ", ..." * (len(early) > _MOST_NAMED)
    return (
        f", which ended at different steps: ranks {ranks} before step {plan.first}, and have their"
        " first steps instead"
    )


# More make a line that is hard to read; the record of each rank has its steps.
_MOST_NAMED = 8


def _add_attach(verbs: _Verbs, explain_stop: ExplainStop | None) -> None:
    verb = verbs.add_parser(
        "attach",
        usage="stepsplit attach [PID] [options]",
        description="Record some steps of a running job: one started with record --standby,"
        " one started with KINETO_USE_DAEMON=1, or any job on Python 3.14.",
    )
    verb.add_argument(
        "pid",
        type=int,
        nargs="?",
        metavar="PID",
        help="a process of the job; optional if only one job is on standby",
    )
    _add_recording_options(verb, "folder of the recording (default: runs/attach-PID-1)")
    verb.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="how long to wait for the steps (default %(default)s)",
    )
    _add_overwrite(verb)
    verb.set_defaults(run=lambda options: _attach(options, explain_stop))


def _attach(options: argparse.Namespace, explain_stop: ExplainStop | None) -> int:
    if options.out and is_url(options.out):
        raise CollectError(f"{show_url(options.out)} is a URL: attach to a folder, and copy that")
    out = Path(options.out).absolute() if options.out else None
    if out is not None:
        check_out(out, options.overwrite)
    message = attach_and_wait(
        options.pid,
        out,
        lambda out: _build_plan(options, options.name, out, None),
        options.timeout,
        explain_stop,
    )
    sys.stderr.write(f"{escape_controls(message)}\n")
    return 0


def _gather(options: argparse.Namespace) -> int:
    gathered = gather(options.folders, options.out)
    sys.stdout.write(f"{escape_controls(str(gathered.out))}: {len(gathered.ranks)} ranks\n")
    if gathered.missing:
        sys.stderr.write(f"missing ranks: {', '.join(map(str, gathered.missing))}\n")
    return 0


def _add_recording_options(verb: argparse.ArgumentParser, out: str) -> None:
    verb.add_argument("--out", metavar="DIR", help=out)
    verb.add_argument("--name", metavar="NAME", help="name of the run (default: the folder's)")
    verb.add_argument(
        "--steps", type=int, default=5, metavar="N", help="steps to record (default %(default)s)"
    )
    verb.add_argument(
        "--ranks",
        default="auto",
        metavar="auto|all|LIST",
        help="ranks to record; beyond 8 ranks auto records one pipeline in full, the rest thin",
    )
    verb.add_argument(
        "--mesh",
        default="",
        metavar="AXES",
        help="the job's mesh, outermost axis first, such as pp=2,dp=2,tp=2 (default: inferred)",
    )
    verb.add_argument("--memory", action="store_true", help="measure memory allocated per step")
    verb.add_argument("--shapes", action="store_true", help="record the input shapes of ops")
    verb.add_argument("--stacks", action="store_true", help="record Python stacks (large and slow)")
    verb.add_argument(
        "--modules",
        action=argparse.BooleanOptionalAction,
        help="record the names of the model's modules, in the first step (default: in the last one"
        " where that takes at most 2 %% of it)",
    )
    verb.add_argument(
        "--share",
        action="store_true",
        help="if the script's own torch.profiler runs then, copy its trace (default: record after"
        " its end)",
    )


def _add_overwrite(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--overwrite", action="store_true", help="replace an earlier recording in the folder"
    )


def _build_plan(
    options: argparse.Namespace, name: str, out: Path, first_step: int | None, role: str = ""
) -> RecordPlan:
    return RecordPlan(
        out=str(out / role),
        name=name or out.name,
        first=first_step,
        steps=options.steps,
        ranks=options.ranks,
        shapes=options.shapes,
        memory=options.memory,
        stacks=options.stacks,
        mesh=options.mesh,
        share=options.share,
        modules=options.modules,
        role=role,
    )


if __name__ == "__main__":
    sys.exit(main())
