"""Training logs of frameworks from 2019 on: one row per step, and failures."""

from __future__ import annotations

import gzip
import json
import math
import re
import statistics
import tarfile
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

import pytest
from support.reading import head_of_file, on_disk
from support.required import shared_repro, shared_trace

from stepsplit.analyzer import DataError, TrainLog
from stepsplit.analyzer.readers import training_log as golden_values
from stepsplit.analyzer.readers.compression import HEAD_BYTES, read_head
from stepsplit.analyzer.readers.training_log import (
    is_training_log,
    read_golden_values,
    read_train_log,
)

BIGSCIENCE = "trainlog_bigscience_v100"
MS, S, TERA, GIB, MIB = 10**6, 10**9, 1e12, 1 << 30, 1 << 20
NAN = math.nan


def read(folder: Path, text: str | bytes) -> TrainLog:
    file = folder / "train.log"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_train_log(on_disk(file))


def megatron(step: int, ms: float = 100.0, of: int = 100) -> str:
    return (
        f" iteration {step:8d}/{of:8d} | consumed samples: {step * 4:12d} | elapsed time per "
        f"iteration (ms): {ms} | learning rate: 1.5E-04 | global batch size:     4 | lm loss: "
        "9.5E+00 | loss scale: 1.0 | number of skipped iterations:   0 |\n"
    )


def titan(step: int, second: str = "38,735", before: str = "", loss: float = 6.5) -> str:
    return (
        f"{before}[titan] 2025-06-16 22:30:{second} - root - INFO - \x1b[31mstep: {step:2}  "
        f"\x1b[32mloss: {loss:7.4f}  \x1b[33mmemory: 49.66GiB(52.28%)  \x1b[34mtps: 5,856  "
        "\x1b[36mtflops: 339.16  \x1b[35mmfu: 34.29%\x1b[39m\n"
    )


