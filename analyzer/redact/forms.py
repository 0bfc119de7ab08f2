"""The forms of texts that a copy may hold, and how a text becomes one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from stepsplit.analyzer.model.hardware_config import list_families, list_link_names
from stepsplit.analyzer.model.preset_names import list_hardware_names, list_model_names
from stepsplit.analyzer.readers.kineto.block_events import CATEGORIES, SUFFIX_CATEGORIES
from stepsplit.analyzer.redact.names import Names
from stepsplit.analyzer.redact.pseudonyms import Pseudonyms
from stepsplit.collectors.formats.rank_record import WHY_UNNAMED


@dataclass(frozen=True, slots=True)
class Texts:
    """What replaces texts, shared by all files of a copy."""

    pseudonyms: Pseudonyms
    names: Names

    def hide(self, kind: str, text: str) -> str:
        """The pseudonym of the text."""
        return self.pseudonyms.replace(kind, text)


@dataclass(frozen=True, slots=True)
class Form:
    """What a text of a field becomes; a number, true, false or null is copied in any field.

    says is the form in the words of docs/privacy.md. A value of nested lists has the form in each
    of its texts; any other list or object becomes an empty one.
    """

    name: str
    says: str
    copy: Callable[[Texts, str], str]
    nested: bool = False


# The registry of forms.


def _hide(kind: str) -> Callable[[Texts, str], str]:
    return lambda texts, text: texts.hide(kind, text)


def _by_name(redact: Callable[[Names, str], str]) -> Callable[[Texts, str], str]:
    return lambda texts, text: redact(texts.names, text)


def _keep(pattern: str, kind: str, made_of_words: bool = False) -> Callable[[Texts, str], str]:
    """Keeps texts that the whole pattern matches and, if asked for, are made of public words."""
    compiled = re.compile(pattern, re.ASCII)

    def copy(texts: Texts, text: str) -> str:
        known = compiled.fullmatch(text) is not None
        if known and (not made_of_words or texts.names.is_public(text)):
            return text
        return texts.hide(kind, text)

    return copy


def enumerate_words(name: str, *words: str) -> Form:
    """One of these words, else a pseudonym."""
    listed = ", ".join(f"`{word}`" for word in words)
    pattern = "|".join(map(re.escape, words))
    return Form(name, f"one of {listed}", _keep(pattern, "text"))


_DIGITS = r"[+-]?\d{1,40}(?:\.\d{1,40})?(?:[eE][+-]?\d{1,9})?|-?(?:nan|NaN|inf|Infinity)"

_VALUES = (
    r"(?:[\s\[\](),]|[+-]?\d{1,20}(?:\.\d{0,20})?(?:[eE][+-]?\d{1,4})?(?![\w.])"
    r"|True|False|None|nan|inf){0,4096}"
)
"""A number has one point: an address has more."""

_SOME_DEVICE = (
    r"(?:NVIDIA|AMD|Intel|Ascend|Habana|Gaudi|Apple|ARM|Neoverse|Tesla|Quadro|GeForce|Simulated|Test"
    r"|H\d|A\d|B\d|GH\d|GB\d|MI\d|Xeon|EPYC)[\w ()@.,+/-]{0,80}"
)

_DEVICE = re.compile(
    rf"((?:cpu|cuda|hip|xpu|npu|mps|hpu|mtia|meta)?(?::\d{{1,4}})?)( ?)({_SOME_DEVICE}|.*)", re.S
)


def _copy_device(texts: Texts, text: str) -> str:
    match = _DEVICE.fullmatch(text)
    assert match is not None  # the last alternative matches any text
    place, space, name = match.groups()
    if place and name and not space:
        place, name = "", text
    known = re.fullmatch(_SOME_DEVICE, name, re.ASCII) and texts.names.is_public(name)
    return place + space + (name if known else texts.hide("device", name))


_VERSION = re.compile(
    # Three numbers at most: four are an address.
    r"\d{1,6}(?:\.\d{1,9}){0,2}+(?!\.?\d)(?:\+(?:cpu|cu\d{1,4}|cuda\d+(?:\.\d+)?|rocm[\d.]{1,6}))?",
    re.ASCII,
)


def _copy_version(_: Texts, text: str) -> str:
    match = _VERSION.match(text)
    return match[0] if match else ""


_TRACK = re.compile(
    r"python[\d.]{0,8}|[CGNX]PU(?: \d{1,4})?|thread -?\d{1,20} \((python[\d.]{0,8}|pt_\w+)\)|pt_\w+"
    r"|stream -?\d{1,9}\s*|Spans|Traces|(?:Trace )?PyTorch Profiler(?: \(\d{1,9}\))?"
    r"|Ascend Hardware|CANN|HCCL|Communication|Overlap Analysis|Computing|Free|AI Core Freq"
    r"|(?:Group|Plane) \d{1,4}(?: Communication)?|-?\d{0,20}",
    re.ASCII,
)
"""Names of processes and threads that profilers give; programs may give others."""


def _copy_track(texts: Texts, text: str) -> str:
    if _TRACK.fullmatch(text) and ("pt_" not in text or texts.names.is_public(text)):
        return text
    is_group = text.endswith("Communication")  # the tracks of Ascend are known by this word
    return texts.hide("thread", text) + " Communication" * is_group


_MEGATRON = "MODEL_PARALLEL_GROUP"


def _copy_description(texts: Texts, text: str) -> str:
    if re.fullmatch(r"(?:[A-Za-z_]\w{0,80})?", text, re.ASCII) and texts.names.is_public(text):
        return text
    return texts.hide("description", text) + f" {_MEGATRON}" * (_MEGATRON in text.upper())


def _copy_category(texts: Texts, text: str) -> str:
    known = re.fullmatch(r"[A-Za-z_]{0,40}", text, re.ASCII) and texts.names.is_public(text)
    if known or text.lower() in CATEGORIES:
        return text
    suffix = text.lower().rpartition("_")[2]
    return suffix if suffix in SUFFIX_CATEGORIES else "other"


@lru_cache(1)
def _list_presets() -> frozenset[str]:
    return frozenset((
        *list_model_names(), *list_hardware_names(), *list_families(), *list_link_names()
    ))  # fmt: skip


_SETTING = re.compile(r"(?:\d{0,2}[A-Za-z][A-Za-z\d]{0,30}(?:, |[_ -]|(?=\Z))){1,6}", re.ASCII)


def _copy_setting(texts: Texts, text: str) -> str:
    if text in _list_presets() or (_SETTING.fullmatch(text) and texts.names.is_public(text)):
        return text
    return texts.hide("text", text)


def _copy_library_version(_: Texts, text: str) -> str:
    return text if re.fullmatch(r"\d{1,4}(?:\.\d{1,4}){0,2}", text, re.ASCII) else ""


_ROLES = (
    "rollout", "generation", "inference", "trainer", "train", "training", "actor", "policy",
    "learner", "critic", "reference", "ref", "reward", "teacher",
)  # fmt: skip

_BACKEND = r"(?:(?:cpu|cuda|xpu|npu):)?(?:nccl|gloo|mpi|ucc|xccl|hccl|rccl|none|undefined|fake)"

NUMBER = Form("number", "numbers, also as text", _keep(_DIGITS, "text"))
NUMBERS = Form("numbers", "numbers and lists of them, also as text", _keep(_VALUES, "text"), True)
VALUES = Form(
    "values", "numbers, lists of them, true, false and none; other texts become empty",
    lambda _, text: text if re.fullmatch(_VALUES, text) else "", True,
)  # fmt: skip
HOST = Form("host", "replaced: `host1`", _hide("host"))
RUN = Form("run", "replaced: `run1`", _hide("run"))
TEXT = Form("text", "replaced: `text1`", _hide("text"))
FILE = Form(
    "file", "replaced: `file1.py`; files of torch and the standard library by their public words",
    _by_name(Names.redact_file),
)  # fmt: skip
FUNCTION = Form("function", "replaced: `function1`", _by_name(Names.redact_function))
DEVICE = Form(
    "device", "`cuda:0`, and products of known vendors made of public words; else `device1`",
    _copy_device,
)  # fmt: skip
VERSION = Form("version", "the number, and `+cpu`, `+cu130` or `+rocm6.2`", _copy_version)
DUMP_VERSION = Form("format version", "the number", _copy_library_version)
BACKEND = Form(
    "backend", "a backend of torch.distributed",
    _keep(rf"(?:{_BACKEND}(?:,{_BACKEND}){{0,4}})?", "text"),
)  # fmt: skip
GROUP = Form("group", "its number; else `group1`", _by_name(Names.redact_group))
DESCRIPTION = Form(
    "description", "made of public words, as `default_pg` and `mesh_tp`; else `description1`",
    _copy_description,
)  # fmt: skip
DTYPE = Form("dtype", "made of public words; else `dtype1`", _by_name(Names.redact_dtype), True)
COLLECTIVE = Form(
    "collective", "made of public words; else its op or `collective1`",
    _by_name(Names.redact_collective),
)  # fmt: skip
SETTING = Form(
    "setting", "made of public words, or the name of a preset; else `text1`", _copy_setting, True
)
TRACK = Form("track", "names that profilers give; else `thread1`", _copy_track)
CATEGORY = Form("category", "made of public words; else what it counts as", _copy_category)
AXIS = enumerate_words("axis", "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
STATE = enumerate_words("state", "scheduled", "started", "completed")
COUNTER = enumerate_words("counter", "run.step", "torchtitan", "transformers")
DETAIL = enumerate_words("detail", "full", "thin", "none")
REASON = enumerate_words("reason", *WHY_UNNAMED)
ROLE = Form(
    "role", "usual names, as `rollout`; else `role1`",
    lambda texts, text: text if not text or text.lower() in _ROLES else texts.hide("role", text),
)  # fmt: skip
UNIT = enumerate_words("unit", "ms", "ns")
PHASE = Form(
    "phase", "a phase of the trace format; else `?`",
    lambda _, text: text if re.fullmatch(r"[XMBEiIstfbenNODPSTFpRcvVaAC(),]", text) else "?",
)  # fmt: skip
FLOW = enumerate_words("flow", "g", "p", "t", "e")
SCHEMA = enumerate_words("schema", "stepsplit.run/1", "stepsplit.rank/1")
METADATA = enumerate_words(
    "metadata", "process_name", "thread_name", "process_labels", "process_sort_index",
    "thread_sort_index",
)  # fmt: skip
KERNEL = Form(
    "kernel", "of known libraries if made of public words; else `kernel1` with its class",
    _by_name(Names.redact_kernel),
)  # fmt: skip
CALL = Form(
    "call", "of a runtime or driver, made of public words; else `call1`",
    _by_name(Names.redact_call),
)  # fmt: skip
OP = Form(
    "op", "of torch, NCCL and stepsplit if made of public words, and of an RL framework that marks"
    " a phase or the sequences of a decode step; else `op1` with its class, `range1`, `module1`,"
    " `optimizer1`, or what makes a range a step",
    _by_name(Names.redact_op),
)  # fmt: skip
PYTHON = Form(
    "python", "`file1.py(93): function1`, `nn.Module: module1_0`",
    _by_name(Names.redact_python),
)  # fmt: skip
TASK = Form("task", "as op or kernel", _by_name(Names.redact_task))

# Values: the rule of a field is a form, the rules of a list's items, or those of an object's keys.


@dataclass(frozen=True, slots=True)
class TextOr:
    """A field that is a text or a list of this form, or else an object."""

    form: Form
    fields: Fields


@dataclass(frozen=True, slots=True)
class AnyKey:
    """An object whose keys are texts of this form, and whose values have one rule."""

    form: Form
    rule: Rule


Fields: TypeAlias = "Mapping[str, Rule]"
"""The fields of an object that are copied."""

Rule: TypeAlias = "Form | TextOr | AnyKey | list[Rule] | tuple[Rule, ...] | Fields"
"""A list has one rule for all items, a tuple one for each."""

_MAX_DEPTH = 64


def copy_value(value: Any, rule: Rule, texts: Texts, depth: int = 0) -> Any:
    """The JSON value with what its rule lets through; it keeps its type, so that a value of a wrong
    type is one in the copy too."""
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(rule, TextOr):
        rule = rule.fields if isinstance(value, dict) else rule.form
    if isinstance(value, str):
        while isinstance(rule, list | tuple):
            rule = rule[0]
        return (rule if isinstance(rule, Form) else TEXT).copy(texts, value)
    if not isinstance(value, list | tuple | dict) or depth >= _MAX_DEPTH:
        return None
    if not isinstance(value, dict):
        if isinstance(rule, tuple):
            pairs = zip(value, rule, strict=False)
            return [copy_value(each, own, texts, depth + 1) for each, own in pairs]
        if isinstance(rule, list):
            return [copy_value(each, rule[0], texts, depth + 1) for each in value]
        # Only a form of nested lists says what the texts within are; else the list is left empty.
        if isinstance(rule, Form) and rule.nested:
            return [copy_value(each, rule, texts, depth + 1) for each in value]
        return []
    if isinstance(rule, AnyKey):
        return {
            rule.form.copy(texts, str(key)): copy_value(each, rule.rule, texts, depth + 1)
            for key, each in value.items()
        }
    return copy_object(value, rule, texts, depth + 1) if isinstance(rule, Mapping) else {}


def copy_object(
    value: Mapping[str, Any], fields: Fields, texts: Texts, depth: int = 0
) -> dict[str, Any]:
    """The object with the fields that have a rule."""
    return {
        key: copy_value(each, fields[key], texts, depth)
        for key, each in value.items()
        if key in fields
    }
