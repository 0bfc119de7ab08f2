"""Arguments of Megatron-LM: a shell script that passes them, a text of flags, or YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from stepsplit.analyzer.model.job_files.job_file import JobFile, JobFileKind, JobTablesBuilder
from stepsplit.analyzer.model.job_files.megatron_names import MegatronSettings, put_all

_MARKS = re.compile(
    r"--(?:num[-_]layers|hidden[-_]size|(?:tensor|pipeline)[-_]model[-_]parallel[-_]size"
    r"|micro[-_]batch[-_]size)\b"
)

_YAML_MARKS = frozenset(
    {
        "num_layers", "hidden_size", "tensor_model_parallel_size", "micro_batch_size",
        "num_attention_heads",
    }
)  # fmt: skip

_UNMODELLED = (
    "hybrid_override_pattern", "hybrid_layer_pattern", "is_hybrid_model",
    "experimental_attention_variant", "linear_attention_type",
)  # fmt: skip


def _recognize(file: JobFile) -> bool:
    if file.suffix in (".yaml", ".yml"):
        names = _flatten(file.tables)
        return len(_YAML_MARKS & names.keys()) >= 2
    return file.suffix not in (".toml", ".json", ".py") and bool(_MARKS.search(file.text))


def _read(file: JobFile, job: JobTablesBuilder) -> None:
    is_yaml = file.suffix in (".yaml", ".yml")
    values = _flatten(file.tables) if is_yaml else read_flags(file.text)
    settings = MegatronSettings(values)
    for name in _UNMODELLED:
        if settings.find(name):
            raise file.build_error(
                f"--{name.replace('_', '-')}: layers of this kind are not modelled",
                "use a model of attention and MLPs alone",
            )
    if settings.find("spec"):
        job.omitted.append("--spec: layers that it builds are taken as ordinary ones")
    job.put("training", "framework", "megatron")
    put_all(settings, job)
    _put_architecture(settings, job)
    # The number of ranks that torchrun starts.
    per_node = settings.find_int("nproc_per_node", "ntasks_per_node")
    nodes = settings.find_int("nnodes", "nodes")
    if per_node and nodes and "gpus" not in job.sections["parallel"]:
        job.put("parallel", "gpus", per_node * nodes)


def _put_architecture(settings: MegatronSettings, job: JobTablesBuilder) -> None:
    """What arguments.py takes without a flag: GPT with layer norms, biases, tied embeddings and
    learned positions."""
    is_gated = bool(settings.find_flag("swiglu", "gated_linear_unit"))
    hidden = job.sections["model"].get("hidden")
    job.put("model", "gated", is_gated)
    if is_gated and "ffn" not in job.sections["model"] and hidden:
        # arguments.py: two thirds of 4 h, rounded down to a multiple of 64.
        job.put("model", "ffn", int(4 * hidden * 2 / 3) // 64 * 64)
    is_rms = settings.find_word("normalization") == "rmsnorm"
    job.put("model", "norm", "rms" if is_rms else "layer")
    has_biases = not settings.find_flag("disable_bias_linear")
    if settings.find_flag("add_bias_linear") is False:
        has_biases = False
    job.put("model", "biases", has_biases)
    if has_biases:
        job.sections["model"].pop("qkv_biases", None)
    is_untied = settings.find_flag("untie_embeddings_and_output_weights")
    job.put("model", "tied", not is_untied)
    positions = settings.find_word("position_embedding_type") or "learned_absolute"
    is_rotary = settings.find_flag("use_rotary_position_embeddings")
    if positions == "learned_absolute" and not is_rotary:
        job.put("model", "learned_positions", settings.find_int("max_position_embeddings"))


def _flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all tables by their names, as Megatron's --yaml-cfg and its tests nest them."""
    values: dict[str, Any] = {}
    left = [tables]
    for _ in range(64):
        if not left:
            break
        for name, value in left.pop(0).items():
            if isinstance(value, dict):
                left.append(value)
            else:
                values[_normalize(str(name))] = value
    return values


