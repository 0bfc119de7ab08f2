"""A unique word in every text of every kind of file that is read; none of them in the copy."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fuzz.damage import others
from generate import docs_privacy
from support.builders import GpuTrace
from support.nsys_builders import Export

from stepsplit.analyzer.readers.file_kinds import KINDS
from stepsplit.analyzer.readers.kineto.block_events import CATEGORIES
from stepsplit.analyzer.redact import redact_recording
from stepsplit.analyzer.redact.copies import COPIES
from stepsplit.analyzer.redact.fields import EVENT_ARGS
from stepsplit.analyzer.redact.names import is_public
from stepsplit.collectors.formats.run_spec import RUN_FILE

JOB = "job.toml"
COPIED = {kind.name for kind in KINDS if kind.redact_as}
WORD = "zqplant"
"""The part that all planted words have in common; none is made of public words."""

SAMPLES = Path(__file__).parents[2] / "sample_traces"


def unpack(folder: Path) -> bytes:
    """The names, the bytes and the unpacked bytes of all files of a folder."""
    content = b""
    for path in sorted(folder.rglob("*")):
        content += path.relative_to(folder).as_posix().encode() + b"\n"
        if path.is_file():
            packed = path.read_bytes()
            content += packed + (gzip.decompress(packed) if path.name.endswith(".gz") else b"")
    return content


# What is planted: at each place of a JSON value that is a text or a key, one after the other.

Path_ = tuple[Any, ...]


def list_texts(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The paths of all texts in a JSON value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from list_texts(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from list_texts(inner, (*path, number))
    elif isinstance(value, str):
        yield path


def list_objects(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    if isinstance(value, dict):
        yield path
        value = list(value.items())
    elif isinstance(value, list):
        value = list(enumerate(value))
    else:
        return
    for key, inner in value:
        yield from list_objects(inner, (*path, key))


FORMS: tuple[Callable[[str], str], ...] = (
    lambda text: WORD,
    lambda text: text + WORD,
    lambda text: WORD + text,
    lambda text: f"{text}_{WORD}" if "::" not in text else text.replace("::", f"::{WORD}_", 1),
    lambda text: f"{text}({WORD})\n{WORD}",
    lambda text: f"{text} 2001:db8::{WORD}%eth0 https://u:{WORD}@h/ /home/{WORD}/a.py(1): {WORD}",
)
"""Ways to plant the word in a text of the file."""


def plant_values(body: Any, form: Callable[[str], str], fixed: Callable[[Path_], bool]) -> Any:
    """The value with the word in all texts, apart from those by which the file is recognized."""
    planted = copy.deepcopy(body)
    for path in list_texts(body):
        if not fixed(path):
            place = planted
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = form(place[path[-1]])
    return planted


def plant_keys(body: Any) -> Any:
    """The value with keys of other values in all objects."""
    planted = copy.deepcopy(body)
    for path in list_objects(body):
        place = planted
        for step in path:
            place = place[step]
        values = list(place.values())[:1]
        place |= {
            f"{WORD} key": WORD, f"{WORD} list": [WORD, {WORD: WORD}], f"{WORD} deep": {"a": WORD},
        }  # fmt: skip
        for value in values:
            place[f"{WORD} same"] = value
    return planted


# A file of each kind: its name, and its bytes with the word planted in each way.


def build_trace() -> dict[str, Any]:
    trace = GpuTrace(0, 2, host="login7", groups=[("0", "default_pg", [0, 1])])
    trace.step(1, 0, 1000).step(2, 1000, 2000)
    for start in (0, 1000):
        trace.kernel("void at::native::vectorized_kernel<float>(int)", start, start + 300)
        trace.all_reduce(start + 300, start + 500)
    every: dict[str, Any] = dict.fromkeys(map(str, EVENT_ARGS), "text")
    names = (
        "aten::mm", "autograd::engine::evaluate_function: MmBackward0", "ProfilerStep#7",
        "stepsplit::send group=0 src=0 dst=1 tag=a n=0 bytes=4 dtype=float", "train step 3",
        "stepsplit::dispatch library=DeepEP group=text tokens=8 bytes=64 dtype=bfloat16",
        "FSDP::pre_forward (blocks.0)", "Optimizer.step#AdamW.step", "nn.Module: Linear_0", "text",
        "/usr/lib/python3.11/site-packages/torch/nn/modules.py(93): forward", "cudaLaunchKernel",
        "ncclDevKernel_AllReduce", "triton_poi_fused_add_0", "<built-in method text of T at 0x7f>",
        "nccl:all_reduce", "Memcpy HtoD (Pageable -> Device)", "hcom_allReduce_",
    )  # fmt: skip
    for category in (*CATEGORIES, "cuda_runtime", "gpu_memcpy", "other", ""):
        for number, name in enumerate(names):
            args = every if number == 0 else {"Collective name": "text", "text": "text"}
            trace.events.append({
                "ph": "X", "cat": category, "name": name, "pid": "text", "tid": "text",
                "id": "text", "ts": 10.0, "dur": 1.0, "s": "g", "bp": "e", "args": dict(args),
                "text": "text",
            })  # fmt: skip
    for phase in ("M", "i", "s", "f", "b", "e", "n", "B", "E", "C", "text"):
        for name in ("process_name", "thread_name", "process_labels", "text"):
            trace.events.append({
                "ph": phase, "name": name, "pid": "text", "tid": "text", "ts": 1, "cat": "text",
                "args": {"name": "thread 1 (pt_main_0)", "labels": "CPU", "sort_index": "text"},
            })  # fmt: skip
    more = {"traceName": "text", "trace_id": "text", "displayTimeUnit": "ms", "text": ["text"]}
    body: dict[str, Any] = trace.body() | more
    return body


def dump_json(body: Any) -> bytes:
    return json.dumps(body).encode()


def plant_trace() -> Iterator[bytes]:
    body = build_trace()
    for form in FORMS:
        yield dump_json(plant_values(body, form, lambda path: path[-1:] == ("ph",)))
        ordered = {"traceEvents": body["traceEvents"]} | body  # the other fields come after it
        yield dump_json(plant_values(ordered, form, lambda path: path[-1:] == ("ph",)))
    yield dump_json(plant_keys(body)) + f'{WORD} {{"a": "{WORD}"}}'.encode()
    yield dump_json(plant_values(body, FORMS[1], lambda path: path[0] != "traceEvents"))
    yield dump_json(plant_values(body["traceEvents"], FORMS[1], lambda path: path[-1:] == ("ph",)))
    broken = dump_json(plant_values(body, FORMS[0], lambda path: path[-1:] == ("ph",)))
    yield broken.replace(b'"dur": 1.0', b'"dur": NaN', 3)[:-300]  # repaired entries, then a cut


def plant_json(name: str) -> Iterator[bytes]:
    body = json.loads((SAMPLES / "h100_fsdp2" / name).read_bytes())
    body |= {"gpu_note": "text", "argv": ["text"]}
    for form in FORMS:
        yield dump_json(plant_values(body, form, lambda path: path == ("schema",)))
    yield dump_json(plant_keys(body))


def plant_flight() -> Iterator[bytes]:
    body = json.loads(others()["flight.json"])
    body["entries"] = body["entries"][:3]
    frame = {"name": "forward", "filename": "/x/torch/nn/modules.py", "line": 3}
    for entry in body["entries"]:
        entry |= {"frames": [frame], "pg_name": "text", "pg_desc": "text", "thread_id": "text"}
    for form in FORMS:
        yield dump_json(plant_values(body, form, lambda path: False))
    yield dump_json(plant_keys(body))
    yield pickle.dumps(plant_values(body, FORMS[0], lambda path: False), 4)
    yield pickle.dumps(plant_keys(body), 2)
    yield dump_json(plant_values(body["entries"], FORMS[1], lambda path: False))


LOG = """\
NCCL version 2.21.5+cuda12.4
{at}NCCL version 2.21.5+cuda12.4
{at}Bootstrap : Using eth0:2001:db8:12::7<0>
{at}NET/IB : Using [0]mlx5_0:1/IB/SHARP [RO]; OOB ib0:fe80::f652:1403:7b:cba1%ib0<0>
{at}NET/IB: NCCL Dev 0 GID fe80:0000:0000:0000:f652:1403:007b:cba1 GUID 0xf4521403007bcba1
{at}NCCL_SOCKET_IFNAME set by environment to eth0.
{at}NCCL_ALGO set by environment to Ring,Tree.
{at}Comm config cgaClusterSize reset to NCCL_CGA=4
{at}Using network IB
{at}Assigned NET plugin IB to comm
{at}ncclCommInitRank comm 0xa0 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1b000 commId 0xc0 - Init START
{at}comm 0xa0 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1b000 commId 0xc0 - Init COMPLETE
{at}ncclCommSplit comm 0xb0 rank 0 nranks 1 cudaDev 0 parent 0xa0 splitCount 1 color -1 key 0 - Init COMPLETE
{at}comm 0xa0 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0
{at}Init timings - ncclCommInitRank: rank 0 nranks 2 total 0.53 (kernels 0.1)
{at}16 coll channels, 16 nvls channels, 32 p2p channels, 2 p2p channels per peer
{at}Channel 00/02 :    0   1
{at}Ring 00 : 1 -> 0 -> 1
{at}Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1 comm 0xa0
{at}Channel 00/0 : 1[1] -> 0[0] [send] via NET/IB/0/GDRDMA
{at}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
{at}Channel 00 : 0[0] -> 1[1] via direct shared memory
{at}Pattern 4, crossNic 0, nChannels 16, bw 20.0/20.0, type NVL/PIX, sameChannels 1
{at}=== System : maxBw 48.0 totalBw 370.8 ===
{at}AllReduce: 4096 Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..7}}
{at}AllReduce: 4096 Bytes -> Algo 1 proto 2 time 12.34
{at}AllGather [Symmetric]: 4096 Bytes -> Kernel AllGather_LL nchannels 8
{at}  Algorithm   |   Tree   |   Ring   |
{at}  Protocol    |    LL    |   LL128  |
{at} Max NThreads |    512   |    640   |
{at}   AllReduce  | 6.8/ 4.4 | 6.6/ 8.9 |
{at}AllReduce: opCount 1f sendbuff 0x7f recvbuff 0x7e count 8 datatype 7 op 0 root 0 comm 0xa0 [nranks=2] stream 0x9 task 0 globalrank 1
{at}misc/socket.cc:484 WARN socketStartConnect: Connect to 10.1.2.3<4000> failed
node0:10:20 [0] misc/cudawrap.cc:36 NCCL WARN Cuda failure 'out of memory' 2c:ea:7f:a1:b2:c3
"""  # noqa: E501


def plant_log() -> Iterator[bytes]:
    lines = LOG.format(at="node0:10:20 [0] NCCL INFO ").splitlines()
    yield "\n".join(lines).encode()
    planted = [f"starting with --password {WORD}"]
    for line in lines:
        tokens = re.split(r"([ :,/=<>\[\]|]+)", line)
        for at, token in enumerate(tokens):
            if token.strip(" ") and token not in ("NCCL", "INFO", "WARN"):
                for form in (
                    WORD,
                    token + WORD,
                    WORD + token,
                    f"{token} {WORD}",
                    f"{WORD}[{token}",
                ):
                    planted.append("".join([*tokens[:at], form, *tokens[at + 1 :]]))
    docker = [json.dumps({"log": line, "stream": WORD, "time": WORD}) for line in lines]
    yield "\n".join([*lines, *planted, *docker, f"{lines[5]}{lines[6]} {WORD}"]).encode()


TOML = """\
# zqplant
zqplant = "zqplant"
"zqplant.key" = 1
[model]
preset = "zqplant"
name = "zqplant"
norm = "zqplant"
layers = 4
zqplant = [{zqplant = "zqplant"}]
when = 2020-01-01
[training]
micro_batch = 1
seq_len = "zqplant"
offload = ["optimizer", "zqplant"]
recompute = "full"
[hardware]
preset = "h100-sxm"
file = "/home/zqplant/zqplant.toml"
intra = {preset = "zqplant", bytes_per_s = 4.5, zqplant = 1}
[zqplanted.zqplant]
a = "zqplant"
"""

SWEEP = f"# nThread 1 nGpus 2 {WORD}\n 1048576 131072 float {WORD} -1 50.00 20.97 10.49 0\n"
GOLDEN = {
    "iteration-time": {"start_step": 1, "end_step": 2, "step_interval": 1, "values": {"1": WORD}}
}


PLANTED: Mapping[str, tuple[str, Callable[[], Iterator[bytes]]]] = {
    "torch.profiler trace": ("rank0_trace.json", plant_trace),
    RUN_FILE: (RUN_FILE, lambda: plant_json(RUN_FILE)),
    "rank record": ("rank0_record.json", lambda: plant_json("rank0_record.json")),
    "Flight Recorder dump": (f"{WORD}_rank_0", plant_flight),
    "NCCL log": (f"{WORD}.log", plant_log),
    JOB: (JOB, lambda: iter([TOML.encode()])),
    "Nsight Systems export": (f"{WORD}.sqlite", lambda: iter([b""])),  # written by its builder
    "rank table": (f"{WORD}.parquet", lambda: iter([b"PAR1" + WORD.encode()])),
    "memory snapshot": (f"{WORD}.pickle", lambda: iter([
        others()["memory.pickle"].replace(b"active_allocated", b"active_al" + WORD.encode())
    ])),
    "execution trace": (f"{WORD}.json", lambda: iter([
        others()["et.json"].replace(b'"attrs"', f'"{WORD}": "{WORD}", "attrs"'.encode())
    ])),
    "NCCL Inspector dump": (f"{WORD}.jsonl", lambda: iter([
        others()["inspector.jsonl"].replace(b'"h"', f'"{WORD}"'.encode())
    ])),
    "golden values": (f"{WORD}.json", lambda: iter([dump_json(GOLDEN)])),
    "nccl-tests output": (f"{WORD}.txt", lambda: iter([SWEEP.encode()])),
    "training log": (f"{WORD}.log", lambda: iter([
        others()["train.log"].replace(b"lm loss", WORD.encode())
    ])),
}  # fmt: skip
"""The name of a file of each kind, and its contents with the word in it."""


def test_a_word_is_planted_in_every_kind_of_file() -> None:
    assert set(PLANTED) == {kind.name for kind in KINDS}
    assert set(COPIES) == {kind.redact_as for kind in KINDS} - {""}


@pytest.mark.parametrize("kind", PLANTED)
def test_no_planted_word_is_in_the_copy(kind: str, tmp_path: Path) -> None:
    name, contents = PLANTED[kind]
    for number, content in enumerate(contents()):
        source, copy = tmp_path / f"{WORD}{number}" / f"rank0 {WORD}", tmp_path / f"copy{number}"
        source.mkdir(parents=True)
        GpuTrace().step(1, 0, 10).kernel("gemm", 1, 5).write(source.parent)  # so that there is one
        if kind == "Nsight Systems export":
            Export().kernel(WORD, 1, 2).write(source / name)
        else:
            (source / name).write_bytes(content)
        if kind == "torch.profiler trace":  # packed too, with its name in the header
            with gzip.GzipFile(str(source / f"{WORD}.json.gz"), "wb") as packed:
                packed.write(content)

        done = redact_recording([source.parent], copy)

        found = unpack(copy)
        at = found.lower().find(WORD.encode())
        assert at < 0, (number, found[max(at - 200, 0) : at + 100])
        copied = len([file for file in done.files if "folder" in file or "rank0/" in file])
        left_out = [why for place, why in done.left_out if WORD in Path(place).name]
        if kind in COPIED:
            assert copied >= 1, (number, done)
        else:
            assert left_out == [kind], (number, done)


def test_what_is_public_is_copied(tmp_path: Path) -> None:
    """The forms of the copied kinds let through what a recording needs."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / JOB).write_text(TOML)
    (tmp_path / "run" / "nccl.log").write_bytes(next(plant_log()))

    redact_recording([tmp_path / "run"], tmp_path / "copy")

    assert tomllib.loads((tmp_path / "copy" / JOB).read_text()) == {
        "model": {"preset": "text1", "name": "text1", "norm": "text1", "layers": 4},
        "training": {
            "micro_batch": 1, "seq_len": "text1", "offload": ["optimizer", "text1"],
            "recompute": "full",
        },
        "hardware": {
            "preset": "h100-sxm", "intra": {"preset": "text1", "bytes_per_s": 4.5},
        },
    }  # fmt: skip


