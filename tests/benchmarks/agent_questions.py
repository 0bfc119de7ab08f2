"""40 questions with known truth, asked through the tools by a client that follows SKILL.md.

python tests/benchmarks/agent_questions.py prints the table of docs/agents.md. The client looks the
question's kind up in the table of SKILL.md, calls that tool with the official client, reads
cannot_answer first, and takes one value. It is no language model: it shows that the tools and the
table lead to the truth, and what an answer costs. Truth is that of simulators (truth.json), of how
a recording was made, or that a recording does not say it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import anyio
from mcp import Client

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.tokens import count_tokens

from stepsplit.dashboard.agents.recordings import Recordings
from stepsplit.dashboard.agents.server import build_server

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces"
REPRO = ROOT.parent / "shared" / "repro"
SKILL = ROOT / "dashboard" / "agents" / "SKILL.md"

Json = dict[str, Any]
Read = Callable[[Json], object]

REFUSED = "cannot tell"


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        text: as a user would ask it.
        kind: the part of a question in SKILL.md's table that it is of.
        arguments: what the tool is asked with.
        read: takes the answer from the tool's; None for what the recording does not say.
        truth: the right answer; REFUSED if the recording does not say it.
        within: for numbers, the accepted relative error.
        doubt: what the entry of cannot_answer is about that refuses it.
    """

    text: str
    kind: str
    arguments: Json
    read: Read
    truth: object
    within: float = 0.0
    doubt: str = ""


def rows(answer: Json) -> list[Json]:
    return [dict(zip(answer["columns"], row, strict=True)) for row in answer.get("rows", [])]


def first(column: str) -> Read:
    return lambda answer: next((row[column] for row in rows(answer)), None)


def find_blamed(answer: Json) -> object:
    """The ranks of the first finding that names any: one of the schedule names none."""
    return next((row["ranks"] for row in rows(answer) if row["ranks"]), None)


def of_bucket(bucket: str) -> Read:
    return lambda answer: next(r["mean_ns"] for r in rows(answer) if r["bucket"] == bucket)


def of_cause(*ranks: int) -> Read:
    """The saving of the finding that blames these ranks."""
    return lambda answer: next(
        (row["gain_ns"] for row in rows(answer) if row["ranks"] == list(ranks)), None
    )


def has_code(*codes: str) -> Read:
    return lambda answer: any(row["code"] in codes for row in rows(answer))


def read_truth(name: str) -> Json:
    found: Json = json.loads((SAMPLES / name / "truth.json").read_text())
    return found


def true_mean(name: str, bucket: str, rank: int | None = None) -> float:
    steps = [one for one in read_truth(name)["steps"] if rank in (None, one["rank"])]
    return mean(one[f"{bucket}_ns"] for one in steps if not one["partial"])


def read_saving_ns(name: str) -> float:
    saving: float = json.loads((REPRO / "causes3" / name / "truth.json").read_text())["saving_ms"]
    return saving * 1e6


SLOW, STALL, HOSTS, ZERO = (
    "built_tp_pp_dp_slow_rank", "built_ddp_host_stall", "built_fsdp_four_hosts",
    "built_zero_bubble",
)  # fmt: skip
CAUSED = {
    "causal_ring": [2, 3], "early_recv_slow_link": [2, 3], "extra_work_one_step": [1],
    "graph_data_loader": [1], "hot_expert_persistent": [1], "hsdp_slow_rank": [1],
    "one_slow_kernel": [1], "slow_rank_two_a_stage": [3], "two_slow_blame": [1, 2],
}  # fmt: skip
SAVED = ("early_recv_slow_link", "hsdp_slow_rank", "one_slow_kernel", "two_slow_blame")


