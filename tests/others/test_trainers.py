"""Accelerate's loop and Hugging Face's Trainer: both would wrap the model in DDP, and are told not to."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, SEED, flat, same
from tests.others.both import close, said, settled
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import AttachError

pytestmark = pytest.mark.gang
accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
    reason="transformers and accelerate are not both installed",
)

ROWS, BATCH, MICRO = 24, 2, 3  # two ranks take 2 rows each, 3 times, for a step: two steps an epoch


class Regressor(nn.Module):
    """Gives its loss where it is given labels, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.outer(torch.tanh(self.inner(x)))
        return {"logits": y} if labels is None else {"loss": (y - labels).square().mean(), "logits": y}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(9)
        self.x, self.y = torch.randn(ROWS, 6, generator=rng), torch.randn(ROWS, 2, generator=rng)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.y[i]}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def forget() -> None:
    """What Accelerate keeps for the whole process would outlive a test."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def alone(epochs: int) -> Tensor:
    """One process that takes the rows of a step of both ranks at once."""
    model, rows = Regressor(), Rows()
    optimizer = optimizer_of(model)
    for _ in range(epochs):
        for at in range(0, ROWS, 2 * BATCH * MICRO):
            part = slice(at, at + 2 * BATCH * MICRO)
            optimizer.zero_grad()
            model(rows.x[part], rows.y[part])["loss"].backward()
            optimizer.step()
    return flat(model)


def accelerated(rank: int, size: int, recipe: str, no_sync: bool = True) -> Tensor:
    """Its loop as its documentation has it, but for the three lines that take DDP out and gossamer in."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
    assert accelerator.num_processes == size
    model = Regressor()
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH)
    optimizer, loader = accelerator.prepare(optimizer_of(model), loader)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    comm = gossamer.attach(model, optimizer.optimizer, recipe, seed=SEED, deadline=DEADLINE)
    if no_sync:
        model.no_sync = comm.no_sync
    try:
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 100.0)
                    optimizer.step()
                    optimizer.zero_grad()
        if no_sync:
            settled(comm, 4)
        return flat(model)
    finally:
        comm.detach()
        forget()


@accelerate
def test_accelerate_is_one_process_on_both_ranks_data(gang2: Gang) -> None:
    for together in gang2.run(accelerated, "allreduce"):
        close([together], [alone(2)])


@accelerate
@pytest.mark.parametrize("recipe", ["topk(ratio=0.3)", "local_sgd(2)"])
def test_accelerate_ends_with_equal_models_under_other_recipes(gang2: Gang, recipe: str) -> None:
    first, second = gang2.run(accelerated, recipe)
    assert same(first, second)