@pytest.mark.parametrize(
    ("line", "framework", "row"),
    [
        (
            " iteration       10/  120000 | elapsed time per iteration (ms): 1993.9 | learning rate"
            " 0.000E+00 | lm loss 1.25E+01 | loss scale 8388608.0 |",
            "megatron",
            (10, 1_993_900_000, NAN, NAN, NAN, NAN, 12.5, -1),
        ),
        (
            " [2024-04-06 02:59:36] iteration       43/     100 | consumed samples:         5504 | "
            "elapsed time per iteration (ms): 5444.9 | throughput per GPU (TFLOP/s/GPU): 239.8 | "
            "learning rate: 8.600000E-06 | global batch size:   128 | lm loss: 1.825991E+00 | "
            "loss scale: 1.0 | grad norm: 1.426 |",
            "megatron",
            (43, 5_444_900_000, 239.8 * TERA, NAN, NAN, NAN, 1.825991, 128),
        ),
        (
            "[default3]: iteration       10/  292968 | consumed samples:        10240 | elapsed "
            "time per iteration (s): 35.8651 | global batch size:  1024 | lm loss: 1.3E+01 | "
            "samples per second: 28.551 | tokens per gpu per second (tgs): 1146.5 | "
            "TFLOPs: 199.5 |",
            "megatron",
            (10, 35_865_100_000, 199.5 * TERA, NAN, 1146.5, 28.551, 13.0, 1024),
        ),
        (
            " samples/sec: 7.799 | iteration       34/   10000 | elapsed time per iteration (ms): "
            "4103.1 | approx flops per GPU: 112.5TFLOPS | lm_loss: 1.1E+01 |",
            "megatron",
            (34, 4_103_100_000, 112.5 * TERA, NAN, NAN, 7.799, 11.0, -1),
        ),
        (
            "[2023-10-31 08:58:33,237] [INFO] [timer.py:260:stop] epoch=0/micro_step=14/"
            "global_step=7, RunningAvgSamplesPerSec=14.7, CurrSamplesPerSec=13.2, "
            "MemAllocated=1.5GB, MaxMemAllocated=2.0GB",
            "deepspeed",
            (7, -1, NAN, NAN, NAN, 13.2, NAN, -1),
        ),
        (
            "[2022-03-11 02:06:58,985] [INFO] [timer.py:189:stop] 0/40, SamplesPerSec=83.4, "
            "MemAllocated=0.26GB, MaxMemAllocated=9.02GB",
            "deepspeed",
            (40, -1, NAN, NAN, NAN, 83.4, NAN, -1),
        ),
        (
            "steps: 10 loss: 7.0816 iter time (s): 2.741 samples/sec: 1.459",
            "deepspeed",
            (10, 2_741_000_000, NAN, NAN, NAN, 1.459, 7.0816, -1),
        ),
        (
            "[rank0]:2024-03-04 17:01:30,110 - root - INFO - step:  1  loss: 10.5000  iter: 1.2  "
            "memory:  1.41GiB(1.79%)  wps: 193,831  mfu: 1.5%",
            "torchtitan",
            (1, -1, NAN, 0.015, 193831.0, NAN, 10.5, -1),
        ),
        (titan(10), "torchtitan", (10, -1, 339.16 * TERA, 0.3429, 5856.0, NAN, 6.5, -1)),
        (titan(10, loss=-1), "torchtitan",
         (10, -1, 339.16 * TERA, 0.3429, 5856.0, NAN, NAN, -1)),
        (
            "[20260702 10:00:02][rank-7/8][INFO ] [----trainer.py:2560] :  iteration      126/    "
            "5000 | consumed samples:        16128 | elapsed time per iteration (ms): "
            "13372.8/13364.7 | hip mem usage/free/total/usage_ratio: 153.81GB/102.17GB/255.98GB/"
            "60.09% | throughput per GPU (TFLOP/s/GPU): 567.6/568.0 | tokens per GPU (tokens/s/GPU)"
            ": 9801.4/9807.3 | learning rate: 9.9E-06 | global batch size:   128 | lm loss: 6.5E+00"
            " | loss scale: 1.0 | grad norm: 0.061 |",
            "megatron",
            (126, 13_372_800_000, 567.6 * TERA, NAN, 9801.4, NAN, 6.5, 128),
        ),
        (
            " iteration       10/      50 | consumed samples:         1280 | elapsed time per "
            "iteration (ms): 5000.0/5004.2 | compute per GPU (TFLOP/s/GPU): 615.5 (avg 615.1) | "
            "tokens/s/GPU inst/harmonic mean: 11941.8/11940.2 | global batch size:   128 |",
            "megatron",
            (10, 5_000_000_000, 615.5 * TERA, NAN, 11941.8, NAN, NAN, 128),
        ),
        (
            "(TaskRunner pid=4242) step:7 - global_seqlen/min:1000.000 - actor/pg_loss:0.013 - "
            "perf/mfu/actor:0.412 - timing_s/gen:20.100 - timing_s/step:35.250 - "
            "perf/total_num_tokens:980000.000 - perf/time_per_step:35.250 - perf/throughput:868.79",
            "verl",
            (7, 35_250_000_000, NAN, 0.412, 868.79, NAN, NAN, -1),
        ),
        (
            "step:7 - perf/mfu/actor:np.float64(0.412) - timing_s/step:35.25 - perf/throughput:8.5",
            "verl",
            (7, 35_250_000_000, NAN, 0.412, 8.5, NAN, NAN, -1),
        ),
        (
            "Step 12 | loss:1.6875 lr:2e-05 tokens_per_second_per_gpu:1234.5 grad_norm:2.5 ",
            "torchtune",
            (12, -1, NAN, NAN, 1234.5, NAN, 1.6875, -1),
        ),
        (
            "step 00010/21400 (0.05%) | loss: 10.512345 | grad norm: 0.4012 | lrm: 1.00 | dt: "
            "412.37ms | tok/sec: 1,271,412 | mfu: 47.60 | total time: 0.00m",
            "nanochat",
            (10, 412_370_000, NAN, 0.476, NAN, NAN, 10.512345, -1),
        ),
        (
            "step 00010 (0.05%) | loss: 3.5 | lrm: 1.00 | dt: 412.37ms | tok/sec: 1,271 | "
            "bf16_mfu: 0.84 | epoch: 1 | total time: 0.00m",
            "nanochat",
            (10, 412_370_000, NAN, 0.0084, NAN, NAN, 3.5, -1),
        ),
        (
            "Epoch 3 | iter 30 step 30 | loss train: 2.846, val: n/a | iter time: 112.20 ms (step) "
            "remaining time: 0:01:54",
            "litgpt",
            (30, 112_200_000, NAN, NAN, NAN, NAN, 2.846, -1),
        ),
        (
            "Epoch 34 | iter 3050700 step 610140 | loss train: 2.846, val: 2.861 | iter time: "
            "112.20 ms (step) remaining time: 0:01:54",
            "litgpt",
            (610140, -1, NAN, NAN, NAN, NAN, 2.846, -1),
        ),
        (
            "Epoch 1 | iter 3 step 0 | loss train: 1.610, val: n/a | iter time: 106.92 ms",
            "litgpt",
            (0, -1, NAN, NAN, NAN, NAN, 1.61, -1),
        ),
        (
            "Training epoch 1, iteration 20/149 | lr: 3e-05 | global_batch_size: 32 | "
            "global_step: 170 | reduced_train_loss: 1.25 | train_step_timing in s: 0.03146",
            "nemo",
            (170, 31_460_000, NAN, NAN, NAN, NAN, 1.25, 32),
        ),
        (
            "Epoch 0:   1%|          | 795/77225 [9:07:58<878:01:48, 41.36s/it, v_num=, "
            "reduced_train_loss=3.5, global_step=794.0, train_step_timing in s=41.3]",
            "nemo",
            (794, 41_300_000_000, NAN, NAN, NAN, NAN, 3.5, -1),
        ),
        (
            "01/02/2024 10:00:00 [INFO|DP=0]: iteration: 7 / 100 | consumed_tokens: 5.12M | "
            "elapsed_time_per_iteration_ms: 1.25K | tokens_per_sec_per_gpu: 6.5K | "
            "global_batch_size: 1.02K | lm_loss: 10.5 | model_tflops_per_gpu: 12.5",
            "nanotron",
            (7, 1_250_000_000, 12.5 * TERA, NAN, 6500.0, NAN, 10.5, 1020),
        ),
        (
            "[2022-03-11 02:06:58,985] [INFO] [timer.py:198:stop] 0/20, "
            "RunningAvgSamplesPerSec=232.5, CurrSamplesPerSec=227.5, MemAllocated=0.5GB",
            "deepspeed",
            (20, -1, NAN, NAN, NAN, 227.5, NAN, -1),
        ),
        (
            "[2024-04-21 02:45:40][INFO][training:1251] -  iteration=       3/  317892 | "
            "elapsed_time_per_iteration_ms=16071.5 | global_batch_size=  256 | lm loss=11.25 | "
            "samples_per_second=15.5 | tokens_per_gpu_per_second_tgs=8155.5 | TFLOPs=159.5 |",
            "megatron",
            (3, 16_071_500_000, 159.5 * TERA, NAN, 8155.5, 15.5, 11.25, 256),
        ),
        (
            "[2024-02-27 15:45:08] iteration 13 / 118 | elapsed time per iteration(ms): 176.5 | "
            "lm loss: 6.5E-01 |total grad norm: 2.5 | tokens per gpu per second(tgs): 633.5 |",
            "megatron",
            (13, 176_500_000, NAN, NAN, 633.5, NAN, 0.65, -1),
        ),
        (
            "Train:   2%|#  | 1/60 [00:42<41:47, 42.51s/it]{'loss': '0.3713', 'grad_norm': '0.89', "
            "'epoch': '0.086', 'global_step/max_steps': '1/60', 'elapsed_time': '43s'}",
            "ms-swift",
            (1, -1, NAN, NAN, NAN, NAN, 0.3713, -1),
        ),
        (
            "2026-08-10 15:55:20 | INFO | root | step 9 | epoch 0 | loss 0.6974 | grad_norm 1.5436 "
            "| lr 1.00e-05 | mem 24.90 GiB | tps 11278.5(1409.5/gpu) | num_label_tokens 21541",
            "nemo",
            (9, -1, NAN, NAN, 1409.5, NAN, 0.6974, -1),
        ),
        (
            "2026-08-10 15:55:20 | INFO | root | step 9 | epoch 0 | loss 0.6974 | tps 11278.5 | x",
            "nemo",
            (9, -1, NAN, NAN, NAN, NAN, 0.6974, -1),
        ),
        (
            "12/21 01:39:51 [INFO|DP=0|TP=0|n7]: iteration: 8 / 100 | consumed_tokens: 480B | "
            "time_per_iteration_ms: 8.79K | tokens_per_sec: 182K | tokens_per_sec_per_gpu: 699 | "
            "global_batch_size: 1.6M | lm_loss: 2.04 | model_tflops_per_gpu: 15.5 | eta: 1:45:39",
            "nanotron",
            (8, 8_790_000_000, 15.5 * TERA, NAN, 699.0, NAN, 2.04, -1),
        ),
        (
            " 0: Training epoch 0, iteration 8/29 | lr: 5.3e-06 | global_batch_size: 512 | "
            "global_step: 8 | reduced_train_loss: 10.5 | train_step_timing in s: 6.5 | "
            "TFLOPS_per_GPU: 1.25e+03",
            "nemo",
            (8, 6_500_000_000, 1250 * TERA, NAN, NAN, NAN, 10.5, 512),
        ),
        (
            "3:  [2026-05-29 03:52:45] iteration      300/     400 | consumed tokens: 1.258B | "
            "elapsed time per iteration (ms): 131.5 | tokens/sec/gpu: 8000.5 | lm loss: 1.5E+00 |",
            "megatron",
            (300, 131_500_000, NAN, NAN, 8000.5, NAN, 1.5, -1),
        ),
        (
            "[rank0]:2024-07-10 12:00:11,123 - root - INFO - [36mstep:  1  [32mloss: 12.25  "
            "[33mmemory: 10.40GiB(10.93%)  [34mwps: 1,234  [35mmfu: 1.50%[39m",
            "torchtitan",
            (1, -1, NAN, 0.015, 1234.0, NAN, 12.25, -1),
        ),
        (
            "completed step: 3, seconds: 1.5, TFLOP/s/device: 100.5, Tokens/s/device: 5000.5, "
            "total_weights: 65536, loss: 9.5",
            "maxtext",
            (3, 1_500_000_000, 100.5 * TERA, NAN, 5000.5, NAN, 9.5, -1),
        ),
        (
            "completed step: 5, seconds: 0.25, TFLOP/s: 54.5, loss: 9.5",
            "maxtext",
            (5, 250_000_000, 54.5 * TERA, NAN, NAN, NAN, 9.5, -1),
        ),
        (
            "iter 10: loss 4.1234, time 123.45ms, mfu 12.5%",
            "nanogpt",
            (10, 123_450_000, NAN, 0.125, NAN, NAN, 4.1234, -1),
        ),
    ],
)  # fmt: skip
def test_logs_of_every_framework_give_the_same_steps(
    tmp_path: Path, line: str, framework: str, row: tuple[float, ...]
) -> None:
    log = read(tmp_path, line.rstrip("\n") + "\n")
    steps = log.steps
    columns = (steps.step, steps.step_ns, steps.flops_per_s_per_gpu, steps.mfu,
               steps.tokens_per_s_per_gpu, steps.samples_per_s, steps.loss,
               steps.global_batch)  # fmt: skip
    assert [column[0] for column in columns] == pytest.approx(row, nan_ok=True)
    assert (log.framework, len(steps), log.unparsed) == (framework, 1, 0)
    assert is_training_log(line.encode())


