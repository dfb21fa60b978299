"""Cases of the strategy for Lightning's Trainer, run on two ranks; each rank saves what it saw.

torchrun --nproc-per-node 2 lightning_cases.py FOLDER CASE...
"""

import os
import signal
import sys
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning_model import ManualRegressor, Regressor, flat, trainer_of
from wrappers import WRAPPERS

from gossamer.trainers.lightning import Strategy

RANK = int(os.environ["RANK"])


def error_of(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def strategy(folder: Path) -> dict[str, Any]:
    """`allreduce` beside stock DDP, with accumulation, clipping and a sanity check; then local steps."""
    out = dict[str, Any]()
    for name, each in {"ddp": DDPStrategy(), "allreduce": Strategy("allreduce")}.items():
        model = Regressor()
        trainer = trainer_of(each, folder)
        trainer.fit(model)
        out[name] = flat(model)
        out["steps"] = trainer.global_step
    return out


class Evaluated(Callback):
    """Notes the model in the middle of evaluations and of training, and what the communicator says."""

    def __init__(self) -> None:
        self.judged, self.own, self.steps = list[Any](), list[Any](), list[int]()

    def on_validation_batch_start(self, trainer: Any, module: Any, *rest: Any) -> None:
        self.judged.append(flat(module))
        self.steps.append(trainer.strategy.comm.step)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.own.append(flat(module))


def local(folder: Path) -> dict[str, Any]:
    """`local_sgd(4)`: validation in the middle of a round, a saved file, event files, and the end of fit."""
    model, seen = Regressor(), Evaluated()
    saves = ModelCheckpoint(folder / "own", "best-{held_out:.3f}", monitor="held_out", save_top_k=1, save_last=True)
    logger = TensorBoardLogger(folder / "logs", name="", version="")
    trainer = trainer_of(
        Strategy("local_sgd(4)"), folder, seen, saves, logger=logger, val_check_interval=6, check_val_every_n_epoch=None
    )
    trainer.fit(model)
    trained = flat(model)
    said = error_of(lambda: trainer.strategy.comm)
    tested, predicted = trainer.test(model, verbose=False)[0]["tested"], trainer.predict(model)
    return {
        "judged": seen.judged, "own": seen.own, "steps": seen.steps, "final": trained, "said": said,
        "best": saves.best_model_path, "left": sorted(p.relative_to(folder).as_posix() for p in folder.rglob("own/**/*")),
        "predicted": predicted[0], "tested": tested,
    }  # fmt: skip


class Saves(Callback):
    """Calls trainer.save_checkpoint after a step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == self.step and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(self.path)


def resumed(folder: Path) -> dict[str, Any]:
    """Saved in the middle of a round by `trainer.save_checkpoint`, resumed by `fit(ckpt_path=)`."""
    out = dict[str, Any]()
    for recipe in ("topk", "local_sgd(4)"):
        unbroken, again = Regressor(), Regressor()
        path = folder / f"{recipe}.ckpt"
        trainer_of(Strategy(recipe), folder, Saves(6, path)).fit(unbroken)
        trainer = trainer_of(Strategy(recipe), folder)
        trainer.fit(again, ckpt_path=path)
        out[recipe] = flat(unbroken), flat(again), trainer.global_step
    return out


class Tells(Callback):
    """A signal to rank 1 after a step."""

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 2 and trainer.fit_loop.epoch_loop.batch_idx == 3 and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def told(folder: Path) -> dict[str, Any]:
    """A notice to a run that may not end before 500 epochs; then it goes on by `ckpt_path="last"`."""
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    first, again, unbroken = Regressor(), Regressor(), Regressor()
    options: dict[str, Any] = {"max_steps": 4000, "min_epochs": 500}
    saves = ModelCheckpoint(folder / "own", save_top_k=0)
    trainer = trainer_of(Strategy("topk", notice=60), folder, Tells(), saves, **options)
    trainer.fit(first)
    stopped, callbacks = trainer.global_step, len(trainer.callbacks)
    put_back = handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1))
    until: dict[str, Any] = {"max_steps": stopped + 3, "limit_val_batches": 0}
    resumed = trainer_of(Strategy("topk", notice=60), folder, ModelCheckpoint(folder / "own", save_top_k=0), **until)
    resumed.fit(again, ckpt_path="last")
    trainer_of(Strategy("topk"), folder, **until).fit(unbroken)
    return {
        "stopped": stopped, "put back": put_back, "callbacks": callbacks, "judged": trainer.limit_val_batches,
        "resumed": flat(again), "unbroken": flat(unbroken), "files": sorted(p.name for p in (folder / "own").iterdir()),
    }  # fmt: skip


def public(folder: Path) -> dict[str, Any]:
    """What a checkpoint without its sidecars says, and how training goes on without them."""
    path, out = folder / "saved.ckpt", dict[str, Any]()
    trainer_of(Strategy("topk"), folder, Saves(6, path), limit_val_batches=0).fit(Regressor())
    beside = path.parent / "saved.ckpt.gossamer"
    content = torch.load(path, weights_only=True)
    plain = Regressor()
    plain.load_state_dict(content["state_dict"])
    out["files"], out["stamp"] = sorted(p.name for p in beside.iterdir()), content["gossamer"]

    def resume(strategy: Any) -> pl.Trainer:
        trainer = trainer_of(strategy, folder, limit_val_batches=0)
        trainer.fit(Regressor(), ckpt_path=path)
        return trainer

    out["another recipe"] = error_of(resume, Strategy("local_sgd(4)"))
    dist.barrier()
    if RANK == 0:
        torch.save({**content, "gossamer": {"recipe": "topk", "step": 4}}, path)
    dist.barrier()
    out["another save"] = error_of(resume, Strategy("topk"))
    dist.barrier()
    if RANK == 0:
        (beside / "gossamer-rank1-of-2.pt").unlink()
    dist.barrier()
    out["partial"] = error_of(resume, Strategy("topk"))
    out["on purpose"] = resume(Strategy("topk", public_only=True)).global_step

    after = trainer_of(Strategy("topk"), folder, limit_val_batches=0)
    after.fit(Regressor())
    after.save_checkpoint(path)  # the same name, with the consensus and nothing beside it
    out["removed"] = not beside.exists()
    out["remote"] = error_of(
        trainer_of(Strategy("topk"), folder, Saves(2, "memory://saved.ckpt"), limit_val_batches=0).fit, Regressor()
    )
    return out


class Searched(Regressor):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class Two(ManualRegressor):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.inner, self.outer)]


class Wrapped(Regressor):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = kind(self.inner)


def refused(folder: Path) -> dict[str, Any]:
    def fit(model: pl.LightningModule, *callbacks: Callback) -> str:
        options = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
        return error_of(trainer_of(Strategy("topk"), folder, *callbacks, **options).fit, model)

    return {
        "search": fit(Searched()),
        "two": fit(Two()),
        "swa": fit(Regressor(), StochasticWeightAveraging(swa_lrs=0.01)),
        "ema": fit(Regressor(), WeightAveraging()),
        "hook": error_of(Strategy, "topk", ddp_comm_hook=print),
        **{name: fit(Wrapped(kind)) for name, kind in WRAPPERS.items()},
    }


def manual(folder: Path) -> dict[str, Any]:
    """One optimizer under manual optimization ends where automatic optimization ends, and where DDP does."""
    out, options = dict[str, Any](), {"gradient_clip_val": None, "accumulate_grad_batches": 1, "limit_val_batches": 0}
    for name, model, each in [
        ("automatic", Regressor(), Strategy("allreduce")),
        ("manual", ManualRegressor(), Strategy("allreduce")),
        ("ddp", ManualRegressor(), DDPStrategy()),
    ]:
        trainer = trainer_of(each, folder, **options)
        trainer.fit(model)
        out[name] = flat(model)
        out["steps"] = trainer.global_step
    return out


class Counted(Callback):
    """Counts the trainer's own collectives in training batches, by the function that they call."""

    NAMES = ("broadcast", "all_reduce", "barrier", "all_gather", "broadcast_object_list", "all_gather_object", "reduce")

    def __init__(self) -> None:
        self.calls, self.was = Counter[str](), {name: getattr(dist, name) for name in self.NAMES}

    def on_train_start(self, *rest: Any) -> None:
        for name, call in self.was.items():
            setattr(dist, name, self._counting(name, call))

    def _counting(self, name: str, call: Any) -> Any:
        def counting(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return call(*args, **options)

        return counting

    def on_train_end(self, *rest: Any) -> None:
        for name, call in self.was.items():
            setattr(dist, name, call)


class Synced(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss


def counted(folder: Path) -> dict[str, Any]:
    """The trainer's own collectives in 8 batches of 8 steps, with one setting each that adds to them."""

    def fit(model: pl.LightningModule, *callbacks: Callback) -> dict[str, int]:
        count = Counted()
        options = {"max_steps": 8, "accumulate_grad_batches": 1, "limit_val_batches": 0, "log_every_n_steps": 100}
        trainer_of(Strategy("local_sgd(8)"), folder, count, *callbacks, **options).fit(model)
        return dict(count.calls)

    return {
        "nothing": fit(Regressor()),
        "sync_dist": fit(Synced()),
        "timer": fit(Regressor(), Timer(timedelta(hours=1))),
        "early": fit(Regressor(), EarlyStopping("loss", check_on_train_epoch_end=True)),
        "seconds": fit(Regressor(), ModelCheckpoint(folder / "timed", train_time_interval=timedelta(hours=1))),
    }


class Fails(Callback):
    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 5 and RANK == 1:
            raise RuntimeError("rank 1 has had enough")


def exception(folder: Path) -> dict[str, Any]:
    """One rank raises: all end, with a checkpoint of rank 0's own model. The process group is of no use afterwards."""
    model = Regressor()
    trainer = trainer_of(
        Strategy("topk"),
        folder,
        Fails(),
        OnExceptionCheckpoint(folder, "failed"),
        limit_val_batches=0,
        accumulate_grad_batches=1,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        text = error_of(trainer.fit, model, ckpt_path=None)
    return {"error": text, "said": [str(w.message) for w in said], "model": flat(model)}


CASES = {f.__name__: f for f in (strategy, local, resumed, told, public, refused, manual, counted, exception)}

if __name__ == "__main__":
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    for name in wanted:
        (folder / name).mkdir(parents=True, exist_ok=True)
        torch.save(CASES[name](folder / name), folder / f"{name}-rank{RANK}.pt")
