"""Signs, bytes, sparse sums and momenta that travel: what of them cannot be right is refused with the reason and the fix."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.gym import make
from torch import nn

from gossamer.core.errors import AttachError, RecipeError
from gossamer.integrations.ddp import check as check_hook
from gossamer.recipe import Recipe

SUMMED = (
    "int8()",
    "fp8()",
    "natural()",
    "sign()",
    "sign_columns()",
    "strom(0.1)",
    "adacomp()",
    "bernoulli()",
    "dct_topk()",
    "tile_topk()",
)
BIASED = (  # each needs a memory
    "scatter(sign())",
    "scatter(sign(scale='l2'))",
    "scatter(sign_columns())",
    "gather(strom(0.1))",
    "gather(adacomp())",
    "allreduce(randk())",
    "allreduce(gradiveq())",
    "gtopk + none()",
    "onebit_sgd + none()",
    "gather(dropping())",
    "gather(dct_topk())",
    "gather(tile_topk())",
)
KEPT = ("ef_signsgd", "onebit_sgd", "gtopk", "dgc", "ef21", "strom(0.1)", "adacomp", "randk", "gradiveq", "demo")

REFUSED: dict[str, tuple[str, str]] = {  # text: (reason, fix)
    # what is said of a codec and is not so
    "fp8(format='e4m3fnuz')": ("got 'e4m3fnuz'", "one of 'e4m3', 'e5m2'"),
    "fp8(scale='ocp')": ("clips the largest element of a block", "use scale='e8m0'"),
    "int8(scale='ocp')": ("got 'ocp'", "one of 'fp32', 'bf16'"),
    "scatter(fp8(rounding='nearest')) + diana()": ("is biased", "error_feedback()"),
    "int8(block=0)": ("got 0", "128 elements"),
    "natural(bits=7)": ("got 7", "one of 8, 9"),
    "strom(0.0)": ("above 0", "largest one percent"),
    "adacomp(0)": ("between 1 and 32768", "50 for convolutions"),
    "gtopk(ratio=0.0)": ("(0, 1]", "one percent"),
    "randk(ratio=2.0)": ("(0, 1]", "one percent"),
    # memories around what does not contract, or twice
    "scatter(sign(scale='one')) + error_feedback()": ("can diverge", "drop it"),
    "scatter(sign(scale='l2')) + ef21()": ("can diverge", "more bits"),
    "gather(ternary()) + ef21()": ("can diverge", "use diana()"),
    "gather(strom(0.1)) + ef21()": ("none is as large as what travels", "use error_feedback()"),
    "scatter(topk(), answer=strom(0.1)) + ef21(eta=1.0)": ("nothing gets through", "gather(topk())"),
    "ef_signsgd + diana()": ("needs an unbiased exchange", "use error_feedback()"),
    "ef21(eta=0.0)": ("(0, 1]", "0.1 for minibatches"),
    "gather(sign()) + momentum_correction()": ("would stop all momentum", "masking=False"),
    # momenta
    "onebit_adam(0)": ("at least 1 step", "15 to 25 %"),
    "onebit_adam(3) + slowmo(4)": ("sends a momentum", "every_step()"),
    "onebit_adam(3) + local_sgd(4)": ("local_sgd(4) averages none", "every_step()"),
    "onebit_lamb(3) + local_sgd(4)": ("local_sgd(4) averages none", "every_step()"),
    "zero_one_adam(3) + slowmo(4)": ("slowmo(4) has neither", "zero_one(1000)"),
    "allreduce(fp32()) + backup_workers() + onebit_adam_update(3)": ("late ranks miss it", "every_step()"),
    "gather(topk()) + momentum_correction(0.9) + onebit_adam_update(3)": ("would add a second one", "momentum=0.0"),
    "zero_one_adam(3) + momentum_correction(0.9)": ("adds a second one", "momentum=0.0"),
    "onebit_adam(3) + every_step(l1=0.1)": ("gradient's length", "leave l1 out"),
    "onebit_lamb(3) + every_step(l1=0.1)": ("gradient's length", "leave l1 out"),
    "zero_one_adam(3) + every_step(l1=0.1)": ("gradient's length", "leave l1 out"),
    "signsgd + every_step(l1=0.1)": ("gradient's length", "leave l1 out"),
    "signsgd + local_sgd(4)": ("local_sgd(4) averages none", "every_step()"),
    "signsgd + gossip()": ("would send nothing", "choco()"),
    "demo + every_step(l1=0.1)": ("gradient's length", "leave l1 out"),
    "demo + local_sgd(4)": ("local_sgd(4) averages none", "every_step()"),
    "demo + momentum_correction(0.9)": ("would stop all momentum", "masking=False"),
    "signsgd + delayed()": ("a step may have none", "use every_step()"),
    "onebit_adam(3) + delayed()": ("a step may have none", "use every_step()"),
    # an exchange of another form than its codec's
    "gather(gradiveq())": ("only their sum can be read", "use allreduce(gradiveq())"),
    "gtopk + diana()": ("needs an unbiased exchange", "use error_feedback()"),
    "randk + diana()": ("needs an unbiased exchange", "use error_feedback()"),
    "ef_signsgd + local_sgd(4)": ("in units of the update", "error_feedback()"),
}
REFUSED.update({f"allreduce({c})": ("cannot be summed on their way", f"use scatter({c})") for c in SUMMED})
REFUSED.update(dict.fromkeys(BIASED, ("is biased", "error_feedback()")))
REFUSED.update({f"{p} + backup_workers()": ("residual would be lost", "drop the memory") for p in KEPT})
REFUSED.update({f"{p} + gossip()": ("the error does not vanish", "drop the memory") for p in KEPT})

REFUSED.update({f"{p} + pairwise()": ("would go to another partner", "drop the memory") for p in KEPT})
for _exact in ("int8", "fp8", "natural"):  # codecs that need no memory
    REFUSED[f"{_exact} + gossip()"] = REFUSED[f"{_exact} + pairwise()"] = ("would send nothing", "choco()")


@pytest.mark.parametrize("text", REFUSED)
def test_it_is_refused_with_the_reason_and_the_fix(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.of(text)
    for words in REFUSED[text]:
        assert words in str(caught.value)


ADAPTIVE = ("onebit_adam(3)", "zero_one_adam(3)", "onebit_lamb(3)")
OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "not of Adam's family": (lambda m: torch.optim.RMSprop(m.parameters()), "use torch.optim.AdamW"),
    "a second momentum": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "both add momentum"),
    "other numbers": (lambda m: torch.optim.AdamW(m.parameters(), betas=(0.8, 0.99)), "in the recipe"),
    "amsgrad": (
        lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.0, amsgrad=True),
        "amsgrad is not supported",
    ),
}


@pytest.mark.parametrize("recipe", ADAPTIVE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_does_not_fit_is_refused_when_it_is_attached(recipe: str, name: str) -> None:
    optimizer, fix = OPTIMIZERS[name]
    with pytest.raises(AttachError) as caught:
        make(recipe, 2, optimizer=optimizer)
    assert fix in str(caught.value)


@pytest.mark.parametrize("name", ["a second momentum", "Adam's own"])
def test_signs_of_what_fades_are_of_a_momentum_and_take_no_other(name: str) -> None:
    kinds = OPTIMIZERS | {"Adam's own": (lambda m: torch.optim.AdamW(m.parameters()), "")}
    with pytest.raises(
        AttachError, match=r"memory that fades.*both add momentum.*SGD with momentum=0, or .* error_feedback\(\)"
    ):
        make("demo", 2, optimizer=kinds[name][0])
    make("gather(topk()) + error_feedback() + signs()", 2, optimizer=kinds[name][0])


@pytest.mark.parametrize("recipe", [*ADAPTIVE, "signsgd"])
def test_ddp_averages_gradients_already(recipe: str) -> None:
    with pytest.raises(AttachError, match=r"use gossamer\.attach"):
        check_hook(Recipe.of(recipe))


def test_it_is_the_same_memory_that_owes_and_that_is_refused_elsewhere() -> None:
    """The table is no list of what is refused anyhow: around what it is for, each of these is legal."""
    kept: list[Any] = [Recipe.of(text) for text in (*KEPT, *ADAPTIVE)]
    assert len(kept) == len(KEPT) + len(ADAPTIVE)