def test_the_page_lists_what_is_copied() -> None:
    page = docs_privacy.PAGE.read_text()
    assert page == docs_privacy.build_page(page)
    assert "`traceEvents`" in page  # the page begins with what a recording holds


@pytest.mark.parametrize(
    "text",
    ["10.1.2.3", "2001:db8:12::7", "::ffff:10.1.2.3", "[fe80::1%eth0]:4000", "2c:ea:7f:a1:b2:c3",
     "2c-ea-7f-a1-b2-c3", "fe80:0000:0000:0000:f652:1403:007b:cba1", "0xf4521403007bcba1",
     "AKIAIOSFODNN7EXAMPLE", "alice@acme.org", "YWxpY2VAYWNtZS5vcmc=", "mlx5_0",
     "/home/alice/a.py"],
)  # fmt: skip
def test_an_address_or_a_secret_is_of_no_form(text: str, tmp_path: Path) -> None:
    body = build_trace()
    texts = ["ts", "dur", "id"]  # forms of digits, tested above
    planted = plant_values(
        body, lambda _: text, lambda path: path[-1:] == ("ph",) or path[-1] in texts
    )
    (tmp_path / "rank0_trace.json").write_bytes(dump_json(planted))

    redact_recording([tmp_path / "rank0_trace.json"], tmp_path / "copy")

    assert text.lower().encode() not in unpack(tmp_path / "copy").lower()