def _normalize(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


# A shell script, which is read and never run: assignments, then the flags of every command.

_MAX_DEPTH = 8
"""Variables inside of variables that are replaced."""

_VARIABLE = re.compile(r"\$\{(\w+)(?:\[@\])?(?::?[-=]([^{}]*))?\}|\$(\w+)")

_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)\+?=(.*)$", re.S)

_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")


def read_flags(text: str) -> dict[str, Any]:
    """The flags of all commands and arrays of a shell script, or of a text of flags.

    Variables that the script assigns are replaced; what only running it would tell is left out.
    """
    joined = re.sub(r"\\\r?\n", " ", text)
    variables: dict[str, str] = {}
    flags: dict[str, Any] = {}
    for line in _join_arrays(joined):
        if found := _ASSIGNED.match(line):
            name, value = found[1], found[2].strip()
            if value.startswith("("):
                inner = value[1:].rsplit(")", 1)[0]
                flags.update(_list_flags(_split(_expand(inner, variables))))
                continue
            first = _split(_expand(value, variables))
            # NAME=value COMMAND --flags sets a variable of one command alone.
            if not first or len(first) == 1:
                variables.setdefault(name, first[0] if first else "")
                flags.update(_list_flags(_split(first[0]) if first else []))
                continue
        flags.update(_list_flags(_split(_expand(line, variables))))
    return flags


def _join_arrays(text: str) -> Iterator[str]:
    """The lines of a script without comments; those of an array in one."""
    gathered = ""
    for raw in text.splitlines():
        line = re.sub(r"(?:^|\s)#.*$", "", raw)
        if not gathered and not re.search(r"\w\+?=\(", line):
            yield line
            continue
        gathered += f" {line}"
        if gathered.count("(") <= gathered.count(")"):
            yield gathered
            gathered = ""
    if gathered:
        yield gathered


def _split(line: str) -> list[str]:
    """The words of a line; a quote that is not closed is one of words."""
    try:
        words = shlex.split(line, comments=False)
    except ValueError:
        words = line.replace('"', " ").replace("'", " ").split()
    # "--fp8-format hybrid" as one quoted word.
    split = (one.split() if one.startswith("--") and " " in one else [one] for one in words)
    return [word for group in split for word in group]


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """The text with the values of the variables; unknown ones have their default, or nothing."""
    for _ in range(_MAX_DEPTH):
        text = _ARITHMETIC.sub(lambda found: _calculate(found[1], variables), text)
        replaced = _VARIABLE.sub(
            lambda found: variables.get(found[1] or found[3], (found[2] or "").strip("\"'")), text
        )
        if replaced == text or len(replaced) > 1 << 20:
            break
        text = replaced
    return text


def _calculate(expression: str, variables: Mapping[str, str]) -> str:
    """Sums, products and quotients of whole numbers, from left to right by precedence; "" for any
    other arithmetic."""
    filled = re.sub(
        r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: variables.get(name[1], "x"), expression
    )
    tokens = re.findall(r"\d+|[-+*/%]|\S", filled)
    if not re.fullmatch(r"\d{1,9}(?:[-+*/%]\d{1,9}){0,16}", "".join(tokens)):
        return ""
    terms, sign = [0], 1
    value = int(tokens[0])
    for operator, number in zip(tokens[1::2], map(int, tokens[2::2]), strict=True):
        if operator in "+-":
            terms.append(sign * value)
            sign, value = (1 if operator == "+" else -1), number
        elif operator == "*":
            value *= number
        elif number == 0:
            return ""
        else:
            value = value // number if operator == "/" else value % number
    return str(sum(terms) + sign * value)


def _list_flags(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Each flag and its value: True without one, a list for several."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--") or len(word) < 4:
            continue
        name, equals, given = word.partition("=")
        values = [given] if equals else []
        while not equals and position < len(words) and not words[position].startswith("--"):
            if words[position] in ("&&", "||", "|", ";", "&"):
                break
            if values and words[position].endswith(".py"):
                # torchrun --nnodes 4 pretrain_gpt.py: the program, which no flag takes.
                break
            values.append(words[position])
            position += 1
        yield _normalize(name), True if not values else values[0] if len(values) == 1 else values


KIND = JobFileKind("megatron", "Megatron-LM arguments", _recognize, _read)
