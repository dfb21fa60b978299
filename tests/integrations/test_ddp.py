"""A recipe as DDP's communication hook: several buckets that are rebuilt after the first step, on gloo."""

import io
import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, SEED, attached, flat, loss_of, same, sgd
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.core.errors import AttachError, PeerError

pytestmark = pytest.mark.gang

BUCKETS = " + bucket(0.0005)"


class Deep(nn.Module):
    """Layers of several sizes, one of whose gradient is always zero; about 8 kB, so several buckets of DDP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(5))
        self.dead = nn.Linear(17, 17)
        self.head = nn.Linear(17, 7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x + 0 * self.dead(x))


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.001, **options)


def told(recipe: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """A hook is given the optimizer where it must be."""
    return optimizer if "accordion" in recipe or "update" in recipe else None


def hooked(rank: int, size: int, recipe: str, steps: int, spoilt: int = 0) -> dict[str, Any]:
    model = Deep()
    ddp = wrap(model)
    optimizer, out = sgd(model), list[Tensor]()
    hook = gossamer.ddp.register(ddp, recipe, seed=SEED, deadline=DEADLINE, optimizer=told(recipe, optimizer))
    try:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss = loss_of(ddp, rank, step)
            (loss * float("inf") if step == spoilt and rank == 1 else loss).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if all(g.isfinite().all() for g in gradients):
                optimizer.step()
            out.append(flat(model))
        assert hook.step == steps
        assert hook.spoilt == ({1: 1} if spoilt else {})
        state = hook.state_dict()
        finite = all(v.isfinite().all() for v in state.values() if isinstance(v, Tensor) and v.is_floating_point())
        return {"flats": out, "finite": finite, "requests": hook.fabric.ledger.requests, "grads": gradients}
    finally:
        hook.close()


def attached_loop(rank: int, size: int, recipe: str, steps: int) -> list[Tensor]:
    out = list[Tensor]()
    with attached(recipe, Deep()) as (model, optimizer, _):
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            out.append(flat(model))
    return out


RECIPES = [
    "allreduce",
    "terngrad",
    "topk(ratio=0.1)",
    "powersgd",
    "scatter(qsgd(bits=4, bucket=16)) + diana()",
    "accordion(epoch=2, mild=3, harsh=1, interval=1, threshold=0.1)",
    "topk(ratio=0.1, scope='global')",
    "topk(ratio=0.1) + error_feedback(units='update')",
]


@pytest.mark.parametrize("recipe", [r + BUCKETS for r in RECIPES])
def test_a_hook_does_what_attach_does_bit_for_bit(gang2: Gang, recipe: str) -> None:
    hook, attach = gang2.run(hooked, recipe, 6), gang2.run(attached_loop, recipe, 6)
    assert hook[0]["requests"] > 6 * (1 if "global" in recipe else 3)  # several buckets each step
    for by_hook, by_attach in zip(hook, attach):
        for step, (a, b) in enumerate(zip(by_hook["flats"], by_attach, strict=True), 1):
            assert same(a, b), f"step {step}"
    assert same(hook[0]["flats"][-1], hook[1]["flats"][-1])


class Given(NamedTuple):
    """What a rank does after its rate was cut to a tenth, and before."""

    recipes: list[str]
    end: Tensor


def after_a_cut(rank: int, size: int, recipe: str, how: str, groups: int = 1) -> Given:
    """A user's loop with a step decay; of two parameter groups, or optimizers, the decay is of the second."""
    model, recipes = Deep(), list[str]()
    parameters = [*model.parameters()]
    parts = [parameters] if groups == 1 else [parameters[:6], parameters[6:]]
    if how == "several hooked":
        optimizers = [torch.optim.SGD(part, lr=0.05) for part in parts]
    else:
        optimizers = [torch.optim.SGD([{"params": part} for part in parts], lr=0.05)]
    given = optimizers if len(optimizers) > 1 else optimizers[0]
    ddp = wrap(model)
    if how == "attached":
        comm = gossamer.attach(ddp, given, recipe, seed=SEED, deadline=DEADLINE)
    else:
        comm = gossamer.ddp.register(ddp, recipe, optimizer=given, seed=SEED, deadline=DEADLINE)
    try:
        for step in range(1, 10):
            if step == 7:
                optimizers[-1].param_groups[-1]["lr"] /= 10
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(ddp, rank, 1).backward()
            for optimizer in optimizers:
                optimizer.step()
            recipes.append(repr(comm.recipe))
        return Given(recipes, flat(model))
    finally:
        comm.detach() if how == "attached" else comm.close()


