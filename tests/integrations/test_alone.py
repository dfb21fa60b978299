"""A world of one is plain training, bit for bit; what cannot be attached is refused with the reason."""

import pytest
import torch
from tests.integrations.loops import Awkward, attached, flat, loss_of, same, sgd, simulated, small_step, trained
from tests.laws.samples import legal, preset_recipes, samples
from torch import nn

import gossamer
from gossamer.core.errors import AttachError, RecipeError
from gossamer.recipe import Recipe

PRESETS = preset_recipes()
PLAIN = [
    name
    for name, r in PRESETS.items()
    if (r.schedule.averages_gradients or not r.schedule.works_alone)
    and r.schedule.accumulate == 1
    and not r.schedule.trains_elsewhere
    and r.update is None
]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        optimizer.step()


def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    on_parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())  # pyright: ignore
    on_optimizer = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return on_parameters + on_optimizer + len(model._forward_pre_hooks)


@pytest.mark.parametrize("name", PLAIN)
def test_one_rank_is_plain_training_bit_for_bit(name: str) -> None:
    twin = Awkward()
    plain(twin, sgd(twin), range(1, 8))
    with attached(PRESETS[name]) as (model, optimizer, comm):
        for _ in range(5):
            small_step(model, optimizer, comm, 0)
        comm.check_sync()
        with comm.consensus():
            inside = flat(model)
        assert same(inside, flat(model))
        again = comm.state_dict()
        comm.load_state_dict(again)
        assert comm.step == 5
        assert comm.metrics()["sent_bytes"] == 0
        assert comm.ledger.requests == 0
    assert hooks(model, optimizer) == 0
    plain(model, optimizer, range(6, 8))
    assert same(flat(model), flat(twin))


ALONE = [  # what they do to the optimizer's steps does not need a second rank
    *(f"allreduce + {s}" for s in samples("schedule") if s.works_alone and "waits for few" not in s.traits),
    *(f"allreduce + {u}" for u in samples("update")),
    *(
        f"allreduce + {c}"
        for c in samples("controller")
        if c.moves_schedule and [*legal(Recipe.of, f"allreduce + {c}")]
    ),
    "diana(l1=0.02)",
    "qsgd + every_step(l1=0.02) + bucket(0.00004)",
    "accordion_batch(epoch=2, factor=4, interval=1, threshold=10.0)",
    "bf16 + every_step(l1=0.02) + accordion_batch(4, 2, interval=1, threshold=10.0)",
]


@pytest.mark.parametrize("recipe", [*PRESETS.values(), *ALONE], ids=repr)
def test_one_rank_is_the_same_in_the_simulator(recipe: str | Recipe) -> None:
    real, (virtual,) = trained(0, 1, recipe, 4), simulated(recipe, 1, 4)
    assert all(same(a, b) for a, b in zip(real, virtual, strict=True))


@pytest.mark.parametrize("recipe", ALONE)
def test_what_a_schedule_or_controller_does_besides_averaging_it_does_alone_as_in_the_simulator(recipe: str) -> None:
    real, (virtual,) = trained(0, 1, recipe, 8), simulated(recipe, 1, 8)
    assert all(same(a, b) for a, b in zip(real, virtual, strict=True))
    idle = "resync" in recipe or recipe == "allreduce + every_step()"  # one model is its own average
    idle = idle or Recipe.of(recipe).controller.counts  # which goes by how ranks differ
    if not idle and recipe != "allreduce + accordion_batch(8, 100)":  # which decides after 1,100 steps
        assert not same(real[-1], trained(0, 1, "allreduce", 8)[-1])


def test_a_penalty_makes_a_sparse_model_of_one_rank_too() -> None:
    with attached("allreduce + every_step(l1=0.5)") as (model, optimizer, comm):
        for _ in range(30):
            small_step(model, optimizer, comm, 0)
        assert int((flat(model) == 0).sum()) > flat(model).numel() // 2
        assert comm.metrics()["sent_bytes"] == comm.ledger.requests == comm.exposed_seconds == 0


def test_a_batch_grows_alone_and_is_not_grown_by_a_gradient_that_is_not_finite() -> None:
    recipe = "accordion_batch(epoch=2, factor=4, interval=1, threshold=10.0)"
    for spoilt, grown in ((0, [1, 1, 1, 1, 4, 4]), (4, [1, 1, 1, 1, 1, 4])):  # a late verdict where the 4th step is
        seen = list[int]()
        with attached(recipe, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.0)) as (model, optimizer, comm):
            for step in range(1, 7):
                seen.append(comm.accumulate)
                optimizer.zero_grad()
                loss_of(model, 0, step).backward()
                if step == spoilt:
                    model.get_parameter("bias").grad.fill_(float("nan"))  # pyright: ignore
                    with torch.no_grad():
                        held = [p.clone() for p in model.parameters()]
                optimizer.step()
                if step == spoilt:  # plain training takes what it is given; here only the verdict is of interest
                    for p, kept in zip(model.parameters(), held, strict=True):
                        p.data.copy_(kept)
        assert seen == grown


