"""The names of events: those made of public words stay, others get a pseudonym that states what the
analysis takes from the name."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from pathlib import Path

from stepsplit.analyzer.ops import parse_op
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, OTHER, Rules, format_stated_class
from stepsplit.analyzer.redact.pseudonyms import LETTERS, Pseudonyms
from stepsplit.analyzer.split.host_steps import STEP_RANGE
from stepsplit.analyzer.trace import MAX_NAME_LENGTH, PYTHON_FUNCTION
from stepsplit.collectors.formats.rl_marks import find_phase_of_mark, read_decode_step

# Public words.

_WORDS = frozenset(
    word
    for line in Path(__file__).with_name("words.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for word in line.split()
)

_FLOAT = r"(?:bf16|f(?:8|16|32|64))(?!\d)"

_PART = re.compile(rf"{_FLOAT}|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_HEX = re.compile(r"\d+|[a-f]{1,2}|[A-F]{1,2}")
"""Parts of which an id or an address may be made: most single letters are public words."""

_ID = re.compile(r"[a-f\d]{7,}|[A-F\d]{7,}")
"""Whole runs that are ids, if they have a digit, although f8 and words such as add are in them."""

_FLOATS = re.compile(f"(?:{_FLOAT})+")

_RUN = re.compile(r"[A-Za-z\d]+")

_WITH_DIGITS = frozenset(word for word in _WORDS if any(map(str.isdigit, word)))

_KNOWN_DIGITS = re.compile("|".join(sorted(_WITH_DIGITS, key=len, reverse=True)))
"""The longest first, as log1p is no i1p."""

_MAX_NUMBERS = 4
"""In a run of letters and digits, as tilesize64x64x8 has 3: hexadecimal numbers have more."""

_MAX_DIGITS = 6
"""Of a number, decimal or hexadecimal: the short ids of commits and jobs have 7 and more."""

_ADDRESS = re.compile(
    r"\d\.\d+\.\d|\d-\d+-\d|\d:\d|\w@|@\w|(?<![A-Za-z\d])\d+(?:_\d+){3}(?![A-Za-z\d])"
    r"|[\dA-Fa-f]{2}(?:[-_.:][\dA-Fa-f]{2}){5}|[\dA-Fa-f]{4}(?:[-_.:][\dA-Fa-f]{4}){2}",
    re.ASCII,
)
"""Numbers that make an address, of a network or of a device, a port, a date or a time, and what an
account is joined with. It may follow a name that is public."""


@lru_cache(1 << 16)
def is_public(text: str) -> bool:
    """Whether the text is made of public words and short numbers.

    That alone makes no name public, because any numbers are: each form also knows how its texts
    begin.
    """
    if not (text.isascii() and text.isprintable()) or _ADDRESS.search(text):
        return False
    for run in _RUN.findall(text):
        parts = _PART.findall(run)
        has_digit = any(map(str.isdigit, run))
        is_id = has_digit and _ID.fullmatch(run) and not _FLOATS.fullmatch(run)
        if is_id or sum(map(str.isdigit, parts)) > _MAX_NUMBERS:
            return False
        digits = 0
        for part in parts:
            is_float = _FLOATS.fullmatch(part)
            digits = digits + len(part) if not is_float and _HEX.fullmatch(part) else 0
            is_word = is_float or part.isdigit() or part.lower() in _WORDS
            if digits > _MAX_DIGITS or not is_word:
                return False
    return True


_NODE = re.compile(r"backward\d{0,2}$")

_PLACE = re.compile(r"(?<=[ >/(-])\d+(?!\w)")
"""A rank, or a number of a compiled region: the name of an op itself has none of these signs."""


@lru_cache(1 << 16)
def has_known_digits(name: str) -> bool:
    """Whether the digits of an op's name are torch's, as in conv2d and AvgPool2DBackward0, or a
    number of at most three.

    Public words have single letters, of which ids of letters and digits are made: one in eight of
    five characters is public.
    """
    for run in _RUN.findall(_PLACE.sub("", name).lower()):
        if (node := _NODE.search(run)) is not None:
            is_known = not any(map(str.isdigit, _KNOWN_DIGITS.sub("", run[: node.start()])))
        else:
            is_known = run in _WITH_DIGITS or not any(map(str.isdigit, run))
        if not (is_known or (run.isdigit() and len(run) <= 3)):
            return False
    return True


# Names that are public, and others that are if they are also made of public words.

_FIXED = re.compile(
    r"ProfilerStep#\d{1,9}|stepsplit::[FBW] stage=\d{1,9} mb=\d{1,9}|record_param_comms|detach_?"
    r"|PP:\d{1,9}[FBIW]\d{1,9}|PP:\((?:\d{1,9}[FBIW]\d{1,9};?){1,4}\)OVERLAP_F_B|\[memory\]"
    r"|(?:Forward|Backward) \d{1,9}|DataParallel\.forward|DistributedDataParallel\.forward"
    r"|torch::autograd::AccumulateGrad|autograd::engine::evaluate_function: |fwdbwd|ac2g|dynamo"
    r"|entire_(?:frame|backward)_compile|backend_compile|inductor_compile"
    r"|async_cpu_to_gpu|Mem(?:cpy|set)(?: [HDPA]to[HDPA])?(?: \((?:Pinned|Pageable|Device"
    r"|Unified|Managed|Array|Unknown|Host)(?: -> (?:Pinned|Pageable|Device|Unified|Managed|Array"
    r"|Unknown|Host))?\))?|Stream Wait Event|Event Sync|Stream Sync|Context Sync|",
    re.ASCII,
)
"""Names that the analysis compares as a whole."""

_KERNEL = re.compile(
    r"\A(?:void |auto |\w+ )?(?:at::|c10::|\(anonymous namespace\)::|(?:nccl|rccl|mscclpp)\w*Kernel"
    r"|ncclSym|cutlass|cub::|cublas|cudnn|cask_|thrust::|sm\d+_|(?:volta|turing|ampere|hopper)_"
    r"|maxwell_|nvjet_|Cijk_|fmha_cutlass|(?:pytorch_)?flash::|splitKreduce_|miopen|hcom_|hccl"
    r"|__amd_rocclr_|reduce_1Block|dot_kernel|gemv\d|batch_norm_|vectorized_elementwise).*"
)

_API = re.compile(
    r"(?:cuda|cu|hip|ur|ze|hsa|acl|mu)[A-Z_]\w*|INVALID"
    r"|(?:Activity|Buffer|Instrumentation|Lazy|Runtime|Resource"
    r"|Command|Iteration|Record|PyTorch|Unknown)[\w ():-]*"
)

_OPTIMIZERS = (
    "Adam|AdamW|SGD|Adagrad|Adadelta|Adafactor|Adamax|ASGD|LBFGS|Muon|NAdam|RAdam|RMSprop|Rprop"
    "|SparseAdam|ZeroRedundancyOptimizer"
)

_OP = re.compile(
    r"\A(?:(?:aten|c10d|_c10d_functional|_c10d_functional_autograd|c10d_functional|prims?|profiler"
    r"|quantized|_?dtensor|inductor|mkldnn|symm_mem|fsdp|torch::\w+|autograd::\w+)::[\w.:]+"
    r"|\w+Backward\d*|CompiledFunction\w*|_FromTorchTensor|_ToTorchTensor|(?:Nested)?Redistribute"
    r"|PythonSubclass|RegisterPostBackwardFunction"
    r"|(?:nccl|gloo|mpi|ucc|xccl|hccl):\w+(?: \d{1,6}(?:->|<-)\d{1,6})?"
    rf"|Optimizer\.\w+#(?:{_OPTIMIZERS})\.\w+"
    r"|enumerate\(DataLoader\)#_(?:Single|Multi)Process\w+\.__next__"
    r"|FSDP::\w+|FullyShardedDataParallel\._?\w+"
    r"|Torch-Compiled Region: [\d/]+|TorchDynamo [\w ]+|(?:Iteration Start: )?PyTorch Profiler"
    r"(?: \(\d+\))?|Record Window End|hcom_\w+|[A-Z][A-Z_]{2,}|Computing|Communication|Free)"
)

_NAMESPACE = re.compile(
    r"(?:aten|_?c10d(?:_functional(?:_autograd)?)?|torch::autograd|autograd|symm_mem|FSDP)::"
    r"|(?:nccl|gloo|mpi|ucc|xccl|hccl):"
)
"""What begins the name of an op or a range that is recognized by its beginning."""

_PREFIX = re.compile(r"autograd::engine::evaluate_function: ")

_MODULE_RANGE = re.compile(
    r"((?:FSDP::\w+|FullyShardedDataParallel\._?\w+) (?:\(|for ))(.*?)(\)?)", re.S
)

_OPTIMIZER_RANGE = re.compile(r"(Optimizer\.(?:step|zero_grad)#)(.+)(\.(?:step|zero_grad))", re.S)

_MESSAGE = re.compile(
    r"(stepsplit::(?:send|recv) group=)(\S*)( src=-?\d{1,9} dst=-?\d{1,9} tag=)(?:-?\d{1,9}|\S+)"
    r"( n=\d{1,9} bytes=-?\d{1,15} dtype=)(\S*)",
    re.ASCII,
)

_LIBRARY_CALL = re.compile(
    r"(stepsplit::(?:dispatch|combine|symm_mem) library="
    r"(?:DeepEP|HybridEP|MORI|NCCL_EP|symmetric_memory) group=)(\S*)"
    r"((?: tokens=\d{1,15} bytes=\d{1,15} dtype=\w{1,20})?)",
    re.ASCII,
)

_MODULE = re.compile(r"nn\.Module: (.*?)(_\d{1,9})?", re.S)

_STEP_TAIL = re.compile(
    r"(?:train(?:ing)?|global)?[\s_-]?(?:step|iter|iteration|batch)s?[\s_#:=.-]*\d{1,9}"
    r"(?:\s*(?:/|of)\s*\d{1,9})?[\])}]?$|(?:train(?:ing)?[\s_-]?)?(?:step|iter|iteration)$",
    re.I,
)
"""The part of a range's name by which it may be a step."""