@pytest.mark.parametrize(("how", "groups"), [("hooked", 1), ("hooked", 2), ("several hooked", 2)])
def test_under_a_hook_accordion_returns_to_mild_when_the_rate_is_cut(gang2: Gang, how: str, groups: int) -> None:
    recipe = "accordion(epoch=2, mild=3, harsh=1, interval=1)"
    (hook, other), (attach, _) = (gang2.run(after_a_cut, recipe, h, groups) for h in (how, "attached"))
    assert hook.recipes == other.recipes == attach.recipes
    assert same(hook.end, attach.end)
    before, after = (text.count("layers.") for text in hook.recipes[5:7])
    assert before == 2 * 5
    assert after == (0 if groups == 1 else 6)


def test_under_a_hook_dqsgd_takes_the_bits_that_attach_takes(gang2: Gang) -> None:
    recipe = "scatter(qsgd(bits=8)) + dqsgd(40, error=0.02)"
    hook, attach = (gang2.run(after_a_cut, recipe, how)[0] for how in ("hooked", "attached"))
    assert hook.recipes == attach.recipes
    assert "qsgd(bits=5)" in hook.recipes[-1]  # of a rate of 1 it would make 7


@pytest.mark.parametrize("recipe", ["powersgd" + BUCKETS, "topk(ratio=0.1)" + BUCKETS])
def test_an_overflow_poisons_no_residual(gang2: Gang, recipe: str) -> None:
    for seen in gang2.run(hooked, recipe, 12, 4):
        assert same(seen["flats"][2], seen["flats"][3])  # skipped
        assert not same(seen["flats"][3], seen["flats"][4])
        assert seen["finite"]
        assert seen["flats"][-1].isfinite().all()


def saved_and_loaded(rank: int, size: int, recipe: str) -> tuple[Tensor, Tensor]:
    """A run of six steps, and one that stops after the third and goes on with new objects."""
    whole = hooked(rank, size, recipe, 6)["flats"][-1]
    model, file = Deep(), io.BytesIO()
    optimizer = sgd(model)
    for half in (range(1, 4), range(4, 7)):
        ddp = wrap(model)
        hook = gossamer.ddp.register(ddp, recipe, seed=SEED, deadline=DEADLINE, optimizer=told(recipe, optimizer))
        if file.getvalue():
            hook.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        for step in half:
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            optimizer.step()
        torch.save(hook.state_dict(), file)
        hook.close()
    return whole, flat(model)


@pytest.mark.parametrize(
    "recipe", ["powersgd" + BUCKETS, "topk(ratio=0.1)" + BUCKETS, "accordion_qsgd(epoch=2, interval=1)"]
)
def test_a_hook_is_saved_and_loaded(gang2: Gang, recipe: str) -> None:
    for whole, halves in gang2.run(saved_and_loaded, recipe):
        assert same(whole, halves)