def in_its_ddp(rank: int, size: int, recipe: str, how: str) -> Tensor:
    """DDP stays, with the recipe in it or in its place, and accumulates as ever."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
    model = Regressor()
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH)
    ddp_model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    if how == "hook":
        comm = gossamer.ddp.register(ddp_model, recipe, seed=SEED, deadline=DEADLINE)
    else:
        comm = gossamer.attach(ddp_model, optimizer.optimizer, recipe, seed=SEED, deadline=DEADLINE)
    try:
        for batch in [*loader, *loader]:
            with accelerator.accumulate(ddp_model):
                accelerator.backward(ddp_model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        assert comm.step == 4
        comm.check_sync()
        return flat(model)
    finally:
        comm.close() if isinstance(comm, gossamer.ddp.Hook) else comm.detach()
        forget()


@accelerate
@pytest.mark.parametrize("how", ["hook", "attach"])
def test_accelerate_wrapped_in_its_ddp_is_the_same(gang2: Gang, how: str) -> None:
    for together in gang2.run(in_its_ddp, "allreduce", how):
        close([together], [alone(2)])


def wrapped(rank: int, size: int) -> Tensor:
    from accelerate import Accelerator

    model = Regressor()
    try:
        inner = optimizer_of(model)
        optimizer = Accelerator(cpu=True).prepare(inner)
        rows = torch.utils.data.default_collate([Rows()[i] for i in range(rank, 12, size)])
        with gossamer.attach(model, optimizer, "allreduce", deadline=DEADLINE) as comm:
            assert comm.optimizers == (inner,)
            for _ in range(3):
                optimizer.zero_grad()
                model(**rows)["loss"].backward()
                optimizer.step()
            assert comm.step == 3
            return flat(model)
    finally:
        forget()


@accelerate
def test_accelerate_s_optimizer_is_taken_off(gang2: Gang) -> None:
    a, b = gang2.run(wrapped)
    assert same(a, b)
    assert not same(a, flat(Regressor()))


def unchanged(rank: int, size: int) -> tuple[list[str], Tensor]:
    finals = list[Tensor]()
    return said(lambda: finals.append(accelerated(rank, size, "allreduce", False))), finals[0]


@accelerate
def test_accelerate_without_the_line_is_told_of_it(gang2: Gang) -> None:
    for warned, final in gang2.run(unchanged):
        assert len(warned) == 1
        assert "comm.no_sync()" in warned[0]
        close([final], [alone(2)])


def hugged(rank: int, size: int, recipe: str, folder: str, ddp: bool, hook: bool) -> Tensor:
    """A Trainer with a callback that attaches, or registers a hook with its DDP."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    made: dict[str, Any] = {}

    class Gossamer(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if hook:
                made["comm"] = gossamer.ddp.register(trainer.model_wrapped, recipe, seed=SEED, deadline=DEADLINE)
                return
            model, optimizer = given["model"], given["optimizer"].optimizer
            made["comm"] = gossamer.attach(model, optimizer, recipe, seed=SEED, deadline=DEADLINE)
            model.no_sync = made["comm"].no_sync

    class InOrder(Trainer):
        def _get_train_sampler(self, *given: Any) -> torch.utils.data.Sampler[int]:
            return torch.utils.data.SequentialSampler(Rows())

    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=BATCH, gradient_accumulation_steps=MICRO,
        num_train_epochs=2, lr_scheduler_type="constant", max_grad_norm=100.0,
        save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    model = Regressor()
    trainer = InOrder(
        model, arguments, train_dataset=Rows(), optimizers=(optimizer_of(model), None), callbacks=[Gossamer()]
    )
    if not ddp:
        trainer.accelerator.prepare_model(model, evaluation_mode=True)
    try:
        trainer.train()
        assert trainer.state.global_step == 4
        comm = made["comm"]
        comm.check_sync()
        assert comm.step == 4
        return flat(model)
    finally:
        if "comm" in made:
            made["comm"].close() if hook else made["comm"].detach()
        forget()


@transformers
@pytest.mark.parametrize("hook", [False, True], ids=["attach", "hook"])
def test_trainer_is_one_process_on_both_ranks_data(gang2: Gang, hook: bool, tmp_path: Path) -> None:
    for together in gang2.run(hugged, "allreduce", str(tmp_path), hook, hook):
        close([together], [alone(2)])


@transformers
@pytest.mark.parametrize("recipe", ["topk(ratio=0.3)", "local_sgd(2)"])
def test_trainer_ends_with_equal_models_under_other_recipes(gang2: Gang, recipe: str, tmp_path: Path) -> None:
    first, second = gang2.run(hugged, recipe, str(tmp_path), False, False)
    assert same(first, second)


def twice_averaged(rank: int, size: int, recipe: str, folder: str) -> str:
    with pytest.raises(AttachError) as caught:
        hugged(rank, size, recipe, folder, True, False)
    return str(caught.value)


@transformers
@pytest.mark.parametrize("recipe", ["topk(ratio=0.3)", "local_sgd(2)"])
def test_trainer_whose_callback_forgets_its_ddp_is_refused(gang2: Gang, recipe: str, tmp_path: Path) -> None:
    for text in gang2.run(twice_averaged, recipe, str(tmp_path)):
        assert "attach the DDP model itself" in text
