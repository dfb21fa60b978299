"""Cases of Hugging Face's Trainer, run on two ranks; each rank saves what it saw.

torchrun --nproc-per-node 2 hf_cases.py FOLDER CASE...
"""

import copy
import os
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from hf_model import Tokens, flat, forget_after, gpt, trainer_of
from torch import nn
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback
from wrappers import WRAPPERS

from gossamer.trainers import hf

RANK = int(os.environ["RANK"])


def error_of(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"
    return ""


def trained(folder: Path, recipe: str | None, *callbacks: TrainerCallback, resume: Any = None, **more: Any) -> Trainer:
    trainer = trainer_of(folder, *callbacks, **more)
    if recipe is not None:
        hf.use(trainer, recipe, seed=3)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def beside_stock(folder: Path, **more: Any) -> dict[str, Any]:
    """`allreduce` beside the stock Trainer's DDP: accumulation 2, clipping, AdamW, dropout."""
    out = dict[str, Any]()
    for name, recipe in {"stock": None, "ours": "allreduce"}.items():
        trainer = trained(folder, recipe, **more)
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        out |= {name: flat(trainer.model), f"{name} norms": norms}
    return out


def fp32(folder: Path) -> dict[str, Any]:
    return beside_stock(folder)


def bf16(folder: Path) -> dict[str, Any]:
    return beside_stock(folder, bf16=True)


def compiled(folder: Path) -> dict[str, Any]:
    return beside_stock(folder, torch_compile=True, torch_compile_backend="eager")


class Watched(TrainerCallback):
    """Notes the models in the middle of a round: this rank's own, and those that are judged and saved."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.own, self.judged, self.steps = folder, dict[int, Any](), dict[int, Any](), list[int]()
        self.predicted: Any = None
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.own[state.global_step] = flat(given["model"])
        self.steps.append(self.trainer.communicator.step)
        if state.global_step == 6:
            self.predicted = self.trainer.predict(Tokens(4, 2)).metrics["test_loss"]
            given["model"].save_pretrained(self.folder / f"by-hand-{RANK}")
            copied = copy.deepcopy(given["model"])
            copied.save_pretrained(self.folder / f"copied-{RANK}")
            self.trainer.push_to_hub()
            assert torch.equal(self.own[6], flat(given["model"]))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.judged[state.global_step] = flat(self.trainer.model)


class Hub:
    """Stands where the hub's client is; notes which model was there when it was asked to upload."""

    def __init__(self) -> None:
        self.uploaded = list[Any]()

    def upload_folder(self, folder_path: str, **rest: Any) -> None:
        self.uploaded.append(flat(GPT2LMHeadModel.from_pretrained(folder_path)))


def local(folder: Path) -> dict[str, Any]:
    """`local_sgd(4)`: judged, saved and pushed in the middle of a round; logged; the end of training."""
    hub, watched = Hub(), Watched(folder)
    transformers.trainer.hf_api = lambda: hub  # type: ignore[attr-defined]
    trainer = trainer_of(
        folder / "local", watched, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
        report_to="tensorboard",
    )  # fmt: skip
    watched.trainer, trainer.hub_model_id = trainer, "nobody/nothing"
    trainer.create_model_card = lambda **given: None
    hf.use(trainer, "local_sgd(4)")
    trainer.train()
    final = flat(trainer.model)
    trainer.save_model(str(folder / "final"))
    return {
        "own": watched.own,
        "judged": watched.judged,
        "steps": watched.steps,
        "predicted": watched.predicted,
        "final": final,
        "eval": trainer.evaluate()["eval_loss"],
        "uploaded": hub.uploaded,
        "by hand": flat(GPT2LMHeadModel.from_pretrained(folder / "by-hand-0")),
        "copied": flat(GPT2LMHeadModel.from_pretrained(folder / "copied-0")),
        "left": sorted(str(p.relative_to(folder / "local")) for p in (folder / "local").glob("*/gossamer*")),
        "after": "save_pretrained" in vars(trainer.model) or trainer.communicator is not None,
    }


def best(folder: Path) -> dict[str, Any]:
    """`load_best_model_at_end` in the middle of a round, where the best is not the last."""
    trainer = trained(
        folder / "best", "local_sgd(4)", eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True, save_total_limit=1,
    )  # fmt: skip
    chosen = trainer.state.best_model_checkpoint
    return {
        "chosen": Path(chosen).name,
        "final": flat(trainer.model),
        "saved": flat(GPT2LMHeadModel.from_pretrained(chosen)),
        "left": sorted(p.name for p in Path(chosen).glob("gossamer*")),
    }


def resumed(folder: Path) -> dict[str, Any]:
    """A new Trainer resumes from a checkpoint inside a round: with sidecars, of another recipe, without one of them."""
    saves = {"save_strategy": "steps", "save_steps": 6}
    out: dict[str, Any] = {"unbroken": flat(trained(folder / "resumed", "local_sgd(4)", **saves).model)}
    forget_after(6, folder / "resumed")
    out["resumed"] = flat(trained(folder / "resumed", "local_sgd(4)", resume=True, **saves).model)
    path = folder / "resumed" / "checkpoint-6"
    out["other"] = error_of(trained, folder, "topk", resume=str(path))
    dist.barrier()
    if RANK == 1:
        (path / "gossamer-rank1-of-2.pt").unlink()
    dist.barrier()
    out["missing"] = error_of(trained, folder, "local_sgd(4)", resume=str(path))
    trainer = trainer_of(folder)
    hf.use(trainer, "local_sgd(4)", public_only=True)
    trainer.train(resume_from_checkpoint=str(path))
    out["on purpose"] = flat(trainer.model)
    return out


class Told(TrainerCallback):
    """Rank 1 is told to stop after step 3; steps are slow enough to stop before the end."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 3 and RANK == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.05)


def told(folder: Path) -> dict[str, Any]:
    """A notice on rank 1: all save and stop after the same step, and a new Trainer goes on from there."""
    steps = {"max_steps": 60}
    unbroken = flat(trained(folder / "unbroken", "topk(ratio=0.1)", **steps).model)
    trainer = trainer_of(folder / "told", Told(), **steps)
    hf.use(trainer, "topk(ratio=0.1)", notice=120, seed=3)
    trainer.train()
    stopped, handler = trainer.state.global_step, signal.getsignal(signal.SIGUSR1)
    resumed = flat(trained(folder / "told", "topk(ratio=0.1)", resume=True, **steps).model)
    return {"unbroken": unbroken, "resumed": resumed, "stopped": stopped, "put back": handler is signal.SIG_DFL}


class Ledger:
    """Counts calls of torch.distributed that do not come from gossamer, by the function and who called it."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def install(self) -> None:
        for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast",
                     "broadcast_object_list", "gather", "reduce"):  # fmt: skip
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            frame, names = sys._getframe(1), list[str]()
            while frame is not None:
                names.append(f"{Path(frame.f_code.co_filename).as_posix()}:{frame.f_code.co_name}")
                frame = frame.f_back
            theirs = [n.rpartition(":")[2] for n in names if n.partition(":")[0].endswith("transformers/trainer.py")]
            if not any("/gossamer/" in n for n in names[:4]):
                self.calls[f"{name} by {theirs[0] if theirs else names[0]}"] += 1
            return call(*args, **options)

        return counted