def accumulated(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """DDP's own no_sync and static unused parameters work as ever."""
    finals = list[Tensor]()
    for parts in (1, 2):
        model = Deep()
        ddp, optimizer = wrap(model, gradient_as_bucket_view=parts == 2), sgd(model)
        hook = gossamer.ddp.register(ddp, "allreduce" + BUCKETS, seed=SEED, deadline=DEADLINE)
        for step in (1, 2, 3):
            optimizer.zero_grad()
            if parts == 2:
                with ddp.no_sync():
                    (loss_of(ddp, rank, step) / 2).backward()
            (loss_of(ddp, rank, step) / parts).backward()
            optimizer.step()
        hook.close()
        finals.append(flat(model))
    return finals[0], finals[1]


def test_no_sync_accumulates(gang2: Gang) -> None:
    for once, twice in gang2.run(accumulated):
        torch.testing.assert_close(once, twice, rtol=1e-5, atol=1e-6)


def added(rank: int, size: int, recipe: str, how: str) -> tuple[Tensor, int, list[str], str]:
    """Two micro-batches a step, each of which is averaged, or the last of them alone."""
    model = Deep()
    ddp, optimizer = wrap(model), sgd(model)
    hook, refused = gossamer.ddp.register(ddp, recipe + BUCKETS, seed=SEED, deadline=DEADLINE), ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for step in (1, 2, 3):
                with ddp.no_sync() if how == "no_sync" else nullcontext():
                    (loss_of(ddp, rank, 10 * step) / 2).backward()
                (loss_of(ddp, rank, 10 * step + 1) / 2).backward()
                optimizer.step()
                with ddp.no_sync():  # as a GAN does, before it clears them
                    loss_of(ddp, rank, step).backward()
                optimizer.zero_grad(set_to_none=step == 1)
        except AttachError as error:
            refused = str(error)
        finally:
            hook.close()
    return flat(model), hook.step, [str(w.message) for w in said if "no_sync" in str(w.message)], refused


def test_micro_batches_without_no_sync_are_told_of_it(gang2: Gang) -> None:
    plain, careful = (gang2.run(added, "allreduce", how) for how in ("plain", "no_sync"))
    for (a, steps, said, refused), (b, fewer, *silence) in zip(plain, careful):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert (steps, fewer) == (6, 3)
        assert len(said) == 1
        assert "run all but the last one under comm.no_sync() (with a DDP hook, ddp_model.no_sync())" in said[0]
        assert silence == [[], ""]
        assert not refused


def resumed_and_added(rank: int, size: int) -> list[str]:
    """Ten steps of one batch each; their state is loaded, and from then on each step has two micro-batches."""
    model = Deep()
    ddp, optimizer = wrap(model), sgd(model)
    hook = gossamer.ddp.register(ddp, "allreduce" + BUCKETS, seed=SEED, deadline=DEADLINE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(1, 13):
            if step == 11:
                hook.load_state_dict(hook.state_dict())
            optimizer.zero_grad()
            for _ in range(1 if step <= 10 else 2):
                loss_of(ddp, rank, step).backward()
            optimizer.step()
    hook.close()
    return [str(w.message) for w in said if "no_sync" in str(w.message)]


def test_a_hook_that_goes_on_from_a_checkpoint_looks_at_its_first_steps_again(gang2: Gang) -> None:
    assert [len(said) for said in gang2.run(resumed_and_added)] == [1, 1]


@pytest.mark.parametrize("recipe", ["gather(topk(ratio=0.3)) + momentum_correction()", "ef21"])
def test_nothing_is_added_to_what_is_no_gradient(gang2: Gang, recipe: str) -> None:
    for _, steps, _, refused in gang2.run(added, recipe, "plain"):
        assert steps == 1
        assert (
            "no gradient to add to; run all but the last one under comm.no_sync() (with a DDP hook, ddp_model.no_sync())"
            in refused
        )
    for _, steps, said, refused in gang2.run(added, recipe, "no_sync"):
        assert (steps, said, refused) == (3, [], "")


def scaled(rank: int, size: int, enabled: bool) -> Tensor:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=enabled)
    model = Deep()
    ddp, optimizer = wrap(model), sgd(model)
    hook = gossamer.ddp.register(ddp, "topk(ratio=0.1)" + BUCKETS, seed=SEED, deadline=DEADLINE, scaler=scaler)
    for step in range(1, 9):
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    hook.close()
    return flat(model)


def test_a_scale_that_grows_leaves_no_trace(gang2: Gang) -> None:
    assert same(gang2.run(scaled, True)[0], gang2.run(scaled, False)[0])


def refusals(rank: int, size: int) -> list[str]:
    said = list[str]()
    model = Deep()
    ddp = wrap(model)
    for recipe in (
        "local_sgd(2)",
        "sgp",
        "backup",
        "overlap_local_sgd(2)",
        "diana(l1=0.1)",
        "accordion_batch(epoch=2)",
        "allreduce + slowmo(4, inner=every_step())",
        "topk(ratio=0.1) + error_feedback(units='update')",
    ):
        with pytest.raises(AttachError) as caught:
            gossamer.ddp.register(ddp, recipe)
        said.append(str(caught.value))
    with pytest.raises(AttachError) as caught:
        gossamer.ddp.register(model, "terngrad")  # pyright: ignore
    said.append(str(caught.value))
    with pytest.raises(PeerError) as peer:
        gossamer.ddp.register(ddp, "qsgd" if rank else "terngrad", deadline=DEADLINE)
    said.append(str(peer.value))
    for recipe in ("accordion(epoch=2)", "scatter(qsgd()) + dqsgd(9)", "topk + error_feedback(units='update')"):
        with pytest.raises(AttachError, match=r"does not see: call gossamer.ddp.register\(.*optimizer=optimizer\)"):
            gossamer.ddp.register(ddp, recipe)
    for optimizer, what in ((model, "or a list of them"), (sgd(Deep()), "holds none of the model's parameters")):
        with pytest.raises(AttachError, match=what):
            gossamer.ddp.register(ddp, "accordion(epoch=2)", optimizer=optimizer, deadline=DEADLINE)  # pyright: ignore
    slow = torch.optim.SGD([model.layers[0].weight], lr=0.1 * (1 + rank))
    few = pytest.warns(UserWarning, match=r"no optimizer given to register steps 'layers.0.bias' and 12 more")
    with few, pytest.raises(PeerError, match=r"the optimizer's group 0: .*'lr': '0.1'"):
        gossamer.ddp.register(ddp, "accordion(epoch=2)", optimizer=slow, deadline=DEADLINE)
    return said


def test_what_a_hook_cannot_do_is_refused_with_a_hint(gang2: Gang) -> None:
    for *beyond, bare, unlike in gang2.run(refusals):
        assert all("gossamer.attach" in text for text in [*beyond, bare])
        assert len(beyond) == 8
        assert (
            "recipe: 'scatter(ternary(), answer=qsgd(bits=3))' on rank(s) 0; 'scatter(qsgd(bucket=128))' on rank(s) 1"
            in unlike
        )


SCRIPT = """
import gossamer, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", init_method="file://{file}", rank={rank}, world_size={size})
model = torch.nn.Sequential(*(torch.nn.Linear(17, 17) for _ in range(4)))
ddp = DDP(model, bucket_cap_mb=0.001)
hook = gossamer.ddp.register(ddp, "powersgd + bucket(0.0005)", deadline=30)
for _ in range(3):
    ddp(torch.randn(2, 17)).square().sum().backward()
{end}
print("done", hook.step)
"""


@pytest.mark.parametrize(("size", "end"), [(1, "hook.close(); dist.destroy_process_group()"), (2, "")])
def test_a_hooked_program_ends_cleanly(size: int, end: str, tmp_path) -> None:
    import subprocess
    import sys

    programs = [SCRIPT.format(file=tmp_path / "store", rank=r, size=size, end=end) for r in range(size)]
    runs = [
        subprocess.Popen([sys.executable, "-c", p], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for p in programs
    ]
    try:
        said = [run.communicate(timeout=300) for run in runs]
    finally:  # or a warning of their open pipes fails whichever test is next
        for run in runs:
            run.kill()
            run.communicate()
    for run, (out, err) in zip(runs, said, strict=True):
        assert (run.returncode, out) == (0, "done 3\n"), err