def composer(heading: str, loss: float) -> str:
    metrics = {
        "time/batch": 4, "loss/train/total": loss, "throughput/samples_per_sec": 3.25,
        "throughput/device/tokens_per_sec": 412.5, "throughput/device/flops_per_sec": 7.5e13,
        "throughput/device/mfu": 0.25, "expert/x": "<Image object at 0x71>",
    }  # fmt: skip
    return f"{heading}:\n" + "".join(f"\t Train {name}: {metrics[name]}\n" for name in metrics)


def test_composer_prints_one_metric_per_line(tmp_path: Path) -> None:
    text = composer("[batch=1/3]", 12.5) + composer("[batch=2/3]", 11.5)
    log = read(tmp_path, text + "[Eval batch=1/2] Eval on eval data\n\t Eval loss: 1.0\n")
    steps = log.steps
    assert (log.framework, steps.step.tolist()) == ("composer", [1, 2])
    assert steps.loss.tolist() == [12.5, 11.5]
    rates = steps.samples_per_s, steps.tokens_per_s_per_gpu, steps.flops_per_s_per_gpu, steps.mfu
    assert [rate.tolist() for rate in rates] == [[rate] * 2 for rate in (3.25, 412.5, 7.5e13, 0.25)]
    assert [note.code for note in log.notes] == ["no_step_time"]
    assert is_training_log(text.encode())