def _gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """What a closure does."""
    optimizer.zero_grad()
    loss = loss_of(model, 0, 1)
    loss.backward()
    return loss


def test_a_penalty_under_a_closure() -> None:
    with attached(
        "allreduce + every_step(l1=0.5)", nn.Linear(17, 7), lambda m: torch.optim.SGD(m.parameters(), 0.5)
    ) as (
        model,
        optimizer,
        comm,
    ):
        optimizer.step(lambda: _gradients(model, optimizer))
        assert comm.step == 1
        assert int((flat(model) == 0).sum()) > 10


def test_a_closure_is_welcome_where_nothing_is_averaged() -> None:
    with attached("slowmo(2)", nn.Linear(17, 7), lambda m: torch.optim.LBFGS(m.parameters())) as (
        model,
        optimizer,
        comm,
    ):
        before = float(loss_of(model, 0, 1).detach())

        optimizer.step(lambda: _gradients(model, optimizer))
        assert comm.step == 1
        assert float(loss_of(model, 0, 1).detach()) < before


def test_a_model_is_attached_once_and_again_after_detach() -> None:
    with attached("qsgd") as (model, optimizer, comm):
        with pytest.raises(AttachError, match=r"attached already; call detach\(\)"):
            gossamer.attach(model, optimizer, "qsgd")
        comm.detach()
        comm.detach()  # harmless
        gossamer.attach(model, optimizer, "slowmo(2)").detach()
        assert hooks(model, optimizer) == 0


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype, grad: bool) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=grad)
        self.real = nn.Parameter(torch.zeros(3))


def of(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [torch.zeros(1)], lr=0.1)


def mixed() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, stranger = nn.Linear(2, 2), nn.Linear(2, 2)
    return model, torch.optim.SGD([*model.parameters(), *stranger.parameters()], lr=0.1)


REFUSED = [
    (lambda: of(nn.Sequential()), "nothing to train"),
    (lambda: of(nn.Linear(2, 2).requires_grad_(False)), "no parameter that requires a gradient"),
    (lambda: of(nn.Linear(0, 0, bias=False)), "are empty"),
    (lambda: of(Complex(torch.complex64, True)), "'odd' is torch.complex64"),
    (lambda: (nn.Linear(2, 2), of(nn.Linear(2, 2))[1]), "none of the model's parameters"),
    (mixed, r"2 parameter\(s\) that are not the model's"),
]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("make", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_trained_is_refused_with_the_reason(make, reason: str) -> None:
    model, optimizer = make()
    with pytest.raises(AttachError, match=reason):
        gossamer.attach(model, optimizer, "allreduce")


def test_integers_that_are_not_trained_do_no_harm() -> None:
    model, optimizer = of(Complex(torch.int64, False))
    gossamer.attach(model, optimizer, "allreduce").detach()


def test_running_statistics_under_local_steps_must_be_decided_on() -> None:
    model, optimizer = of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    for recipe in ("local_sgd(2)", "overlap_local_sgd(2)", "slowmo_sgp(4)"):
        with pytest.raises(AttachError, match=r"running_mean.*buffers='average', 'broadcast' .* or 'local'"):
            gossamer.attach(model, optimizer, recipe)
    with pytest.raises(AttachError, match=r"1\.running_mean.*say buffers='local'"):
        gossamer.attach(model, optimizer, "sgp")
    with pytest.raises(AttachError, match="nobody ever waits for everybody"):
        gossamer.attach(model, optimizer, "sgp", buffers="average")
    with pytest.raises(AttachError, match="'average', 'broadcast' or 'local', got 'mean'"):
        gossamer.attach(model, optimizer, "allreduce", buffers="mean")  # pyright: ignore
    gossamer.attach(model, optimizer, "allreduce").detach()
    gossamer.attach(model, optimizer, "local_sgd(2)", buffers="average").detach()


@pytest.mark.parametrize(
    "options", [{"buffers": "average"}, {"find_unused_parameters": True}, {"scaler": torch.amp.GradScaler("cpu")}]
)
def test_backup_workers_refuse_what_late_ranks_cannot_follow(options) -> None:
    model, optimizer = of(Awkward())
    with pytest.raises(AttachError, match=r"first\(\)"):
        gossamer.attach(model, optimizer, "backup", **options)


def test_a_forgotten_process_group_is_no_reason_to_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model, optimizer = of(Awkward())
    with pytest.raises(AttachError, match="init_process_group"):
        gossamer.attach(model, optimizer, "allreduce")


def test_something_that_is_no_group_is_refused() -> None:
    model, optimizer = of(Awkward())
    with pytest.raises(AttachError, match="not one of its ranks"):
        gossamer.attach(model, optimizer, "allreduce", -100)  # pyright: ignore


def test_a_wrong_recipe_leaves_the_model_alone() -> None:
    model, optimizer = of(Awkward())
    with pytest.raises(RecipeError, match="terngrad"):
        gossamer.attach(model, optimizer, "terngard")
    assert hooks(model, optimizer) == 0
    gossamer.attach(model, optimizer, "terngrad").detach()