@pytest.mark.parametrize(
    "text",
    ["10.1.2.3", "10.1.2.3:29500", "<10.1.2.3>", "_10_1_2_3", "v7.66.55", "2031-12-24", "a@b",
     "c3d05389", "3832c3d05389d4f", "c5f8a78",
     "_0c_42_a1_2c_3b_9d", "0c-42-a1-2c-3b-9d", "0c42.a12c.3b9d"],
)  # fmt: skip
def test_nor_is_one_after_a_public_name(text: str, tmp_path: Path) -> None:
    (recording := tmp_path / "recording").mkdir()
    ops, kernel = ("aten::mm", "nccl:all_reduce"), "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    assert all(map(is_public, (*ops, kernel)))
    trace = GpuTrace().step(1, 0, 10)
    for start, joint in enumerate(("", " ")):
        for op in ops:
            trace.annotation(f"{op}{joint}{text}", start, start + 1)
        trace.kernel(f"{kernel}{joint}{text}", start, start + 1)
    trace.write(recording)

    redact_recording([recording], tmp_path / "copy")

    found = unpack(tmp_path / "copy")
    assert text.encode() not in found and b"nccl" in found


@pytest.mark.parametrize(
    "text", ["k4x9q", "464v6p", "d1n06n", "8jT9W7", "56a7h1", "9023add89b", "73105"]
)
@pytest.mark.parametrize("joint", ["", "_"])
def test_nor_is_a_short_id_after_the_name_of_an_op(joint: str, text: str, tmp_path: Path) -> None:
    """Such ids are made of single letters, which are public words, and short numbers."""
    (recording := tmp_path / "recording").mkdir()
    trace = GpuTrace().step(1, 0, 10)
    names = ("aten::mm{}", "aten::{}", "{}Backward0", "nccl:all_reduce{}", "nccl:send{} 3->1024")
    for start, name in enumerate(names):
        trace.annotation(name.format(joint + text), start, start + 1)
    trace.write(recording)

    redact_recording([recording], tmp_path / "copy")

    assert text.encode() not in unpack(tmp_path / "copy")


@pytest.mark.parametrize(
    "name",
    ["aten::conv2d", "aten::_fft_r2c", "aten::special_i0e", "aten::_weight_int4pack_mm",
     "AvgPool2DBackward0", "Log1PBackward0", "MmBackward0",
     "_c10d_functional::all_reduce", "c10d::allreduce_", "hcom_allReduce__568_0_1",
     "nccl:send 1023->1024", "Torch-Compiled Region: 12/3", "PyTorch Profiler (2)"],
)  # fmt: skip
def test_digits_of_torch_stay_in_the_name_of_an_op(name: str, tmp_path: Path) -> None:
    (recording := tmp_path / "recording").mkdir()
    GpuTrace().step(1, 0, 10).annotation(name, 1, 2).write(recording)

    redact_recording([recording], tmp_path / "copy")

    assert json.dumps(name).encode() in unpack(tmp_path / "copy")
