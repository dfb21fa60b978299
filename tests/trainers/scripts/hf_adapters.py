"""Adapters of PEFT under the Trainer and under TRL's SFTTrainer, run on two ranks; each rank saves what it saw.

torchrun --nproc-per-node 2 hf_adapters.py FOLDER CASE...
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from hf_model import arguments, gpt, trainer_of
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainerCallback, set_seed

from gossamer.trainers import hf

RANK = int(os.environ["RANK"])
LORA = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)


def adapted(width: int = 64) -> PeftModel:
    base = gpt(width=width)
    set_seed(7)
    model = get_peft_model(base, LORA)
    assert isinstance(model, PeftModel)
    return model


def part(model: torch.nn.Module, trains: bool) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters() if p.requires_grad == trains])


class Start(TrainerCallback):
    """Notes the bytes that were sent before the first step, and those of all steps."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.start = self.trainer.communicator.metrics()["sent_bytes"]

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.last = self.trainer.communicator.metrics()["sent_bytes"]


def lora(folder: Path) -> dict[str, Any]:
    """A frozen base that is equal on all ranks, and one of which a matrix differs on rank 1."""
    out = dict[str, Any]()
    for name in ("start", "start, one differs"):
        model, start = adapted(), Start()
        out |= {"base before": part(model, False), "adapter before": part(model, True)}
        matrix = model.base_model.model.transformer.h[1].mlp.c_fc.weight
        if name != "start" and RANK == 1:
            with torch.no_grad():
                matrix += 1
        trainer = start.trainer = trainer_of(folder, start, model=model, max_steps=4)
        hf.use(trainer, "topk(ratio=0.01)")
        trainer.train()
        out |= {name: start.start, "per step": (start.last - start.start) / 4}
        out |= {"base": part(model, False), "adapter": part(model, True), "differing bytes": matrix.numel() * 4}
    out |= {"base bytes": out["base"].numel() * 4, "adapter bytes": out["adapter"].numel() * 4}
    model = adapted()
    trainer = trainer_of(folder / "sidecars", model=model, save_strategy="steps", save_steps=3, max_steps=3)
    hf.use(trainer, "local_sgd(4)")
    trainer.train()
    out["sidecar bytes"] = (folder / "sidecars" / "checkpoint-3" / f"gossamer-rank{RANK}-of-2.pt").stat().st_size
    return out


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )  # fmt: skip


WORDS = ["a", "spider", "spins", "threads", "of", "silk", "between", "two", "leaves", "when", "wind", "is", "low"]


def sft(folder: Path) -> dict[str, Any]:
    """TRL's SFTTrainer: unbroken, and resumed from a checkpoint inside a round."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(WORDS[i % 7 : i % 7 + 5]) for i in range(48)]
    rows = Dataset.from_dict({"text": texts})
    given = arguments(folder, save_strategy="steps", save_steps=6, activation_checkpointing=False, max_steps=11)
    out: dict[str, Any] = {"before": part(adapted(16), True)}
    for recipe in ("topk(ratio=0.1)", "local_sgd(4)"):
        finals = list[Any]()
        for resume in (False, True):
            config = SFTConfig(
                max_length=8, **{n: getattr(given, n) for n in NAMES} | {"output_dir": str(folder / f"sft {recipe}")}
            )
            set_seed(7)
            trainer = SFTTrainer(
                gpt(width=16), config, train_dataset=rows, processing_class=tokenizer(), peft_config=LORA
            )
            hf.use(trainer, recipe)
            trainer.train(resume_from_checkpoint=resume)
            finals.append(part(trainer.model, True))
        out |= {
            recipe: finals,
            f"{recipe} steps": trainer.state.global_step,
            f"{recipe} logged": sum("gossamer/sent_bytes_per_step" in h for h in trainer.state.log_history),
        }
    return out


NAMES = (
    "use_cpu", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "max_grad_norm", "learning_rate",
    "logging_steps", "save_strategy", "save_steps", "report_to", "disable_tqdm", "average_tokens_across_devices",
    "activation_checkpointing",
)  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for case in sys.argv[2:]:
        torch.save(globals()[case](folder), folder / f"{case}-rank{RANK}.pt")
