"""A world of one is plain training, bit for bit; what cannot be attached is refused with the reason."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integrations.loops import Awkward, attached, flat, loss_of, same, sgd, simulated, small_step, trained
from tests.laws.samples import legal, preset_recipes, samples
from torch import nn

import gossamer
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.schedule import TrainsElsewhere
from gossamer.recipe import Recipe

PRESETS = preset_recipes()
PLAIN = [
    name
    for name, r in PRESETS.items()
    if (r.schedule.shape.averages_gradients or not r.schedule.shape.works_alone)
    and r.schedule.shape.micro_batches == 1
    and not isinstance(r.schedule, TrainsElsewhere)
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
    *(f"allreduce + {s}" for s in samples("schedule") if s.shape.works_alone and "waits for few" not in s.traits),
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


@pytest.mark.parametrize("recipe", PRESETS.values(), ids=repr)
def test_one_rank_is_the_same_in_the_simulator(recipe: Recipe) -> None:
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


@torch.no_grad()
def put(model: nn.Module, x: torch.Tensor) -> None:
    parameters = list(model.parameters())
    for p, part in zip(parameters, x.split([p.numel() for p in parameters]), strict=True):
        p.copy_(part.view(p.shape))


Models = dict[str, torch.Tensor]
Outer = Callable[
    [Models, torch.Tensor], torch.Tensor
]  # what is kept, and the model at a round's end: the model to go on with


def slow(beta: float, alpha: float, nesterov: bool = False) -> Outer:
    """The outer step of SlowMo, DiLoCo, block momentum and Lookahead, at a learning rate that stays."""

    def step(kept: Models, x: torch.Tensor) -> torch.Tensor:
        return follow(kept, kept["anchor"] - x, beta, alpha, nesterov)

    return step


def follow(kept: Models, moved: torch.Tensor, beta: float, alpha: float, nesterov: bool) -> torch.Tensor:
    velocity = moved if beta == 0 or "velocity" not in kept else torch.add(moved, kept["velocity"], alpha=beta)
    step = (torch.add(moved, velocity, alpha=beta) if nesterov else velocity) * alpha
    kept["velocity"], kept["anchor"] = velocity, kept["anchor"] - step
    return kept["anchor"]


def eager(rate: float, momentum: float) -> Outer:
    """What the others have moved is nothing; the model that is judged follows a round later."""
    agreed = Models()

    def step(kept: Models, x: torch.Tensor) -> torch.Tensor:
        moved = kept["anchor"] - x
        if "own" in kept:
            kept["judged"] = follow(agreed, kept["own"], momentum, rate, nesterov=True)
            now = moved + kept["own"] - kept["own"]
        else:
            agreed.clear()
            agreed["anchor"], now = kept["anchor"], moved
        kept["own"] = moved
        return follow(kept, now, momentum, rate, nesterov=True)

    return step


def overlap(alpha: float, beta: float) -> Outer:
    """What is launched at the end of a round lands at the end of the next one."""

    def step(kept: Models, x: torch.Tensor) -> torch.Tensor:
        if "launched" in kept:
            moved = -kept["launched"]
            kept["velocity"] = torch.add(moved, kept["velocity"], alpha=beta) if "velocity" in kept else moved
            kept["anchor"] = kept["anchor"] + kept["velocity"]
        x = torch.lerp(x, kept["anchor"], alpha)
        kept["launched"] = kept["anchor"] - x
        return x

    return step


def spring(alpha: float) -> Outer:
    def step(kept: Models, x: torch.Tensor) -> torch.Tensor:
        if "launched" in kept:
            kept["anchor"] = kept["anchor"] - kept["launched"] * alpha
        kept["launched"], kept["judged"] = kept["anchor"] - x, kept["anchor"]
        return torch.add(x, kept["launched"], alpha=alpha)

    return step


OUTER: list[tuple[str, Outer, bool]] = [  # and whether the optimizer begins anew
    ("slowmo(4)", slow(0.7, 1.0), False),
    ("scatter(qsgd()) + slowmo(4, beta=0.5, alpha=0.9)", slow(0.5, 0.9), False),
    ("allreduce + slowmo(4, inner=push_sum())", slow(0.7, 1.0), False),
    ("allreduce + slowmo(4, inner=gossip(overlap=True), average=False)", slow(0.7, 1.0), False),
    ("allreduce + slowmo(4, sharded=True)", slow(0.7, 1.0), False),
    ("topk + slowmo(4, inner=every_step())", slow(0.7, 1.0), False),
    ("allreduce + post_local(4, slowmo(4))", slow(0.7, 1.0), False),
    ("allreduce + hierarchical(2, 4, slowmo(4))", slow(0.7, 1.0), False),
    ("allreduce + by_speed(slowmo(4))", slow(0.7, 1.0), False),
    ("diloco(4)", slow(0.9, 0.7, nesterov=True), False),
    ("allreduce + streaming(4, fragments=1, delay=0, mixing=0.0, rate=0.7)", slow(0.9, 0.7, nesterov=True), False),
    ("allreduce + bmuf(4, momentum=0.5)", slow(0.5, 1.0), True),
    ("lookahead(4)", slow(0.0, 0.5), False),
    ("overlap_local_sgd(4)", overlap(0.6, 0.7), False),
    ("easgd(4)", spring(0.9), False),
    ("allreduce + eager(4)", eager(0.4, 0.9), False),
]


@pytest.fixture(params=["no group", "a group of one"])
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "no group":
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("recipe", "outer", "anew"), OUTER, ids=[recipe for recipe, *_ in OUTER])
def test_one_rank_takes_outer_steps_by_their_formula(recipe: str, outer: Outer, anew: bool) -> None:
    twin, steps = Awkward(), 13
    kept, optimizer = {"anchor": flat(twin)}, sgd(twin)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss_of(twin, 0, step).backward()
        optimizer.step()
        if "post_local" in recipe and step <= 4:
            kept["anchor"] = flat(twin)  # models were equal until then
        elif step % 4 == 0:
            put(twin, outer(kept, flat(twin)))
            optimizer = sgd(twin) if anew else optimizer
    with attached(recipe) as (model, optimizer, comm):
        for _ in range(steps):
            small_step(model, optimizer, comm, 0)
        assert comm.metrics()["sent_bytes"] == 0
        assert same(flat(model), flat(twin))
        with comm.consensus():
            assert same(flat(model), kept.get("judged", flat(twin)))
    virtual = simulated(recipe, 1, steps)[0][-1]
    assert same(virtual, flat(twin))


def test_one_rank_has_an_inner_and_an_outer_rate() -> None:
    twin = Awkward()
    anchor, moved, optimizer = flat(twin), torch.zeros(()), sgd(twin)
    for step in range(1, 10):
        before = flat(twin)
        optimizer.zero_grad()
        loss_of(twin, 0, step).backward()
        optimizer.step()
        moved = (before - flat(twin)) + moved
        if step % 4 == 0:
            anchor, moved, x = anchor - moved, torch.zeros(()), anchor - moved
        else:
            x = torch.sub(anchor, moved, alpha=0.25)
        put(twin, x)
    recipe = "allreduce + inner_outer(4, inner=0.25)"
    assert same(trained(0, 1, recipe, 9)[-1], flat(twin))
    assert same(simulated(recipe, 1, 9)[0][-1], flat(twin))


@pytest.mark.parametrize("recipe", ["allreduce + slowmo(4)", "diloco(4)", "overlap_local_sgd(4)"])
def test_a_rank_alone_drops_a_round_that_is_not_finite_and_goes_on_at_the_anchor(recipe: str) -> None:
    with attached(recipe) as (model, optimizer, comm):
        for step in range(1, 17):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            if step == 6:
                model.get_parameter("bias").grad.fill_(float("nan"))  # pyright: ignore
            optimizer.step()
        assert flat(model).isfinite().all()
        assert comm.metrics()["dropped_rounds"] >= 1
        assert comm.spoilt == {0: int(comm.metrics()["dropped_rounds"])}


@pytest.mark.parametrize("recipe", ["allreduce + local_sgd(4)", "cocod(4)", "decoupled_diloco(4)", "sgp", "d_psgd"])
def test_what_only_averages_is_plain_training_on_one_rank(recipe: str) -> None:
    assert same(trained(0, 1, recipe, 9)[-1], trained(0, 1, "allreduce", 9)[-1])


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


@pytest.mark.parametrize("recipe", ["distributed_lion", "accordion_batch(epoch=2, factor=4, interval=1)"])
def test_sparse_gradients_go_through_updates_and_controllers(recipe: str) -> None:
    made = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    with attached(recipe, made, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)) as (model, optimizer, comm):
        for step in range(1, 4):
            before = flat(model)
            optimizer.zero_grad()
            model(torch.tensor([step])).square().sum().backward()
            optimizer.step()
            assert not same(before, flat(model))
        assert comm.step == 3


def test_a_fused_optimizer_does_not_divide_a_direction_by_the_loss_scale() -> None:
    def descent(model: nn.Module, fused: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)

    ends = list[torch.Tensor]()
    for fused, unscales in ((True, False), (True, True), (False, False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        made = partial(descent, fused=fused)
        with attached("distributed_lion", optimizer=made, scaler=scaler) as (model, optimizer, _):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, 0, 1)).backward()
            if fused and not unscales:
                with pytest.raises(AttachError, match=r"SGD\(fused=True\) under lion\(.*scaler.unscale_\(optimizer\)"):
                    scaler.step(optimizer)
                continue
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            ends.append(flat(model))
    torch.testing.assert_close(*ends)


def test_an_update_moves_what_the_second_of_two_optimizers_holds_under_a_loss_scale() -> None:
    ends = list[torch.Tensor]()
    for count in (1, 2):
        torch.manual_seed(0)
        model, scaler = nn.Linear(17, 7), torch.amp.GradScaler("cpu", init_scale=1024.0)
        held = [[*model.parameters()]] if count == 1 else [[model.weight], [model.bias]]
        optimizers = [torch.optim.SGD(params, lr=0.01) for params in held]
        with gossamer.attach(model, optimizers, "distributed_lion", scaler=scaler):
            scaler.scale(loss_of(model, 0, 1)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        ends.append(flat(model))
    assert same(*ends)


def test_a_step_that_is_left_out_in_its_midst_leaves_the_next_one_all_micro_batches() -> None:
    with attached("allreduce + every_step(micro_batches=3)") as (_, _, comm):
        with comm.accumulating():
            pass
        comm.skip()
        lasts = list[bool]()
        for _ in range(3):
            with comm.accumulating() as last:
                lasts.append(last)
    assert lasts == [False, False, True]


@pytest.mark.parametrize("recipe", ["allreduce + every_step(rate=2.0)", "allreduce + slowmo(2, buffers='reset')"])
def test_a_loop_that_goes_on_after_an_error_in_the_optimizers_step_has_its_own_rate(recipe: str) -> None:
    def stumble(*_: object) -> None:
        raise RuntimeError("out of memory")

    with attached(recipe, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)) as (model, optimizer, comm):
        small_step(model, optimizer, comm, 0)
        stumbling = optimizer.register_step_pre_hook(stumble)
        with pytest.raises(RuntimeError, match="out of memory"):
            small_step(model, optimizer, comm, 0)
        stumbling.remove()
        for _ in range(2):
            small_step(model, optimizer, comm, 0)
        assert comm.step == 3
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.register_step_pre_hook(stumble)
        with pytest.raises(RuntimeError, match="out of memory"):
            small_step(model, optimizer, comm, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1


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


def test_a_model_that_has_the_communicators_no_sync_is_copied_and_saved_whole(tmp_path: Path) -> None:
    with attached("qsgd") as (model, _, comm):
        vars(model)["no_sync"] = comm.no_sync  # the line that other people's trainers need
        torch.save(model, tmp_path / "model.pt")
        for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
            with other.no_sync():
                loss_of(other, 0, 1).backward()
            assert same(flat(other), flat(model))
            assert all(p.grad is None for p in model.parameters())


def test_a_model_that_is_compiled_once_more_is_attached_already() -> None:
    model = Awkward()
    optimizer = sgd(model)
    with gossamer.attach(torch.compile(model, backend="eager"), optimizer, "qsgd"):
        for again in (model, torch.compile(model, backend="eager")):
            with pytest.raises(AttachError, match=r"attached already; call detach\(\)"):
                gossamer.attach(again, optimizer, "qsgd")


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
    (lambda: of(nn.Linear(0, 0, bias=False)), "have zero elements"),
    (lambda: of(Complex(torch.complex64, True)), "'odd' is torch.complex64"),
    (lambda: (nn.Linear(2, 2), of(nn.Linear(2, 2))[1]), "none of the model's parameters"),
    (mixed, r"2 parameter\(s\) that are not in the model"),
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
    with pytest.raises(AttachError, match=r"1\.running_mean.*pass buffers='local'"):
        gossamer.attach(model, optimizer, "sgp")
    with pytest.raises(AttachError, match="ranks never all wait for each other"):
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
    with pytest.raises(AttachError, match=r"backup_workers\(\)"):
        gossamer.attach(model, optimizer, "backup", **options)


def test_a_scaler_that_is_off_is_none() -> None:
    with attached("backup", scaler=torch.amp.GradScaler("cpu", enabled=False)) as (model, optimizer, comm):
        small_step(model, optimizer, comm, 0)
        assert comm.step == 1


def test_a_forgotten_process_group_is_no_reason_to_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model, optimizer = of(Awkward())
    with pytest.raises(AttachError, match="init_process_group"):
        gossamer.attach(model, optimizer, "allreduce")
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(
        AttachError, match=r"WORLD_SIZE is 'four', not a number: set it as torchrun does, .* or leave it out"
    ):
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


class FindsItsRate(torch.optim.Optimizer):
    """Has no learning rate, as transformers' Adafactor by default."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad, alpha=0.05)


def test_an_optimizer_may_have_no_learning_rate() -> None:
    ends = list[torch.Tensor]()
    for made in (lambda m: FindsItsRate(m.parameters()), lambda m: torch.optim.SGD(m.parameters(), lr=0.05)):
        with attached("slowmo(2, beta=0.5)", nn.Linear(17, 7), made) as (model, optimizer, comm):
            nn.init.constant_(model.weight, 0.1)
            nn.init.zeros_(model.bias)
            for _ in range(4):
                small_step(model, optimizer, comm, 0)
            ends.append(flat(model))
    torch.testing.assert_close(*ends)
