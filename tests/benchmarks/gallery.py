"""What stepsplit says of recordings that others published: python tests/benchmarks/gallery.py

Fetches each from its repository at a stated commit with git, runs the stepsplit of this environment
on it, and prints docs/gallery.md. What was known before is written here by hand, from the place
that it names.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill


@dataclass(frozen=True)
class Exhibit:
    """A published recording.

    Attributes:
        title: what was recorded.
        repository: OWNER/NAME on GitHub.
        commit: the commit that it is taken from.
        paths: its files or folders there; of a comparison, the earlier one first.
        command: the command of stepsplit.
        known: what was known of it before, and who says so.
        seen: what the command's answer has to do with that.
        sections: the first words of the sections of the answer that are shown beside the first two.
    """

    title: str
    repository: str
    commit: str
    paths: tuple[str, ...]
    command: str
    known: str
    seen: str
    sections: tuple[str, ...] = ("TOP BOTTLENECKS",)


_NANOGPT = "KellerJordan/modded-nanogpt", "f411b3d346aa52d3504324ca93c230fd84c6c07f"
_LENS = "AMD-AGI/TraceLens", "171dd74721ca1ec45709e5805b68ae1f65e27811"
_NSYS = "GindaChen/nsys-ai", "ab196ea237d90e8df5270293d14cff1a95032500"
_NVRX = "NVIDIA/nvidia-resiliency-ext", "d8686d9c7015c39ce91dd01788c0ab111a24818b"
_HTA = "facebookresearch/HolisticTraceAnalysis", "f4d0062c382f42bd8a74838bcdad1916c7d5d2da"
_HOOK = "records/track_1_short/2025-10-31_AdamSyncGradientHook/modded-nanogpt-"
_HURT = "Faults were injected (fault_injection.log) into"
_ONE_OF_SEVERAL = (
    "One rank of several was recorded: what it computes, copies and idles is exact, its waits are"
    " estimates, and the answer says so first."
)

EXHIBITS = (
    Exhibit(
        "modded-nanogpt, 8 x H100",
        *_NANOGPT,
        (
            "records/track_1_short/2025-12-11_NorMuonOptimsAndFixes/profiler-example-traces",
        ),
        "analyze",
        "The state before a change that made the optimizers cheaper on the host and the GPU: its"
        " README says 131.49 s instead of 132.72 s for a training.",
        "The ranks wait in the optimizer, for the host of one rank, in NorMuon.step; every second"
        " step also runs DistAdam. The forward and backward are alike on all ranks.",
        ("TOP BOTTLENECKS", "PARTS OF THE MODEL"),
    ),
    Exhibit(
        "modded-nanogpt, gradients reduced in hooks of the backward",
        *_NANOGPT,
        (f"{_HOOK}current-gpu-rank-00-chrome-trace.json.gz",
         f"{_HOOK}hook-gpu-rank-00-chrome-trace.json.gz"),
        "compare",
        "Its README: runs of 141.51 s become 140.81 s, 0.5 % (4 and 10 runs).",
        "The recorded steps say 0.8 %, less waiting and a shorter optimizer; that one step a side"
        " gives no noise to hold it against is said in the first line.",
        ("mean step of a rank", "parts of the model"),
    ),
    Exhibit(
        "DeepSeek-V3, one rank of EP 64, H800",
        "deepseek-ai/profile-data",
        "449602428a1b023acb8a505d4f34fef536535db6",
        ("train.json",),
        "analyze",
        "Its README: a pair of forward and backward chunks of four MoE layers, EP 64, TP 1,"
        " all_to_all overlapped by DualPipe; routing is balanced.",
        "EP 64 and 96 % of the all_to_all hidden behind compute, from kernels of DeepEP that carry"
        ' no arguments and no "nccl" in their names.',
        ("TOP BOTTLENECKS", "PARTS OF THE MODEL"),
    ),
    Exhibit(
        "Megatron-LM, TP 2, V100",
        "NVIDIA/Megatron-LM",
        "44a8eb04302eea40ca5f88bb17af550ab956d614",
        ("tp2/result",),
        "analyze",
        "Nothing is stated; the kernels of rank 1's 13 all_reduces take 48.4 ms, those of rank 0's"
        " 0.3 ms.",
        "Rank 1's 48 ms are waiting: rank 0 comes late, held up by its host; what is moved takes"
        " 0.2 ms.",
    ),
    *(
        Exhibit(
            f"Megatron-LM with experts, 16 ranks, a hang: {fault}",
            *_NVRX,
            (f"tests/attribution/unit/fr_traces/{case}",),
            "hang",
            f"{_HURT} ranks {hurt}. Its own tool: {theirs}.",
            seen,
        )
        for case, fault, hurt, theirs, seen in (
            ("gpu_error_1st", "GPU error, first", "12 and 14", "rank 12",
             "Rank 12. Rank 14 is stuck in a call that others completed, and waits for 12 itself:"
             " the dumps do not show that it would not have gone on."),
            ("gpu_error_2nd", "GPU error, second", "9 and 14", "ranks 9 and 14", "Ranks 9 and 14."),
            ("lock_gil_1st", "GIL held, first", "9 and 14", "ranks 9 and 14", "Ranks 9 and 14."),
            ("lock_gil_2nd", "GIL held, second", "10 and 15", "ranks 10 and 15",
             "Ranks 10 and 15."),
        )
    ),
    Exhibit(
        "ResNet, DDP 8 with recomputation, MI300X",
        *_LENS,
        ("tests/traces/mi300/resnet_act_checkpoint.json.gz",),
        "analyze",
        "The file's name says recomputation. Its RCCL kernels are called ncclDevKernel_Generic,"
        " whatever they do.",
        f"DDP with recomputation. {_ONE_OF_SEVERAL}",
    ),
    Exhibit(
        "gpt-oss served by vLLM, one rank of TP 8, B200",
        *_LENS,
        ("tests/traces/b200/eager_trace.json.gz",),
        "analyze",
        "The file's name says eager mode: each kernel is launched by itself.",
        "Idle for 87 % of the time, bound by launches. The all_reduces of symmetric memory are"
        f" recognized. {_ONE_OF_SEVERAL}",
        ("TOP BOTTLENECKS", "PARTS OF THE MODEL"),
    ),
    Exhibit(
        "Two H100 under Nsight Systems, before and after",
        *_NSYS,
        ("tests/fixtures/mfu_2gpu_before.sqlite", "tests/fixtures/mfu_2gpu_after.sqlite"),
        "compare",
        "nsys-ai's docs (docs/user/reading-a-diff.md): neutral; the flash_fwd_kernel takes 31.6 ms"
        " less, its calls are 60 instead of 68, SendRecv takes 8.3 ms more, and the step changes by"
        " 0.01 %.",
        "The same: less compute, because fewer calls were recorded, more waiting and idle time, and"
        " a step of equal length. How much of SendRecv is waiting is said too.",
        ("mean step of a rank", "kernels per rank"),
    ),
    Exhibit(
        "An older trace, 2 x V100",
        *_HTA,
        ("tests/data/df_index_resolver/df_index_resolver.json.gz",),
        "analyze",
        "A file of HTA's tests, of 2020: its collectives carry no group and no size.",
        "All of it is split; that the 2,020 all_reduces cannot be separated into waiting and"
        f" transfer is said. {_ONE_OF_SEVERAL}",
    ),
    Exhibit(
        "DDP, 2 x A100",
        *_HTA,
        ("tests/data/nccl_parser_config/nccl_data.json.gz",),
        "analyze",
        "A file of HTA's tests, of which it reads the arguments of NCCL's kernels.",
        f"The GPU idles for 81 % of the step, bound by launches. {_ONE_OF_SEVERAL}",
    ),
)  # fmt: skip

_TITLE = """\
# Recordings that others published

