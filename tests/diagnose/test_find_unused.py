"""DDP with find_unused_parameters=True: its search, and the bitmap that it reduces."""

from __future__ import annotations

from pathlib import Path

from support.builders import CpuTrace
from support.required import shared_repro

from stepsplit.analyzer import Report, analyze

PAIR = [("0", "default_pg", [0, 1])]
SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
ENGINE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


def job(folder: Path, *, search: float, bitmap: float) -> Report:
    """Two ranks, three steps of 1000 us: a search in the forward, a backward, a bucket of 100 and
    after that a bitmap of so many us, and the optimizer."""
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, PAIR)
        for step in range(3):
            at, seq = 1_000 * step, 2 * step
            trace.step(step, at, at + 1_000).op("aten::mm", at, at + 100)
            trace.op(SEARCH, at + 100, at + 100 + search)
            trace.op("aten::mm", at + 100 + search, at + 400)
            trace.op(ENGINE, at + 395, at + 405)
            trace.all_reduce(at + 400, at + 401, at + 500, group="0", seq=seq, tid=101)
            trace.all_reduce(at + 402, at + 500, at + 500 + bitmap, group="0", seq=seq + 1,
                             tid=101, nelems=50)  # fmt: skip
            trace.flight[-1]["input_dtypes"] = ["Int"]
            trace.annotation("wait", at + 405, at + 500 + bitmap)
            trace.op("aten::mm", at + 500 + bitmap, at + 1_000)
        trace.write(folder)
    return analyze(folder)


def test_a_search_that_costs_much_is_a_finding(tmp_path: Path) -> None:
    (found,) = [
        one
        for one in job(tmp_path, search=50, bitmap=30).findings
        if one.code == "find_unused_parameters"
    ]
    assert (found.gain_ns, found.measured_ns) == (80_000, 80_000)
    assert found.message == (
        "DDP searches for unused parameters in each step (find_unused_parameters=True): its walk "
        "over the graph takes 0.05 ms, and an all_reduce of 200 B says which were used, exposed "
        "for 0.03 ms; it is needed only if some parameters get no gradient"
    )


def test_one_that_costs_little_is_named_all_the_same(tmp_path: Path) -> None:
    report = job(tmp_path, search=1, bitmap=2)
    assert "find_unused_parameters" not in [one.code for one in report.findings]
    (note,) = [row for row in report.warnings if row.code == "find_unused_parameters"]
    assert note.message.endswith("get no gradient; without it a step saves 0.00 ms")


def test_a_recorded_job_names_it() -> None:
    report = analyze(shared_repro("users3/find_unused") / "red")
    said = [*report.findings, *report.warnings]
    (found,) = [one for one in said if one.code == "find_unused_parameters"]
    assert "an all_reduce of 200 B says which were used" in found.message
