"""GRPO of TRL on a tiny random model, on the ranks of torchrun: `grpo_job.py FOLDER STEPS`."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer


def reward_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(one)) for one in completions]


def main(folder: str, steps: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(126))]
    splitter = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    splitter.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=splitter, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    config = Qwen2Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    # The reference model is loaded from where the policy was.
    where = f"{folder}/model{os.environ['RANK']}"
    Qwen2ForCausalLM(config).save_pretrained(where)
    tokenizer.save_pretrained(where)
    arguments = GRPOConfig(
        output_dir=f"{folder}/out", use_cpu=True, max_steps=int(steps), num_generations=4,
        per_device_train_batch_size=4, max_completion_length=12, beta=0.1, report_to=[],
        logging_steps=5, save_strategy="no", bf16=False,
    )  # fmt: skip
    prompts = [f"w{number % 100} w{number * 7 % 100}" for number in range(200)]
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(where), reward_funcs=reward_length, args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