def test_composer_counts_batches_of_an_epoch(tmp_path: Path) -> None:
    text = composer("[epoch=1][batch=7/7]", 12.5) + composer("[epoch=2][batch=5/7]", 11.5)
    assert read(tmp_path, text).steps.step.tolist() == [7, 12]


def trainer_row(loss: str, epoch: str) -> str:
    """As transformers 5.23 prints it."""
    return (
        f"{{'loss': '{loss}', 'grad_norm': '1.1', 'learning_rate': '3e-05', 'epoch': '{epoch}'}}\n"
    )


# Each state of the bar begins with a carriage return, and is drawn again after a line.
TRAINER_BAR = (
    "  0%|          | 0/60 [00:00<?, ?it/s]loader.py:759: UserWarning: 'pin_memory' is set\n"
    "\r 23%|██▎       | 14/60 [00:46<02:10,  2.83s/it]"
    "\r 25%|██▌       | 15/60 [00:49<02:18,  3.07s/it]\r                                 \n"
    + trainer_row("3.897", "0.4688")
    + "\r 25%|██▌       | 15/60 [00:49<02:18,  3.07s/it]"
    "\r 27%|██▋       | 16/60 [00:53<02:27,  3.35s/it]"
    "\r 50%|█████     | 30/60 [01:39<01:41,  3.37s/it]\r                                 \n"
    + trainer_row("3.896", "0.9375")
    + "\r 50%|█████     | 30/60 [01:39<01:41,  3.37s/it]\r                              \n"
    "{'eval_loss': '3.9', 'eval_runtime': '1.2', 'epoch': '0.9375'}\n"
    "\r 50%|█████     | 30/60 [01:41<01:41,  3.37s/it]"
    "\r 52%|█████▏    | 31/60 [01:46<02:05,  4.31s/it]"
)