_HINTS = re.compile(
    r"backward|forward|optimizer|dataload|(?:load|get|fetch|next)_batch|attention|attnfunc|flash_attn"
    r"|fmha|(?:Model|Tensor|Sequence)ParallelRegion(?!ToMOE)|VocabParallel|(?:Column|Row)ParallelLinear"
    r"|LinearWithGradAccumulationAndAsyncCommunication|Redistribute|wait_tensor"
    r"|\(dynamo_timed\)$",
    re.I,
)
"""What ranges, ops and modules of any name are recognized by: kinds of work, tensor parallelism."""

_CALL_HINTS = re.compile(
    r"GraphLaunch|LaunchHost|Launch|Memcpy|Memset|Synchronize|StreamWait|EventQuery"
    r"|Stream(?:Begin|End)Capture|Malloc|Free|Alloc|Register|Async"
)
"""What a call of a runtime is recognized by."""

_KERNEL_HINTS = re.compile(
    r"SendRecv|HtoD|DtoH|Host|Pageable|bwd|backward|dgrad|fp8|float8|bf16|bfloat16|fp16|float16|half|tf32|splitk|reduce"
    r"|flash|cudnn|triton_tem",
    re.I,
)
"""Dtype, pass and implementation, as far as the analysis takes them from a kernel's name."""


