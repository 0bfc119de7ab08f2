"""Coverage-guided fuzzing of what parses files: fuzz_readers.py TARGET FOLDER [-runs=20000].

Needs atheris. FOLDER keeps the inputs that reached new code, and failing ones; the options after it
are libFuzzer's. A failure is any exception but a StepsplitError, or a message of several lines.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["stepsplit"]):
    from stepsplit.analyzer.analysis import examine
    from stepsplit.analyzer.errors import StepsplitError
    from stepsplit.analyzer.model.config_file import parse_job
    from stepsplit.analyzer.readers.kernel_rules import read_rules
    from stepsplit.analyzer.readers.registry import read_files
    from stepsplit.analyzer.report.io import from_json
    from stepsplit.collectors.formats import run_spec

from fuzz.damage import damaged, others, traces

SAMPLES = Path(__file__).parents[2] / "sample_traces"
RULES = Path(__file__).parents[2] / "analyzer" / "readers" / "rules.toml"
MOST_BYTES = 1 << 16

# What is fuzzed: each function reads a file as one kind of input.


def read_any_file(file: Path) -> None:
    """All readers of traces, dumps and logs, by what the file begins with."""
    for found in read_files(file):
        assert "\n" not in found.refused, found.refused


def analyze_trace(file: Path) -> None:
    examine((file,), 1)


def read_run_file(file: Path) -> None:
    try:
        run_spec.from_json(file.read_bytes())
    except ValueError as error:
        assert "\n" not in str(error), error


def read_job_file(file: Path) -> None:
    parse_job(file.read_text(errors="replace"))


def read_report_file(file: Path) -> None:
    from_json(file.read_bytes())


# What the fuzzing of each begins with.


def list_files() -> Iterator[bytes]:
    yield from others().values()
    yield from traces()


def list_runs() -> Iterator[bytes]:
    return (file.read_bytes() for file in sorted(SAMPLES.glob("*/run.json")))


def list_jobs() -> Iterator[bytes]:
    yield (SAMPLES.parent / "docs" / "job.toml").read_bytes()


def list_reports() -> Iterator[bytes]:
    return (file.read_bytes() for file in sorted(SAMPLES.glob("pp2*/report.json")))


@dataclass(frozen=True)
class Target:
    """What is fuzzed, the name of its file and its first inputs."""

    read: Callable[[Path], None]
    name: str
    list_seeds: Callable[[], Iterator[bytes]]


TARGETS = {
    "files": Target(read_any_file, "rank0", list_files),
    "traces": Target(analyze_trace, "rank0_trace.json", traces),
    "run": Target(read_run_file, "run.json", list_runs),
    "job": Target(read_job_file, "job.toml", list_jobs),
    "rules": Target(read_rules, "rules.toml", lambda: iter((RULES.read_bytes(),))),
    "report": Target(read_report_file, "report.json", list_reports),
}


def mutate(data: bytes, most_bytes: int, seed: int) -> bytes:
    """Half of the time what happens to files, else libFuzzer's own mutations."""
    random = Random(seed)
    if random.random() < 0.5:
        return damaged(random, data)[:most_bytes]
    return atheris.Mutate(data, most_bytes)


def main() -> None:
    """Fuzzes the target until libFuzzer's options end it, or an input fails."""
    name, folder, *options = sys.argv[1:]
    target, corpus = TARGETS[name], Path(folder)
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.list_seeds()):
        (corpus / f"seed{number}").write_bytes(seed[:MOST_BYTES])
    file = Path(tempfile.mkdtemp(prefix="stepsplit-fuzz-")) / target.name
    outcomes = Counter[str]()

    def run_one(content: bytes) -> None:
        file.write_bytes(content)
        try:
            target.read(file)
            outcomes["read"] += 1
        except StepsplitError as error:
            assert "\n" not in str(error), error
            outcomes["refused"] += 1
        if outcomes.total() % 1000 == 0:
            sys.stderr.write(f"{name}: {dict(outcomes)}\n")

    warnings.simplefilter("error")
    limits = [f"-max_len={MOST_BYTES}", "-timeout=20", "-rss_limit_mb=4096",
              f"-artifact_prefix={corpus}/failed-"]  # fmt: skip
    atheris.Setup([sys.argv[0], *limits, *options, folder], run_one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