def test_steps_of_transformers_are_where_its_bar_stands(tmp_path: Path) -> None:
    """A row lasts as long as the bar counts: 49 s for 15 steps, then 50 s for as many."""
    log = read(tmp_path, TRAINER_BAR)
    steps = log.steps
    assert (log.framework, log.unparsed) == ("transformers", 0)
    assert (steps.step.tolist(), steps.steps_in_row.tolist()) == ([15, 30], [15, 15])
    assert steps.loss.tolist() == [3.897, 3.896]
    assert steps.step_ns.tolist() == [49 * 10**9 // 15, 50 * 10**9 // 15]
    assert [note.code for note in log.notes] == ["step_time_by_clock"]
    assert is_training_log(TRAINER_BAR.encode())


def test_rows_that_are_short_for_a_bar_of_whole_seconds_have_no_time(tmp_path: Path) -> None:
    text = TRAINER_BAR.replace("[01:39<", "[00:51<").replace("[01:41<", "[00:53<")
    assert read(tmp_path, text).steps.step_ns.tolist() == [49 * 10**9 // 15, -1]


def trainer_lines(*epochs: str, runtime: str = "92.54", rate: str = "0.216") -> str:
    end = f"{{'train_runtime': '{runtime}', 'train_steps_per_second': '{rate}', 'epoch': '0.625'"
    return "".join(trainer_row("3.9", at) for at in epochs) + end + "}\n"


def test_without_a_bar_exact_epochs_give_the_steps_and_the_end_their_mean_time(
    tmp_path: Path,
) -> None:
    """20 steps are 0.625 epochs of 32: as printed by a run with disable_tqdm."""
    log = read(tmp_path, trainer_lines("0.1562", "0.3125", "0.4688", "0.625"))
    assert log.steps.step.tolist() == [5, 10, 15, 20]
    (note,) = log.notes
    assert note.code == "no_step_time" and note.message.endswith("between steps, is 4,630 ms")


def test_epochs_with_two_digits_do_not_give_the_steps_of_a_long_run(tmp_path: Path) -> None:
    """Of 10,000 steps in an epoch, a hundredth is 100."""
    text = trainer_lines("0.16", "0.31", runtime="612.5", rate="10.204")
    log = read(tmp_path, text)
    assert (log.framework, len(log.steps), log.unparsed) == ("transformers", 0, 2)
    assert "no_steps" in [note.code for note in log.notes]
    assert is_training_log(text.encode())
    assert not is_training_log(f"# It prints {text}".replace("\n{", "\n# {").encode())


def test_the_first_row_of_a_start_and_slow_ones_after_it_are_warm_up(tmp_path: Path) -> None:
    times = [(1, 300), (2, 126), (3, 100), (4, 200), (5, 100), (6, 100)]
    again = [(5, 250), (6, 100), (7, 100)]
    log = read(tmp_path, "".join(megatron(*each) for each in times + again))
    assert log.steps.start.tolist() == [0] * 6 + [1] * 3
    assert log.steps.step.tolist() == [1, 2, 3, 4, 5, 6, 5, 6, 7]
    assert log.steps.warmup.tolist() == [True, True, *[False] * 4, True, False, False]
    assert (log.restarts, log.steps.median_step_ns) == (1, 100 * MS)


def test_a_row_is_the_mean_of_the_steps_since_the_previous_row(tmp_path: Path) -> None:
    lines = [megatron(step) for step in (10, 20, 40)]
    log = read(tmp_path, "  log_interval ..................... 10\n" + "".join(lines))
    assert log.steps.steps_in_row.tolist() == [10, 10, 20]
    assert read(tmp_path, "".join(lines)).steps.steps_in_row.tolist() == [1, 10, 20]


def test_a_single_row_is_warm_up_and_has_no_median(tmp_path: Path) -> None:
    assert read(tmp_path, megatron(1)).steps.median_step_ns is None


def test_every_rank_prints_and_one_row_is_kept(tmp_path: Path) -> None:
    ranks = ("[rank0]:", "[rank1]:")
    text = "".join(titan(step, before=rank) for step in (1, 2) for rank in ranks)
    late = titan(3, before=ranks[0]) + titan(2, before=ranks[1]) + titan(3, before=ranks[1])
    log = read(tmp_path, text + late)
    assert (log.steps.step.tolist(), log.restarts) == ([1, 2, 3], 0)


def test_the_loss_is_from_the_rank_that_has_it(tmp_path: Path) -> None:
    text = titan(1, before="[rank0]:", loss=-1) + titan(1, before="[rank7]:", loss=8.5)
    assert read(tmp_path, text).steps.loss.tolist() == [8.5]


def test_a_launch_at_the_same_step_is_a_restart(tmp_path: Path) -> None:
    begin = "using world size: 8, data-parallel-size: 2, tensor-model-parallel size: 4, pipeline"
    log = read(tmp_path, f"{begin}\n{megatron(10)}{begin}\n{begin}\n{megatron(10)}")
    assert (log.restarts, log.world_size, log.mesh) == (1, 8, (("dp", 2), ("tp", 4)))


def test_time_stamps_give_the_step_time_if_lines_have_none(tmp_path: Path) -> None:
    lines = titan(1, "10,000"), titan(10, "19,000"), titan(20, "29,005"), titan(30, "39,005")
    log = read(tmp_path, "".join(lines))
    assert log.steps.step_ns.tolist() == [-1, S, 1_000_500_000, S]
    assert [note.code for note in log.notes] == ["step_time_by_clock"]


def test_deepspeed_lines_fill_the_row_of_megatrons_line(tmp_path: Path) -> None:
    def timer(step: int) -> str:
        return (
            f"[2024-03-07 15:27:02,646] [INFO] [timer.py:260:stop] epoch=0/micro_step={step}/"
            f"global_step={step}, RunningAvgSamplesPerSec=58.7, CurrSamplesPerSec=6{step}.5, "
            "MemAllocated=6.0GB, MaxMemAllocated=19.5GB\n"
        )

    log = read(tmp_path, "".join(timer(step) + megatron(step) for step in (1, 2)) + timer(3))
    assert log.framework == "megatron-deepspeed"
    assert log.steps.step.tolist() == [1, 2]
    assert log.steps.samples_per_s.tolist() == [61.5, 62.5]
    assert log.steps.step_ns.tolist() == [100 * MS, 100 * MS]
    assert log.memory.max_allocated_bytes.tolist() == [int(19.5 * GIB)] * 3


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (
            "[Rank 7] (after 20 iterations) memory (MB) | allocated: 21633.0859375 | max allocated:"
            " 24432.5 | reserved: 29316.0 | max reserved: 29316.0[Rank 6] (after 20 iterations) "
            "memory (MB) | allocated: 1.0 | max allocated: 2.0 | reserved: 3.00 | max reserved: 4",
            [(7, 20, 22683934720, 25619333120, 30740054016, 30740054016),
             (6, 20, MIB, 2 * MIB, 3 * MIB, 4 * MIB)],
        ),
        (
            "after 5 iterations memory (MB) | allocated: 1.5 | max allocated: 2.0 | cached: 3.0 | "
            "max cached: 4.0",
            [(-1, 5, 3 * MIB // 2, 2 * MIB, 3 * MIB, 4 * MIB)],
        ),
        (
            "[2021-05-26 04:37:53,114] [INFO] [utils.py:589:see_memory_usage] MA 2.5 GB         "
            "Max_MA 3.5 GB         CA 5.5 GB         Max_CA 6 GB ",
            [(-1, -1, 5 * GIB // 2, 7 * GIB // 2, 11 * GIB // 2, 6 * GIB)],
        ),
        (titan(4) * 2, [(-1, 4, -1, -1, -1, round(49.66 * GIB))]),
        (
            "Training epoch 0, iteration 8/29 | global_step: 8 | max_memory_reserved: 57466159104 "
            "| max_memory_allocated: 53930270720 | reduced_train_loss: 10.5",
            [(-1, 8, -1, 53930270720, -1, 57466159104)],
        ),
        ("[titan] validate step:  4  loss:  3.1  memory: 49.66GiB(52.28%)  tps: 5", []),
    ],
)  # fmt: skip
def test_memory_is_bytes_of_the_printing_rank(
    tmp_path: Path, text: str, rows: list[tuple[int, ...]]
) -> None:
    memory = read(tmp_path, f"{text}\n").memory
    assert list(zip(*(column.tolist() for column in astuple(memory)), strict=True)) == rows


def test_timers_include_pipeline_waits(tmp_path: Path) -> None:
    text = (
        "time (ms) | load-checkpoint: 0.35\n"
        + megatron(10)
        + "time (ms) | forward-compute: 306.62 | forward-recv: 527.58\n"
        + megatron(20)
        + "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (1234.56, 1240.12)\n"
        "[default1]:    batch-generator ......: (1.06, 1.07)training ...\n"
        "max time across ranks (ms):\n"
        "    optimizer ......................................: 12.34\n"
        "  fp16 ............................................ True\n"
    )
    timers = read(tmp_path, text).timers
    names = [timers.names[i] for i in timers.name_id]
    rows = list(zip(timers.step, names, timers.min_ns, timers.max_ns, strict=True))
    assert rows == [
        (-1, "load-checkpoint", 350_000, 350_000),
        (10, "forward-compute", 306_620_000, 306_620_000),
        (10, "forward-recv", 527_580_000, 527_580_000),
        (20, "forward-backward", 1_234_560_000, 1_240_120_000),
        (20, "batch-generator", 1_060_000, 1_070_000),
        (20, "optimizer", -1, 12_340_000),
    ]


@pytest.mark.parametrize(
    ("text", "world_size", "mesh"),
    [
        (
            "using world size: 16, data-parallel size: 2, context-parallel size: 2, hierarchical "
            "context-parallel sizes: None, tensor-model-parallel size: 2, "
            "encoder-tensor-model-parallel size: 0, pipeline-model-parallel size: 2, ",
            16,
            (("pp", 2), ("dp", 2), ("cp", 2), ("tp", 2)),
        ),
        (
            "  data_parallel_size .............. 2\n  expert_model_parallel_size ...... 4\n"
            "  pipeline_model_parallel_size .... 2\n  tensor_model_parallel_size ...... 4\n"
            "  use_tp_pp_dp_mapping ............ True\n  world_size ............... 16",
            16,
            (("dp", 2), ("pp", 2), ("tp", 4), ("ep", 4)),
        ),
        (
            "[rank0]:2024-08-11 10:00:00,000 - root - INFO - Building 2-D device mesh with "
            "['dp_shard', 'tp'], [4, 2]",
            8,
            (("dp_shard", 4), ("tp", 2)),
        ),
        (
            "[titan] Building device mesh with parallelism: pp=2, dp_replicate=1, dp_shard=4, "
            "cp=1, tp=2, ep=4, etp=1",
            16,
            (("pp", 2), ("dp_replicate", 1), ("dp_shard", 4), ("cp", 1), ("tp", 2), ("ep", 4)),
        ),
    ],
)  # fmt: skip
def test_the_mesh_is_read_from_the_log(
    tmp_path: Path, text: str, world_size: int, mesh: tuple[tuple[str, int], ...]
) -> None:
    log = read(tmp_path, f"{text}\n")
    assert (log.world_size, log.mesh) == (world_size, mesh)
    assert is_training_log(text.encode())


def test_arguments_are_as_printed_and_the_last_value_counts(tmp_path: Path) -> None:
    text = (
        "  bf16 ............................................ False\n"
        "[2021-05-26 04:38:20,033] [INFO] [config.py:752:print]   train_batch_size ..... 512\n"
        "[default0]:  data_path ....................... ['/a b/c']\n"
        "cpu_adam ............... [NO] ....... [OKAY]\n"
        "  bf16 ............................................ True\n"
    )
    log = read(tmp_path, text)
    assert log.arguments == (
        ("bf16", "True"), ("train_batch_size", "512"), ("data_path", "['/a b/c']"),
    )  # fmt: skip


TRACEBACK = "[rank3]: Traceback (most recent call last):\n"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TIMEOUT = "[Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)"
CANCELED = "slurmstepd: error: *** JOB 7 ON r1 CANCELLED AT 2021-05-23T08:46:02 ***"


@pytest.mark.parametrize(
    ("tail", "crashed", "error"),
    [
        ("", False, ""),
        (f"{TRACEBACK}[rank3]: {OOM}\ntorch.distributed.ChildFailedError: \n", True, OOM),
        (f"{TIMEOUT}\n{CANCELED}\n", True, TIMEOUT),
        (f"{CANCELED}\n{TRACEBACK}Main process received SIGTERM\n", False, CANCELED),
        (f"{TRACEBACK}RuntimeError: NCCL error in: x.cpp:1, unhandled system error\n", True,
         "RuntimeError: NCCL error in: x.cpp:1, unhandled system error"),
        (f"{TRACEBACK}{OOM}\n{megatron(2)}", False, ""),
    ],
)  # fmt: skip
def test_a_run_crashed_if_it_failed_after_its_last_step(
    tmp_path: Path, tail: str, crashed: bool, error: str
) -> None:
    log = read(tmp_path, megatron(1) + tail)
    assert (log.crashed, log.error) == (crashed, error)


def test_progress_bars_and_colors_hide_nothing(tmp_path: Path) -> None:
    bar = " 51%|#####     | 507/1000 [15:32<16:42,  2.03s/it]"
    log = read(tmp_path, f"{bar}\r{bar}\r\x1b[32m12: {megatron(1)}{bar}\r{megatron(2)}")
    assert log.steps.step.tolist() == [1, 2]


def test_an_unreadable_step_is_counted_with_a_note(tmp_path: Path) -> None:
    torn = " | elapsed time per iteration (ms): 12[Rank 3] memory\n"
    log = read(tmp_path, megatron(1) + torn + megatron(2))
    assert (len(log.steps), log.unparsed) == (2, 1)
    assert [note.code for note in log.notes] == ["odd_lines"]


def test_a_file_without_a_run_is_an_error_of_one_line(tmp_path: Path) -> None:
    for text in (b"", b"hello\nworld\n", bytes(range(256)) * 500):
        with pytest.raises(DataError, match="no training run found"):
            read(tmp_path, text)


WHOLE = (megatron(1, 2152.25) + titan(1, before="[rank0]:") + megatron(2, 1381.75)).encode()


def test_a_truncated_number_is_ignored(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for cut in range(1, len(WHOLE), 7):
        with subtests.test(cut=cut), suppress(DataError):
            log = read(tmp_path, WHOLE[:cut])
            assert set(log.steps.step_ns.tolist()) <= {-1, 2_152_250_000, 1_381_750_000}
            assert set(log.steps.global_batch.tolist()) <= {-1, 4}
            assert set(log.memory.max_reserved_bytes.tolist()) <= {round(49.66 * GIB)}


def test_a_truncated_compressed_log_is_read_up_to_the_damage(tmp_path: Path) -> None:
    packed = gzip.compress("".join(megatron(step, step * 7.3) for step in range(1, 900)).encode())
    log = read(tmp_path, packed[: len(packed) // 2])
    assert 100 < len(log.steps) < 899
    assert [note.code for note in log.notes] == ["file_torn"]


@pytest.mark.parametrize(
    "line",
    [
        "iteration 9/ 10 | elapsed time per iteration (ms): 1E9999 | global batch size: 1e300 |",
        "iteration 9/ 10 | elapsed time per iteration (ms): -5 | lm loss: nan |",
        "step: 999999999999999999999  loss: 3",
        "[Rank 1] (after 2 iterations) memory (MB) | allocated: 1.2.3 | max allocated: . | "
        "reserved: 9" + "9" * 400 + " | max reserved: 4",
        "step: 1  loss: " + "a" * 70_000,
        "[titan] 2025-13-41 22:30:38,735 step: 1  loss: 2.5",
        "    x ........: (1.2.3, ..)",
    ],
)
def test_invalid_numbers_are_unknown(tmp_path: Path, line: str) -> None:
    log = read(tmp_path, f"{megatron(1)}{line}\n")
    assert max(log.steps.step_ns) == 100 * MS
    assert max(log.memory.allocated_bytes, default=-1) == -1


# The real files


@pytest.mark.parametrize(
    ("name", "world_size", "pp", "rows", "median_ms", "first_ms"),
    [
        ("base_n4_dp1_tp4_pp4-1809579", 16, 4, 20, 1381, 2152),
        ("base_n8_dp1_tp4_pp8-1809562", 32, 8, 20, 1617, 3171),
        ("base_n16_dp1_tp4_pp16-1809577", 64, 16, 9, 2741, 5838),
    ],
)
def test_three_runs_have_the_medians_that_are_known(
    name: str, world_size: int, pp: int, rows: int, median_ms: int, first_ms: int
) -> None:
    file = on_disk(shared_trace(BIGSCIENCE) / f"gpt2-meg__meg_gpt2_{name}.out")
    log = read_train_log(file)
    assert (log.framework, log.world_size) == ("megatron", world_size)
    assert log.mesh == (("pp", pp), ("dp", 1), ("tp", 4))
    assert (len(log.steps), log.restarts, log.unparsed) == (rows, 0, 0)
    assert log.steps.steps_in_row.tolist() == [10] * rows
    assert log.steps.warmup.tolist() == [True] + [False] * (rows - 1)
    # The known medians count the first row, which moves the shortest run's by one.
    assert log.steps.median_step_ns == pytest.approx(median_ms * MS, abs=MS)
    assert round(log.steps.step_ns[0] / MS) == first_ms
    assert sorted(log.memory.rank) == list(range(world_size))
    assert set(log.memory.step) == {20}
    assert (log.crashed, log.error[:22]) == (False, "slurmstepd: error: ***")
    assert {"forward-recv", "backward-send-forward-recv"} < set(log.timers.names)
    assert is_training_log(read_head(file)), "its first 64 KiB are a batch script's echo"


@pytest.mark.parametrize(
    ("file", "framework", "rows"),
    [
        ("gpt2-meg-ds-3d__meg_ds_3d_gpt2_perf_n16-ds-off.out", "megatron-deepspeed", 62),
        ("gpt2-meg__meg_gpt2_perf_n16.out", "megatron", 3),
        ("gpt2-hf-ds__hf_ds_gpt2_perf_n16_bs4-mbs8.out", "deepspeed", 0),
    ],
)
def test_the_other_runs_have_as_many_rows_as_lines(file: str, framework: str, rows: int) -> None:
    log = read_train_log(on_disk(shared_trace(BIGSCIENCE) / file))
    assert (log.framework, log.world_size, len(log.steps)) == (framework, 64, rows)
    assert log.steps.step.tolist() == list(range(1, rows + 1))
    assert [note.code for note in log.notes] == ([] if rows else ["no_steps"])
    assert (log.steps.median_step_ns is None) == (rows == 0)


def test_real_step_times_equal_the_text(subtests: pytest.Subtests) -> None:
    for file in sorted(shared_trace(BIGSCIENCE).glob("*.out")):
        with subtests.test(file.name):
            stated = re.findall(r"per iteration \(ms\): ([\d.]+)", file.read_text(errors="replace"))
            log = read_train_log(on_disk(file))
            assert log.steps.step_ns.tolist() == [round(float(ms) * 10) * 100_000 for ms in stated]
            usual = [float(ms) * MS for ms in stated[1:]]
            assert log.steps.median_step_ns == (int(statistics.median(usual)) if usual else None)


def test_no_other_real_file_is_recognized_as_a_training_log() -> None:
    folder = shared_trace(BIGSCIENCE).parent
    files = [file for file in folder.rglob("*") if file.is_file()]
    taken = {file.name for file in files if is_training_log(head_of_file(file))}
    logs = {file.name for file in files if file.suffix == ".out"}
    assert taken == logs | {"full_bigscience_2.7.8_64xV100_megatron_tp4_pp16.log"}


def test_a_head_full_of_echo_may_be_a_log_and_a_short_or_nccl_one_is_not() -> None:
    echo = b"++ module load pytorch-gpu/py3/1.8.0\n" * 4000
    assert is_training_log(echo[:HEAD_BYTES])
    assert not is_training_log(echo[:1000])
    assert not is_training_log((b"r1:1:1 [0] NCCL INFO NET/IB\n" + echo)[:HEAD_BYTES])


def test_recognizing_never_raises() -> None:
    for junk in (b"", b"\xff\xfe" * 999, bytes(65536), b"\x1b[" * 999, b"iteration " * 6000):
        assert not is_training_log(junk)
    assert not is_training_log(json.dumps({"text": megatron(1)}).encode())


# Megatron-LM's golden values


def golden(values: object) -> dict[str, object]:
    return {"start_step": 0, "end_step": 10, "step_interval": 5, "values": values}


@pytest.mark.parametrize("values", [{"0": 8.5, "5": 0.25, "10": "nan"}, [8.5, 0.25, "nan"]])
def test_golden_values_of_both_ages_are_steps(tmp_path: Path, values: object) -> None:
    file = tmp_path / "golden_values_dev_dgx_a100.json"
    memory = golden({"0": 1024.0, "5": 2048.0})
    file.write_text(json.dumps({"iteration-time": golden(values), "mem-allocated-bytes": memory}))
    log = read_golden_values(on_disk(file))
    assert golden_values.is_golden_values(file.read_bytes())
    assert not is_training_log(file.read_bytes())
    assert log.steps.step.tolist() == [0, 5, 10]
    assert log.steps.step_ns.tolist() == [8_500_000_000, 250_000_000, -1]
    assert log.steps.steps_in_row.tolist() == [1, 1, 1]
    assert log.steps.median_step_ns == 250_000_000
    assert log.memory.allocated_bytes.tolist() == [1024, 2048]


def test_invalid_golden_values_are_an_error_of_one_line(tmp_path: Path) -> None:
    file = tmp_path / "golden.json"
    whole = json.dumps({"iteration-time": golden({"1": 2.5})})
    odd = [whole[:at] for at in range(0, len(whole), 9)]
    odd += ['{"lm loss": {"start_step": 1, "step_interval": 1, "values": {}}}', "[1]", "\x00\x01"]
    for text in odd:
        file.write_text(text)
        with pytest.raises(DataError):
            read_golden_values(on_disk(file))


def test_real_golden_values_have_a_time_per_step(tmp_path: Path) -> None:
    packed = shared_trace("golden_megatron_ci") / "golden_a100.tar.xz"
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    files = sorted(tmp_path.rglob("golden_values*.json"))
    assert len(files) == 474
    for file in files[::20]:
        values = json.loads(file.read_bytes())["iteration-time"]["values"]
        log = read_golden_values(on_disk(file))
        assert golden_values.is_golden_values(head_of_file(file))
        known = [ns for ns in log.steps.step_ns.tolist() if ns >= 0]
        seconds = [s for s in values.values() if s != "nan"] if isinstance(values, dict) else values
        assert known == [round(s * S) for s in seconds]


def test_the_log_of_primus_has_the_values_of_each_row() -> None:
    log = read_train_log(on_disk(shared_repro("wild2") / "primus_log" / "train.log"))
    assert log.notes == ()
    assert set(log.steps.step_ns[1:].tolist()) == {5 * S}
    assert set(log.steps.flops_per_s_per_gpu.tolist()) == {401.5 * TERA}
    assert set(log.steps.tokens_per_s_per_gpu.tolist()) == {13107.2}


def test_a_line_of_verl_with_validation_alone_is_no_step(tmp_path: Path) -> None:
    step = "step:{} - timing_s/step:{}.0 - perf/throughput:5.0\n"
    text = step.format(1, 9) + "step:1 - val-core/gsm8k/acc:0.5\n" + step.format(2, 8)
    log = read(tmp_path, text)
    assert log.steps.step.tolist() == [1, 2]
    assert log.steps.step_ns.tolist() == [9 * S, 8 * S]
