"""A small GPT from a config, rows of tokens, and a Trainer for the scripts beside."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

ROWS, LENGTH, WORDS = 48, 8, 40


def gpt(dropout: float = 0.1, seed: int = 5, width: int = 16) -> GPT2LMHeadModel:
    set_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=width,
            n_layer=2,
            n_head=2,
            bos_token_id=1,
            eos_token_id=1,
            attn_pdrop=dropout,
            embd_pdrop=dropout,
            resid_pdrop=dropout,
        )
    )


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, rows: int = ROWS, seed: int = 9) -> None:
        self.ids = torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 10,
        "max_grad_norm": 0.5,
        "learning_rate": 0.01,
        "weight_decay": 0.01,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "average_tokens_across_devices": False,
    }
    return TrainingArguments(**(given | more))


def trainer_of(folder: Path, *callbacks: TrainerCallback, model: nn.Module | None = None, **more: Any) -> Trainer:
    return Trainer(
        model if model is not None else gpt(),
        arguments(folder, **more),
        train_dataset=Tokens(),
        eval_dataset=Tokens(8, 1),
        callbacks=[*callbacks],
    )


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


class Kill(TrainerCallback):
    """Ends this process at once after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