class EachStep(TrainerCallback):
    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.steps, self.trainer, self.sent = ledger, list[Any](), None, list[Any]()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.steps.append(dict(self.ledger.calls))
        self.sent.append(self.trainer.communicator.metrics()["sent_bytes"])  # pyright: ignore[reportOptionalMemberAccess]
        self.ledger.calls.clear()


def counted(folder: Path) -> dict[str, Any]:
    """`local_sgd(8)`: what the Trainer itself sends in each step, by setting."""
    ledger, out = Ledger(), dict[str, Any]()
    ledger.install()
    for name, more in {
        "default": {"average_tokens_across_devices": True},
        "off": {},
        "logged": {"logging_steps": 1},
        "seen": {"include_num_input_tokens_seen": "all"},
    }.items():
        each = EachStep(ledger)
        trainer = each.trainer = trainer_of(folder, each, **{"logging_steps": 100, "max_steps": 9} | more)
        hf.use(trainer, "local_sgd(8)")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        out[name] = each.steps
        out[f"{name} sent"] = each.sent
        out[f"{name} said"] = [str(w.message) for w in caught if "in every step" in str(w.message)]
    return out


def refused(folder: Path) -> dict[str, Any]:
    """What is refused, and in which words, on this rank."""
    out, trainer = dict[str, Any](), trainer_of(folder)
    out["not a trainer"] = error_of(hf.use, gpt(), "topk")
    out["option"] = error_of(hf.use, trainer, "topk", ration=1)
    out["own option"] = error_of(hf.use, trainer, "topk", scaler=None)
    out["recipe"] = error_of(hf.use, trainer, "topq")
    for name, value in {"is_deepspeed_enabled": True, "is_fsdp_enabled": True, "is_in_train": True}.items():
        setattr(trainer, name, value)
        out[name] = error_of(hf.use, trainer, "topk")
        setattr(trainer, name, False)
    trainer.args.auto_find_batch_size = True
    out["auto_find_batch_size"] = error_of(hf.use, trainer, "topk")
    trainer.args.auto_find_batch_size = False
    hf.use(trainer, "topk")
    out["twice"] = error_of(hf.use, trainer, "topk")
    other = trainer_of(folder)
    other.args.__dict__["distributed_state"] = None
    other.args._n_gpu = 2
    out["n_gpu"] = error_of(hf.use, other, "topk")
    model = gpt()
    searching = Trainer(
        model, trainer_of(folder).args, train_dataset=Tokens(), optimizers=(torch.optim.LBFGS(model.parameters()), None)
    )
    hf.use(searching, "topk")
    out["LBFGS"] = error_of(searching.train)
    for name, kind in WRAPPERS.items():
        holder = gpt()
        holder.transformer.h[0] = kind(holder.transformer.h[0])
        out[name] = error_of(trained, folder, "topk", model=holder)
    out["lags"] = error_of(trained, folder, "allreduce + delayed()")
    out["LocalSGD"] = error_of(trained, folder, "local_sgd(4)", AroundLocalSGD())
    out["still trains"] = flat(trained(folder, "topk", max_steps=2).model)
    return out


class AroundLocalSGD(TrainerCallback):
    """Accelerate's LocalSGD around the steps of a Trainer."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        wrapped = self.model_of(given["model"])
        self.entered = LocalSGD(Accelerator(cpu=True), wrapped, 4)  # ends when nobody holds it
        self.entered.__enter__()

    def model_of(self, model: nn.Module) -> nn.Module:
        import gc

        ddp = nn.parallel.DistributedDataParallel
        return next(o for o in gc.get_objects() if isinstance(o, ddp) and o.module is model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for case in sys.argv[2:]:
        torch.save(globals()[case](folder), folder / f"{case}-rank{RANK}.pt")
