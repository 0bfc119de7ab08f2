"""The ranges by which RL frameworks mark what a rank does: a framework is an entry of the table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["generation", "reward", "reference", "training", "weight_sync", "other"]

PHASES: Mapping[Phase, str] = {
    "generation": "generation",
    "reward": "reward",
    "reference": "reference",
    "training": "training",
    "weight_sync": "weight sync",
    "other": "other",
}
"""The phases of an RL step, in the order of their display, and what they are called. reference is
all that is computed of finished samples before the training: log probabilities of the reference
and of the old policy, and values. other is what a framework marks and is none of these."""


@dataclass(frozen=True, slots=True)
class MarkSource:
    """Where a framework measures what it does, without a range in the trace.

    module: where it is. owner: the class, "" for a function of the module. name: the attribute of a
    context manager's object that has the name of the mark; if it is "", method is a context manager
    or its generator, and the name its first argument.
    """

    module: str
    owner: str = ""
    name: str = ""
    method: str = ""


@dataclass(frozen=True, slots=True)
class RlFramework:
    """A framework: its marks, and how the recorder gets those that are no ranges of torch.

    phases: the phase of each mark. A mark of which the parts belong to several phases is not there.
    whole: marks whose time is theirs, whatever is marked within them.
    telling: marks that no other training has, so that one of them shows RL. An ordinary word, such
    as gen, which is the generator of a GAN too, or values, is none.
    of_class: whether a mark begins with the name of a class, which may be the user's, and a dot.
    decode: the name of the range of a decode step of an engine, with the number of sequences.
    """

    name: str
    phases: Mapping[str, Phase] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    telling: frozenset[str] = frozenset()
    of_class: bool = False
    sources: tuple[MarkSource, ...] = ()
    decode: re.Pattern[str] | None = None


def _name_phases(**marks: str) -> dict[str, Phase]:
    """The phase of each mark, given the marks of each phase in one text."""
    return {mark: phase for phase in PHASES for mark in marks.get(phase, "").split()}


FRAMEWORKS = (
    # Loops without a framework: docs/roles.md.
    RlFramework(
        "own",
        _name_phases(
            generation="generation generate rollout",
            reward="reward",
            reference="reference",
            training="training train",
            weight_sync="weight_sync",
        ),
        decode=re.compile(r"^decode sequences=(?P<sequences>\d{1,9})$"),
    ),
    # volcengine/verl b178a3cd. Workers: the methods with DistProfiler.annotate of
    # verl/workers/fsdp_workers.py, megatron_workers.py and engine_workers.py, which
    # verl/utils/profiler/torch_profile.py and nvtx_profile.py name as they are. Controller:
    # marked_timer in verl/trainer/ppo/ray_trainer.py and verl/experimental/*/*.py; all timers use
    # _timer of verl/utils/profiler/performance.py, and without Nsight have no range.
    RlFramework(
        "verl",
        _name_phases(
            generation="generate_sequences gen gen_max generate_async",
            reward="compute_rm_score reward rm",
            reference="compute_log_prob compute_ref_log_prob compute_values old_log_prob ref values"
            " ref_policy",
            training="update_actor update_critic update_actor_call update_critic_call"
            " update_actor_critic actor_update critic_update",
            weight_sync="update_weights sync_rollout_weights timing_s/param_sync",
            other="adv testing save_checkpoint dump_rollout_generations start_profile stop_profile"
            " rollouter/validate_time trainer/validate_time timing_s/merge_val",
        ),
        telling=frozenset({
            "generate_sequences", "compute_rm_score", "compute_ref_log_prob", "old_log_prob",
            "ref_policy", "update_actor", "update_actor_call", "update_actor_critic",
            "sync_rollout_weights", "timing_s/param_sync",
        }),
        sources=(MarkSource("verl.utils.profiler.performance", method="_timer"),),
    ),
    # huggingface/trl 1.16.0: trl/trainer/grpo_trainer.py, rloo_trainer.py, distillation_trainer.py.
    # ProfilingContext of trl/extras/profiling.py logs times, and makes no range; its names are as
    # GRPOTrainer.compute_loss, which has the policy's log probabilities in it, of the same name as
    # those of the reference. Those of reward functions are the user's, within _calculate_rewards.
    RlFramework(
        "TRL",
        _name_phases(
            generation="vLLM.generate transformers.generate transformers.generate_batch"
            " _generate_student_completions _generate_on_policy_for_slices",
            reward="_calculate_rewards",
            reference="_get_per_token_logps_and_entropies _get_last_hidden_state",
            training="compute_loss",
            weight_sync="sync_weights",
        ),
        whole=frozenset({"compute_loss"}),
        telling=frozenset({
            "vLLM.generate", "transformers.generate", "transformers.generate_batch",
            "_calculate_rewards", "_generate_student_completions",
            "_generate_on_policy_for_slices", "_get_per_token_logps_and_entropies",
        }),
        of_class=True,
        sources=(MarkSource("trl.extras.profiling", "ProfilingContext", name="name"),),
    ),
    # THUDM/slime 624b824a: slime/backends/megatron_utils/actor.py. timer() and @timer use
    # Timer.context of slime/observability/timer.py (before: slime/utils/timer.py), which makes no
    # range. Its rollouts are SGLang's.
    RlFramework(
        "slime",
        _name_phases(
            reference="log_probs ref_log_probs teacher_log_probs",
            training="actor_train",
            weight_sync="update_weights",
            other="data_preprocess ref_model_update save_model sleep wake_up",
        ),
        telling=frozenset({"ref_log_probs", "actor_train"}),
        sources=(
            MarkSource("slime.observability.timer", "Timer", method="context"),
            MarkSource("slime.utils.timer", "Timer", method="context"),
        ),
    ),
    # pytorch/torchtitan b5bcd76c: torchtitan/experiments/rl (controller.py, actors/generator.py,
    # actors/trainer.py, components/weight_sync.py, rubrics/rubric.py) and torchtitan/trainer.py.
    # log_trace_span writes JSON lines, and makes no range.
    RlFramework(
        "torchtitan",
        _name_phases(
            generation="vllm_engine_step vllm_engine_step_burst generate",
            reward="score_single_rollout score_group",
            training="forward_backward optim_step fwd_bwd optim grad_clip model_forward loss_fn"
            " model_backward",
            weight_sync="push_model_state_dict pull_model_state_dict pull_model_state_dict_copy"
            " trainer_push_model_state_dict generator_pull_model_state_dict",
            other="wait_for_training_batch validate eval save_checkpoint trainer_save_checkpoint"
            " checkpoint_save checkpoint_load metrics_log sync_log_step fetching_batch"
            " post_dataloading_process collect_dist_metrics gc_collect",
        ),
        telling=frozenset({
            "vllm_engine_step", "vllm_engine_step_burst", "score_single_rollout",
            "trainer_push_model_state_dict", "generator_pull_model_state_dict",
        }),
        sources=(
            MarkSource(
                "torchtitan.observability.structured_logger.structured_logging",
                "log_trace_span", name="base_name",
            ),
        ),
    ),
    # vllm-project/vllm marks each step of an engine with its sequences and tokens in prefill
    # (context) and decode (generation): both spellings are in TraceLens/TraceUtils/
    # annotation_utils.py of AMD-AGI/TraceLens 171dd747.
    RlFramework(
        "vLLM",
        decode=re.compile(
            r"^execute_(?:\d{1,9}_)?context_\d{1,9}\(\w{1,99}\)"
            r"_generation_(?P<sequences>\d{1,9})\("
        ),
    ),
    # sgl-project/sglang, pull requests 23419 and 24911: step[DECODE bs=8], step[decode bs=8], and
    # in a mixed step the sequences that decode as dec=8 or g=8.
    RlFramework(
        "SGLang",
        decode=re.compile(
            r"^step\[(?:decode bs=(?P<sequences>\d{1,9})[ \]]"
            r"|mixed bs=\d{1,9} (?:\w{1,9}=\d{1,20} ){0,9}?(?:dec|g)=(?P<mixed>\d{1,9}))",
            re.IGNORECASE,
        ),
    ),
)  # fmt: skip
"""The table. Names that two frameworks share are of one phase."""

_OF_CLASS = {
    mark: phase for one in FRAMEWORKS if one.of_class for mark, phase in one.phases.items()
}

_AS_THEY_ARE = {
    mark: phase for one in FRAMEWORKS if not one.of_class for mark, phase in one.phases.items()
}

_TELLING = {
    of_class: frozenset(
        mark for one in FRAMEWORKS if one.of_class is of_class for mark in one.telling
    )
    for of_class in (False, True)
}

_WHOLE = frozenset(mark for one in FRAMEWORKS for mark in one.whole)


def find_phase_of_mark(name: str) -> Phase | None:
    """The phase of a mark; None if it is in no framework's table."""
    return _AS_THEY_ARE.get(name) or _OF_CLASS.get(name.partition(".")[2])


def is_telling_mark(name: str) -> bool:
    """Whether the mark alone shows that the job is one of RL."""
    return name in _TELLING[False] or name.partition(".")[2] in _TELLING[True]


def is_whole_mark(name: str) -> bool:
    """Whether all time within the mark is of its phase, whatever is marked there."""
    return name.partition(".")[2] in _WHOLE


def read_decode_step(name: str) -> int | None:
    """The sequences that a decode step has, given the name of its range; None for other names."""
    for framework in FRAMEWORKS:
        found = framework.decode.match(name) if framework.decode is not None else None
        if found is not None:
            count = next(text for text in found.groups() if text is not None)
            return int(count)
    return None