class Names:
    """Replaces names, each with the same pseudonym wherever it occurs.

    words are texts that make a name private whatever it is made of.
    """

    def __init__(self, pseudonyms: Pseudonyms, rules: Rules, words: tuple[str, ...]) -> None:
        self._pseudonyms, self._rules = pseudonyms, rules
        self._private = re.compile("|".join(map(re.escape, filter(None, words))) or r"(?!)", re.I)
        self._families = {rule.family for rule in BUILT_IN.families} | {OTHER}

    def is_public(self, text: str) -> bool:
        """Whether the text is made of public words and has none of the private ones."""
        return is_public(text) and self._private.search(text) is None

    def redact_kernel(self, name: str) -> str:
        """The name of a kernel or copy on a device."""
        name = name[:MAX_NAME_LENGTH]
        if self._is_public(_KERNEL, name):
            return name
        return _append(self._state_class("kernel", name), _KERNEL_HINTS, name)

    def redact_call(self, name: str) -> str:
        """The name of a runtime's or driver's call, or of what the profiler itself does."""
        name = name[:MAX_NAME_LENGTH]
        if self._is_public(_API, name):
            return name
        return _append(self._pseudonyms.replace("call", name), _CALL_HINTS, name)

    def redact_op(self, name: str) -> str:
        """The name of an op or a range: what torch and stepsplit write stays."""
        name = name[:MAX_NAME_LENGTH]
        if (phase_mark := self._redact_phase_mark(name)) is not None:
            return phase_mark
        if (prefix := _PREFIX.match(name)) is not None:
            return prefix[0] + self.redact_op(name[prefix.end() :])
        if (range_ := _MODULE_RANGE.fullmatch(name)) is not None and self.is_public(range_[1]):
            return f"{range_[1]}{self._pseudonyms.replace('module', range_[2])}{range_[3]}"
        if (message := _MESSAGE.fullmatch(name)) is not None:
            group, dtype = self.redact_group(message[2]), self.redact_dtype(message[5])
            return f"{message[1]}{group}{message[3]}0{message[4]}{dtype}"
        if (library := _LIBRARY_CALL.fullmatch(name)) is not None:
            return f"{library[1]}{self.redact_group(library[2])}{library[3]}"
        if self._is_public_op(name):
            return name
        if (optimizer := _OPTIMIZER_RANGE.fullmatch(name)) is not None:
            hidden = self._pseudonyms.replace("optimizer", optimizer[2])
            return f"{optimizer[1]}{hidden}{optimizer[3]}"
        if STEP_RANGE.match(name) and (tail := _STEP_TAIL.search(name)) is not None:
            return self._redact_step(name[: tail.start()], tail[0])
        if (space := _NAMESPACE.match(name)) is not None:
            return _append(space[0] + self._state_class("op", name), _HINTS, name)
        if "::" in name:
            return _append(self._state_class("op", name, "::"), _HINTS, name)
        if re.search(r"Backward\d*$", name):
            hidden = _append(self._state_class("function", name), _HINTS, name)
            return hidden.removesuffix(" Backward") + " Backward"
        return _append(self._pseudonyms.replace("range", name), _HINTS, name)

    def _redact_phase_mark(self, name: str) -> str | None:
        """The mark of a phase or a decode step of RL, by which the analysis knows it; its class is
        the user's. None for other names."""
        if (sequences := read_decode_step(name)) is not None:
            return f"decode sequences={sequences}"
        if find_phase_of_mark(name) is None or self._private.search(name) is not None:
            return None
        owner, dot, mark = name.partition(".")
        return f"{self._pseudonyms.replace('class', owner)}.{mark}" if dot else name

    def redact_task(self, name: str) -> str:
        """The name of an event without a known category, which may be a kernel."""
        if self._is_public_op(name):
            return name
        if STEP_RANGE.match(name):
            return self.redact_op(name)
        return self.redact_kernel(name)

    def redact_python(self, name: str) -> str:
        """The name of a Python function or module."""
        name = re.sub(r" at 0x[0-9a-f]+", "", name[:MAX_NAME_LENGTH])
        if (module := _MODULE.fullmatch(name)) is not None:
            hidden = _append(self._pseudonyms.replace("module", module[1]), _HINTS, module[1])
            return f"nn.Module: {hidden}{module[2] or ''}"
        if (frame := PYTHON_FUNCTION.fullmatch(name)) is not None:
            line = frame["line"] if frame["line"].isascii() and len(frame["line"]) < 10 else 0
            return f"{self.redact_file(frame['file'])}({line}): {self.redact_function(name)}"
        return f"<built-in {self._pseudonyms.replace('function', name)}>"

    def redact_file(self, file: str) -> str:
        """The path of a source file: of torch or the standard library it stays, of other packages
        it is still in site-packages."""
        library = _find_library_file(file)
        if library is not None and self.is_public(library):
            return library
        folder = "lib/site-packages/" if _PACKAGES.search(file) else ""
        folder = "torch/" if library is not None and library.startswith("torch/") else folder
        return f"{folder}{self._pseudonyms.replace('file', file)}.py"

    def redact_function(self, text: str) -> str:
        """The name of a function, or what a frame of the profiler says it is."""
        frame = PYTHON_FUNCTION.fullmatch(text)
        function = text if frame is None else frame["function"]
        is_library = frame is not None and _find_library_file(frame["file"]) is not None
        if is_library and function.isidentifier() and self.is_public(function):
            return function
        return self._pseudonyms.replace("function", function)

    def redact_group(self, name: str) -> str:
        """The name of a process group; its number stays."""
        if re.fullmatch(r"\d{0,9}", name, re.ASCII) or name == "unnamed":
            return name
        return self._pseudonyms.replace("group", name)

    def redact_dtype(self, dtype: str) -> str:
        """A dtype, in any library's spelling."""
        if re.fullmatch(r"(?:c10::)?[A-Za-z][A-Za-z\d_ ]{0,40}", dtype) and self.is_public(dtype):
            return dtype
        return self._pseudonyms.replace("dtype", dtype)

    def redact_collective(self, name: str) -> str:
        """The name of a collective; of an unknown one, that of its op."""
        if re.fullmatch(r"[A-Za-z_]*", name) and self.is_public(name):
            return name
        op = parse_op(name)
        return self._pseudonyms.replace("collective", name) if op == "unknown" else op

    def _is_public(self, names: re.Pattern[str], name: str) -> bool:
        if _FIXED.fullmatch(name) is not None:
            return True
        return names.fullmatch(name) is not None and self.is_public(name)

    def _is_public_op(self, name: str) -> bool:
        is_fixed = _FIXED.fullmatch(name) is not None
        return is_fixed or (self._is_public(_OP, name) and has_known_digits(name))

    def _state_class(self, kind: str, name: str, ending: str = "") -> str:
        stated = format_stated_class(self._rules, name, self._redact_family)
        return f"{self._pseudonyms.replace(kind, name)}{ending} {stated}"

    def _redact_family(self, family: str) -> str:
        """A family of the user's own rules is a text like any other."""
        known = family in self._families
        return family if known else self._pseudonyms.replace("family", family)

    def _redact_step(self, front: str, tail: str) -> str:
        """The name of a step: its numbers stay, as they order the steps, and what precedes them
        gets one pseudonym in all steps."""
        if self.is_public(front + tail) and not re.search(r"[^\w\s#:=,/-]", front):
            return front + tail
        skeleton = re.sub(r"\d+", "#", front)
        numbers = re.findall(r"\d{1,9}", front, re.ASCII)
        hidden = self._pseudonyms.replace("steps", skeleton, LETTERS) + "::" * ("::" in front)
        return " ".join([hidden, *numbers, tail.lstrip()])


def _append(pseudonym: str, hints: re.Pattern[str], name: str) -> str:
    found = dict.fromkeys(match[0] for match in hints.finditer(name))
    return " ".join([pseudonym, *found])


_PACKAGES = re.compile(r"/(?:site|dist)-packages/")

_LIBRARY = re.compile(r"\A.*/(?:(?:site|dist)-packages|lib/python\d[\d.]*)/", re.S)


def _find_library_file(file: str) -> str | None:
    """The path of a file of torch or the standard library without its folder; None for others."""
    inner = _LIBRARY.sub("", file)
    first = inner.removesuffix(".py").partition("/")[0]
    if first == "torch" or (first in sys.stdlib_module_names and not inner.startswith("/")):
        return inner
    return None
