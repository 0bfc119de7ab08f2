"""Shared code of the integrations: lazy imports, and no effect on the training."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.stderr_lines import warns

torch = pytest.importorskip("torch")

from stepsplit.collectors import ModelSpec, Training, profile_run  # noqa: E402
from stepsplit.collectors.integrations.accelerate import read_sharding  # noqa: E402
from stepsplit.collectors.integrations.calls import call_after_each, profile_calls  # noqa: E402
from stepsplit.collectors.integrations.common import (  # noqa: E402  # noqa: E402
    FrameworkSpec,
    LazyRecording,
    Options,
    describe_fsdp_offload,
    import_library,
    normalize_dtype,
    normalize_optimizer,
    read_model_spec,
    read_zero_config,
)

LIBRARIES = ("transformers", "accelerate", "lightning", "pytorch_lightning", "deepspeed", "ray")


def test_collectors_import_no_framework() -> None:
    code = (
        "import sys, stepsplit.collectors, stepsplit.collectors.profiler;"
        "import stepsplit.collectors.integrations.common;"
        f"sys.exit(str(sorted(set({LIBRARIES!r}) & set(sys.modules))))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert ran.stderr == "[]\n"


def test_a_missing_framework_is_a_one_line_error_with_a_hint() -> None:
    with pytest.raises(ImportError) as refused:
        import_library("no_such_framework.trainer", "no-such-framework")

    assert str(refused.value) == (
        "no_such_framework.trainer is not installed; run: pip install no-such-framework"
    )


def test_the_options_are_those_of_profile_run() -> None:
    parameters = inspect.signature(profile_run).parameters

    assert list(Options.__annotations__) == [name for name in parameters if name != "out"]


def test_invalid_options_are_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step to record"):
        LazyRecording(tmp_path, active=0)


@pytest.mark.parametrize(
    ("said", "word"),
    [
        (torch.bfloat16, "bf16"),
        ("bf16-mixed", "bf16"),
        ("16-true", "fp16"),
        ("32-true", "fp32"),
        ("no", "fp32"),
        ("fp8", "fp8"),
    ],
)
def test_dtypes_are_normalized(said: object, word: str) -> None:
    assert normalize_dtype(said) == word


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("adamw_torch_fused", "adam"),
        ("FusedAdam", "adam"),
        ("adamw_8bit", "adam-8bit"),
        ("SGD", "sgd"),
        ("Sophia", "sophia"),
    ],
)
def test_optimizers_are_normalized(said: object, word: str) -> None:
    assert normalize_optimizer(said) == word


def test_a_model_without_a_config_has_only_a_parameter_count() -> None:
    assert read_model_spec(torch.nn.Linear(3, 2)) == ModelSpec(parameters=8)


class Counted:
    """An object with a method that steps."""

    calls = 0

    def step(self) -> int:
        self.calls += 1
        return self.calls


def test_a_failing_callback_does_not_fail_the_call() -> None:
    counted = Counted()

    lost = warns("lost the count of its steps")
    with call_after_each(Counted, "step", lambda each: [][each.calls]), lost:
        assert counted.step() == 1

    assert "__wrapped__" not in vars(Counted.step)


def test_failing_framework_metadata_is_a_warning(tmp_path: Path) -> None:
    run = LazyRecording(tmp_path / "run", wait=0, warmup=0, active=1)

    with warns("description of the run: no mesh"):
        run.begin(lambda: FrameworkSpec(mesh=exec("raise RuntimeError('no mesh')")))
    run.step()
    run.end()

    assert (tmp_path / "run" / "rank0_trace.json.gz").exists()


def test_values_given_by_the_user_override_the_framework(tmp_path: Path) -> None:
    run = LazyRecording(
        tmp_path, wait=0, warmup=0, active=1, training=Training(seq_len=8, dtype="fp8")
    )

    with run.record_around(lambda: FrameworkSpec(training=Training(dtype="bf16", micro_batch=2))):
        run.step()

    said = json.loads((tmp_path / "run.json").read_text())["training"]
    assert (said["seq_len"], said["micro_batch"], said["dtype"]) == (8, 2, "fp8")


def test_a_training_that_fails_keeps_the_recorded_steps(tmp_path: Path) -> None:
    run = LazyRecording(tmp_path, wait=0, warmup=0, active=5)

    with pytest.raises(KeyError, match="theirs"), run.record_around(FrameworkSpec):
        run.step()
        raise KeyError("theirs")

    assert (tmp_path / "rank0_trace.json.gz").exists()


def test_only_the_first_training_of_a_process_is_recorded(tmp_path: Path) -> None:
    run = LazyRecording(tmp_path, wait=0, warmup=0, active=1)
    with run.record_around(FrameworkSpec):
        run.step()
    written = (tmp_path / "rank0_trace.json.gz").stat().st_mtime_ns

    with run.record_around(FrameworkSpec):
        run.step()

    assert (tmp_path / "rank0_trace.json.gz").stat().st_mtime_ns == written


def test_each_call_of_a_function_is_a_step(tmp_path: Path) -> None:
    step = profile_calls(lambda x: x + 1, tmp_path, wait=1, warmup=0, active=1)

    assert [step(1), step(2), step(3)] == [2, 3, 4]

    assert (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        (None, (0, None)),
        ({"stage": 2}, (2, None)),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, (2, None)),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, (1, "optimizer")),
        (
            {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            (3, "optimizer, parameters"),
        ),
        # Not host memory, which is what run.json states.
        ({"stage": 3, "offload_param": {"device": "nvme"}}, (3, None)),
    ],
)
def test_zero_and_its_offloading_are_read_from_deepspeeds_config(
    zero: dict[str, object] | None, said: tuple[int, str | None]
) -> None:
    config = {"train_batch_size": 8, "zero_optimization": zero}
    assert read_zero_config(config) == said
    plugin = SimpleNamespace(deepspeed_config=config)
    kind = SimpleNamespace(name="DEEPSPEED")
    assert read_sharding(SimpleNamespace(distributed_type=kind, deepspeed_plugin=plugin)) == said


def test_the_offloading_of_fsdp_is_read_from_its_policy() -> None:
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    policies = (None, CPUOffload(), OffloadPolicy(), CPUOffload(True), CPUOffloadPolicy())
    said = "optimizer, parameters"
    assert [describe_fsdp_offload(each) for each in policies] == [None, None, None, said, said]
    kind = SimpleNamespace(name="FSDP")
    plugin = SimpleNamespace(cpu_offload=CPUOffloadPolicy())
    state = SimpleNamespace(distributed_type=kind, fsdp_plugin=plugin)
    assert read_sharding(state) == (None, said)


def test_the_steps_before_a_resumption_are_those_of_the_framework(tmp_path: Path) -> None:
    run = LazyRecording(tmp_path, wait=0, warmup=0, active=1)
    run.begin(lambda: FrameworkSpec(steps_before=500))
    run.step()
    run.end()

    record = json.loads((tmp_path / "rank0_record.json").read_text())
    assert (record["first_step"], record["steps_before"]) == (500, 500)