def list_sample_questions() -> list[Question]:
    """Those about the samples of the repository, and a recording of one rank of four."""
    why, where, who = "why is it slow", "where does the time of a step go", "who is the straggler"
    return [
        Question("Which rank delays the job?", why, {"recording": SLOW}, find_blamed, [3]),
        Question(
            "What does it do, compute or host work?", who, {"recording": SLOW},
            lambda one: one["caused_by"][0]["cause"], read_truth(SLOW)["cause"]["cause"],
        ),
        *(
            Question(
                f"How long is {bucket} in the mean step?", where, {"recording": name},
                of_bucket(bucket), true_mean(name, bucket), 0.02,
            )
            for name, bucket in (
                (SLOW, "compute"), (SLOW, "skew"), (SLOW, "bubble"),
                (STALL, "idle"),
            )
        ),
        Question(
            "How much communication is hidden under compute?", where, {"recording": HOSTS},
            lambda one: one["overlapped_ns"], true_mean(HOSTS, "overlapped"), 0.02,
        ),
        Question("Which rank delays the job?", why, {"recording": STALL}, find_blamed, [0]),
        Question(
            "Is it the host?", why, {"recording": STALL},
            lambda one: rows(one)[0]["bucket"] == "idle", True,
        ),
        Question(
            "Does a rank compute slowly?", why, {"recording": HOSTS}, has_code("slow_rank"), False
        ),
        Question(
            "What is the ideal bubble of 6 microbatches on 2 stages?", "is the pipeline's bubble",
            {"recording": SLOW}, lambda one: one["ideal_bubble_fraction"], 1 / 7, 0.001,
        ),
        Question(
            "Is the bubble near its ideal (within a tenth)?", "is the pipeline's bubble",
            {"recording": SLOW},
            lambda one: one["bubble_fraction"] < 1.1 * one["ideal_bubble_fraction"], False,
        ),
        Question(
            "Which schedule does it run?", "is the pipeline's bubble", {"recording": ZERO},
            lambda one: one["schedule"], "zb-h1",
        ),
        Question(
            "What is the parallel layout?", "is it complete, which layout",
            {"recording": "tp2_pp2_dp2"},
            lambda one: sorted(one["mesh"].values()), [2, 2, 2],
        ),
        Question(
            "What differs between the runs?", "what differs between two runs",
            {"baseline": "pp2_m2", "candidate": "pp2_m8"},
            lambda one: [row["name"] for row in one["settings_that_differ"]], ["microbatches"],
        ),
        Question(
            "Did the number of calls regress?", "beyond the noise",
            {"candidate": ["pp2_m8"], "baseline": ["pp2_m2"], "across_setups": True},
            lambda one: next(r["answer"] for r in rows(one) if r["metric"] == "calls"), "regressed",
        ),
        Question(
            "Did exposed communication regress, by one run a side?", "beyond the noise",
            {"candidate": ["fsdp4"], "baseline": ["fsdp4"], "budgets": ["exposed_comm:5%"]},
            lambda one: one["answer"], REFUSED, doubt="exposed_comm",
        ),
        Question(
            "Can you tell whether the link is slow?", "how fast are the collectives",
            {"recording": "h100_fsdp2"}, first("busbw_slowest_group_bytes_per_s"), REFUSED,
            doubt="link",
        ),
        Question("What is the MFU?", where, {"recording": "dp4"},
                 lambda one: one["mfu"], REFUSED, doubt="MFU"),
        Question("How much memory does a rank take?", "how much memory", {"recording": SLOW},
                 first("peak_allocated_bytes"), REFUSED, doubt="memory"),
        Question("How large is the pipeline's bubble?", "is the pipeline's bubble",
                 {"recording": "dp4"}, lambda one: one["bubble_fraction"], REFUSED,
                 doubt="pipeline"),
        Question("Who is the straggler?", who, {"recording": "one_of_four"},
                 lambda one: one["stragglers"][0]["rank"], REFUSED, doubt="lost"),
        Question("How is busbw of an all_reduce computed?", "what does this number mean",
                 {"number": "busbw"}, lambda one: "all_reduce 2 (n-1)/n" in one["formula"],
                 True),
    ]  # fmt: skip


def list_repro_questions() -> list[Question]:
    """Those about jobs of another simulator and recordings of training scripts."""
    why = "which rank delays the job"
    users = "users3"
    return [
        *(
            Question("Which rank delays the job?", why, {"recording": f"causes3/{name}/with"},
                     find_blamed, ranks)
            for name, ranks in CAUSED.items()
        ),
        *(
            Question("What would a fix save?", why, {"recording": f"causes3/{name}/with"},
                     of_cause(*CAUSED[name]), read_saving_ns(name), 0.2)
            for name in SAVED
        ),
        Question("Are there redundant all-gathers?", why,
                 {"recording": "causes3/fsdp_accum_shard_group/with"},
                 has_code("redundant_calls"), False),
        Question("Does rank 1 compile?", why, {"recording": f"{users}/recompile/red"},
                 lambda one: any("compil" in row["finding"] for row in rows(one)), True),
        Question("Which layout is it?", "is it complete, which layout",
                 {"recording": f"{users}/dualpipe_cp/rec2"},
                 lambda one: one["mesh"], {"pp": 2}),
        Question("Are some steps of another kind?", "which steps are slow",
                 {"recording": f"{users}/periodic_step_dropped/red"},
                 lambda one: len(one["step_kinds"]) > 1, True),
    ]  # fmt: skip