What `stepsplit` says of public traces, fetched from their repositories at the commits named here,
and what was known of them before. `python tests/benchmarks/gallery.py` makes this page; no file of
them is in this repository. Of long answers some sections are left out, and no lines. For jobs whose
truth was planted see [injected faults](injected_faults.md) and [accuracy](accuracy.md).
"""

_CAUSES = """\
## The first cause, beside what papers report

| by | jobs | right |
| --- | --- | --- |
| EROICA (arXiv 2506.08528) | problems in production on clusters of up to 100,000 GPUs | 97.5 % diagnosed |
| StageFrontier (arXiv 2606.06751) | faults injected into data parallel jobs | 50 of 50 among the first two |
| stepsplit | 648 simulated jobs ([causes](causes.md)) | 646: first finding and exactly its ranks |
| stepsplit | 29 trainings by frameworks of others on a CPU with an injected fault ([injected faults](injected_faults.md)) | 28 first |
| stepsplit | nine real jobs of three roles on a CPU with a slow part ([roles](roles.md)) | 9 first |
| stepsplit | the four published hangs above | 3 with all ranks, 1 with one of two: those that NVIDIA's tool names |

These are not of the same jobs and cannot be compared: the papers' are of production or of GPUs, those of stepsplit of simulators and
small machines. Nothing is known yet of how often it is right on a large cluster in production.
"""  # noqa: E501


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(description="Run stepsplit on published recordings.")
    parser.add_argument(
        "--clones", type=Path, metavar="DIR",
        help="where clones lie as OWNER/NAME, or are made and stay",
    )  # fmt: skip
    args = parser.parse_args(argv)
    with nullcontext(args.clones) if args.clones else tempfile.TemporaryDirectory() as clones:
        parts = [show(exhibit, Path(clones)) for exhibit in EXHIBITS]
    sys.stdout.write("\n".join([_TITLE, *parts, _CAUSES]))


def show(exhibit: Exhibit, clones: Path) -> str:
    """The section of the page."""
    with tempfile.TemporaryDirectory() as above:
        # A run is called like its folder.
        folder = Path(above) / Path(exhibit.repository).name
        places = extract(exhibit, clones, folder)
        environment = os.environ | {"COLUMNS": "100", "STEPSPLIT_CACHE": "off"}
        command = [str(Path(sys.executable).with_name("stepsplit")), exhibit.command, *places]
        ran = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
        # A hang that is found ends with 1.
        if ran.returncode not in (0, 1) or not ran.stdout:
            raise SystemExit(f"{exhibit.title}: {ran.stderr}")
    sections = ran.stdout.rstrip().split("\n\n")
    chosen = [one for one in sections[2:] if one.startswith(exhibit.sections)]
    answer = "\n\n".join([*sections[:2], *chosen])
    lines = "\n".join(line.rstrip() for line in answer.splitlines())
    known, seen = (
        fill(text, 100, break_on_hyphens=False)
        for text in (f"Known before: {exhibit.known}", exhibit.seen)
    )
    files = ", ".join(f"`{path}`" for path in exhibit.paths)
    where = f"[{exhibit.repository}](https://github.com/{exhibit.repository}/tree/{exhibit.commit})"
    return (
        f"## {exhibit.title}\n\n{where}, {files}\n\n{known}\n\n"
        f"{seen}\n\n```\n$ stepsplit {exhibit.command} {' '.join(places)}\n{lines}\n```\n"
    )


def extract(exhibit: Exhibit, clones: Path, folder: Path) -> list[str]:
    """Writes the files of the exhibit into the folder, and returns their names there."""
    clone = clones / exhibit.repository
    if not clone.exists():
        clone.mkdir(parents=True)
        _git(clone, "init", "--quiet", "--bare")
        _git(clone, "remote", "add", "origin", f"https://github.com/{exhibit.repository}")
    try:
        _git(clone, "cat-file", "-e", f"{exhibit.commit}^{{tree}}")
    except subprocess.CalledProcessError:
        _git(clone, "fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", exhibit.commit)
    names = []
    for path in exhibit.paths:
        packed = _git(clone, "archive", exhibit.commit, "--", path)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            files = [one for one in archive.getmembers() if one.isfile()]
            for one in files:
                # A folder becomes its last name, without folders above it.
                one.name = str(Path(one.name).relative_to(Path(path).parent))
                archive.extract(one, folder, filter="data")
        names.append(Path(path).name)
    return names


def _git(clone: Path, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", "--git-dir", clone, *arguments], stdout=subprocess.PIPE, check=True
    ).stdout


if __name__ == "__main__":
    main()
