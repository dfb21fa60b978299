"""Through Hugging Face's Trainer: the time to DDP's held-out loss under a recipe, over DDP's.

gossamer lab --hosts 4 --rate 200mbit -- python benchmarks/hf_trainer.py topk "local_sgd(8)"

A small GPT from a config learns which words may follow which. `ddp` is the Trainer as it is, for --steps steps; its last
held-out loss is the target, and the others have --most times as many steps to reach it. Evaluations are not in the times.
"""

import argparse
import os
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from gossamer.trainers import hf

WORDS, FOLLOWERS, LENGTH, EVERY = 2048, 4, 16, 10


class Chain(Dataset[dict[str, Tensor]]):
    """Rows of words; each may be followed by few others."""

    def __init__(self, rows: int, seed: int) -> None:
        followers = torch.randint(WORDS, (WORDS, FOLLOWERS), generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        words = [torch.randint(WORDS, (rows,), generator=generator)]
        for _ in range(LENGTH - 1):
            chosen = torch.randint(FOLLOWERS, (rows,), generator=generator)
            words.append(followers[words[-1], chosen])
        self.rows = torch.stack(words, dim=1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class Curve(TrainerCallback):
    """The held-out loss by seconds of training; ends training at the target."""

    def __init__(self, target: float) -> None:
        self.target, self.seconds, self.steps = target, 0.0, 0
        self.points = list[tuple[float, float]]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        now = time.perf_counter()
        self.seconds, self.began, self.steps = self.seconds + now - self.began, now, state.global_step

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **given: Any) -> None:
        self.points.append((self.seconds, metrics["eval_loss"]))
        if metrics["eval_loss"] <= self.target:  # else leave it be: the last step may have set it
            control.should_training_stop = True
        self.began = time.perf_counter()

    def seconds_to(self, target: float) -> float | None:
        return next((seconds for seconds, loss in self.points if loss <= target), None)


def train(way: str, steps: int, target: float) -> Curve:
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=192, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
        )
    )
    curve = Curve(target)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=8, per_device_eval_batch_size=64, max_steps=steps,
            learning_rate=0.002, lr_scheduler_type="constant", eval_strategy="steps", eval_steps=EVERY, save_strategy="no",
            logging_steps=EVERY, report_to="none", disable_tqdm=True, average_tokens_across_devices=False,
            ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Chain(8192, 1), eval_dataset=Chain(256, 2), callbacks=[curve])
        trainer.log = lambda *given, **more: None  # the table at the end is enough
        if way != "ddp":
            hf.use(trainer, way)
        trainer.train()
    return curve


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["topk", "local_sgd(8)"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--most", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    stock = train("ddp", args.steps, target=0.0)
    target = stock.points[-1][1]
    whole = stock.seconds_to(target)
    assert whole is not None
    say(f"load {os.getloadavg()[0]:.1f}; held-out loss {target:.4f}")
    for way in ["ddp", *args.recipes]:
        curve = stock if way == "ddp" else train(way, args.most * args.steps, target)
        seconds, last = curve.seconds_to(target), curve.points[-1][1]
        reached = (
            f"{seconds:.1f} s, {seconds / whole:.3f} of DDP's" if seconds is not None else f"not reached: {last:.4f}"
        )
        step = 1000 * curve.seconds / curve.steps
        say(f"{way:24} step {step:7.1f} ms, {curve.steps:5} steps; to the loss {reached}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