def find_tool(kind: str) -> str:
    """The tool of the question in SKILL.md's table."""
    table = re.findall(r"^\| ([^|]+) \| (\w+) \| `", SKILL.read_text(), flags=re.MULTILINE)
    (tool,) = {tool for question, tool in table if kind in question}
    return tool


@dataclass(frozen=True)
class Outcome:
    """How a question went: "right", "wrong", "refused rightly", "refused wrongly" or "error"."""

    question: Question
    tool: str
    found: object
    verdict: str
    tokens: int


async def ask(client: Client, question: Question) -> Outcome:
    """Asks one question with one call."""
    tool = find_tool(question.kind)
    result = await client.call_tool(tool, question.arguments)
    text = str(result.content[0].text)  # type: ignore[union-attr]
    tokens = count_tokens(text)
    if result.is_error:
        return Outcome(question, tool, text, "error", tokens)
    answer = json.loads(text)
    doubts = [one["question"] for one in answer.get("cannot_answer", ())]
    found: object = REFUSED
    if not (question.doubt and any(question.doubt in one for one in doubts)):
        try:
            found = question.read(answer)
        except (KeyError, IndexError, StopIteration, TypeError):
            found = REFUSED
    return Outcome(question, tool, found, judge(question, found), tokens)


def judge(question: Question, found: object) -> str:
    """How the answer compares with the truth."""
    if found == REFUSED or found is None:
        return "refused rightly" if question.truth == REFUSED else "refused wrongly"
    if question.truth == REFUSED:
        return "wrong"
    if isinstance(question.truth, float) and isinstance(found, int | float):
        near = abs(found - question.truth) <= question.within * abs(question.truth)
        return "right" if near else "wrong"
    return "right" if found == question.truth else "wrong"


def ask_all(questions: Sequence[Question]) -> list[Outcome]:
    """Asks all questions of one server."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "one_of_four"
        alone.mkdir()
        shutil.copy(SAMPLES / "dp4" / "rank0_trace.json.gz", alone)

        async def talk() -> None:
            roots = (SAMPLES, Path(folder), *([REPRO] if REPRO.is_dir() else []))
            async with Client(build_server(Recordings(roots))) as client:
                for question in questions:
                    outcomes.append(await ask(client, question))

        anyio.run(talk)
    return outcomes


def format_table(outcomes: Sequence[Outcome]) -> str:
    """The table of docs/agents.md, and what was not right."""
    verdicts = ("right", "refused rightly", "wrong", "refused wrongly", "error")
    lines = [f"| questions | number | {' | '.join(verdicts)} | tokens, median | most |"]
    lines.append("|---|" + "---|" * (len(verdicts) + 3))
    sets = {"samples": "samples", "causes3": "another simulator", "users3": "training scripts"}
    named = {key: [one for one in outcomes if find_set(one.question) == key] for key in sets}
    for key, own in [*named.items(), ("all", list(outcomes))]:
        if own:
            counts = Counter(one.verdict for one in own)
            tokens = sorted(one.tokens for one in own)
            cells = [str(counts[verdict]) for verdict in verdicts]
            cells += [f"{tokens[len(tokens) // 2]:,}", f"{tokens[-1]:,}"]
            lines.append(f"| {sets.get(key, key)} | {len(own)} | {' | '.join(cells)} |")
    for one in outcomes:
        if one.verdict not in ("right", "refused rightly"):
            asked = f"{one.question.text} {one.question.arguments}"
            lines.append(f"{one.verdict}: {asked}: {one.found}, truth {one.question.truth}")
    return "\n".join(lines)


def find_set(question: Question) -> str:
    """Where the recording of a question is from."""
    place = str(question.arguments.get("recording", ""))
    return next((key for key in ("causes3", "users3") if place.startswith(key)), "samples")


def main() -> None:
    """Prints the table."""
    questions = list_sample_questions() + (list_repro_questions() if REPRO.is_dir() else [])
    sys.stdout.write(f"{format_table(ask_all(questions))}\n")


if __name__ == "__main__":
    main()
