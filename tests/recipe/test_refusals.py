"""What cannot be right is refused at construction, with the reason and the fix."""

import pytest

from gossamer.codecs import FP32, QSGD, PowerSGD
from gossamer.core.errors import RecipeError
from gossamer.exchanges import AllReduced, Gather
from gossamer.memories import DIANA, ErrorFeedback
from gossamer.mixers import PushSum
from gossamer.recipe import Recipe, Rule
from gossamer.schedules import EveryStep, Gossip

REFUSED: dict[str, tuple[str, str]] = {  # text: (reason, fix)
    # wires that cannot be summed, or only summed
    "allreduce(topk())": ("cannot be summed on their way", "gather(topk())"),
    "allreduce(qsgd())": ("cannot be summed on their way", "scatter(qsgd())"),
    "gather(powersgd())": ("only their sum can be read", "allreduce(powersgd())"),
    "scatter(powersgd())": ("only their sum can be read", "allreduce(powersgd())"),
    "scatter(topk(scope='global')) + error_feedback()": ("chunks have no global top-k", "gather(topk(scope='global'))"),
    # bias without a memory
    "gather(topk())": ("without error feedback training need not converge", "gather(topk()) + error_feedback()"),
    "scatter(topk())": ("is biased", "none(allow_biased=True)"),
    "allreduce(powersgd())": ("is biased", "allreduce(powersgd()) + error_feedback()"),
    "powersgd + none()": ("is biased", "+ error_feedback()"),
    "topk + none()": ("is biased", "none(allow_biased=True)"),
    # memories that need something else
    "gather(topk()) + diana()": ("diana() needs an unbiased exchange", "error_feedback()"),
    "powersgd + diana()": ("needs an unbiased exchange", "qsgd()"),
    "gather(ternary()) + diana()": ("needs an unbiased exchange", "ternary(clip=0.0)"),
    "scatter(bf16()) + diana()": ("needs an unbiased exchange", "qsgd(), fp32()"),
    "gather(ternary()) + error_feedback()": ("can diverge: the codec adds more than it leaves out", "drop it"),
    "gather(qsgd(bits=2)) + error_feedback()": ("can diverge", "more bits or smaller buckets"),
    "gather(qsgd(bits=4, bucket=512)) + error_feedback()": ("can diverge", "diana()"),
    "scatter(qsgd(), feedback=1.0) + diana()": ("must follow the memory's own rate", "leave feedback out"),
    "scatter(bf16(), feedback=0.0) + error_feedback()": ("residuals would be wrong", "leave feedback out"),
    "scatter(ternary(deviation='centred'))": ("error feedback around it can diverge", "none(allow_biased=True)"),
    "scatter(qsgd(), answer=powersgd())": ("only their sum can be read",),
    "scatter(qsgd(), answer=topk(scope='global'))": ("chunks have no global top-k",),
    "scatter(bf16(), answer=topk())": ("is biased", "error_feedback()"),
    "scatter(qsgd(), answer=ternary()) + diana()": ("needs an unbiased exchange", "ternary(clip=0.0)"),
    "topk + slowmo(8) + error_feedback(units='update')": ("already come in units of the update", "leave units out"),
    # mixing
    "push_sum()": ("cannot be a part of a recipe on its own", "allreduce(fp32()) + gossip(push_sum())"),
    "push_sum() + slowmo(8)": ("cannot be a part of a recipe on its own", "inner=push_sum()"),
    "sgp + error_feedback()": ("push-sum must not lose any part of x or w", "drop the memory"),
    "sgp + diana()": ("the error does not vanish", "drop the memory"),
    "sgp + rule('ndim < 2', allreduce(fp32()))": (
        "x and w of all parameters travel in one message",
        "cannot single out",
    ),
    "sgp + accordion_batch(2, 3)": ("has nothing to change", "gossip()"),
    "scatter(qsgd()) + gossip()": ("would send nothing", "'allreduce(fp32()) + gossip()'"),
    "topk + gossip(choco(topk()))": ("the error does not vanish", "gossip(choco(topk()))"),
    "nodes(allreduce(fp32()), 2) + post_local(4, noloco(2))": (
        "sends models from rank to rank, not by nodes",
        "leave the nodes out",
    ),
    "allreduce + gossip(choco(atomo(svd(), atoms=1, draws='independent')))": (
        "the message size of atomo(svd(), atoms=1",
        "use another code or index",
    ),
    "allreduce + gossip(exact=1)": ("or more than every (1 steps), got 1", "local_sgd()"),
    "allreduce + gossip(warmup=-1)": ("warmup must be 0 steps or more", "got -1"),
    "sgp(topology=switch(ring(), 0, complete()))": ("rounds must be 1 or more", "use complete() alone"),
    "push_sum(topk())": ("topology must be a topology", "exponential"),
    # backup workers
    "backup + backup_workers() + slowmo(8)": ("two parts say schedule", "slowmo(8)"),
    "backup + error_feedback()": ("a dropped gradient's residual would be lost", "drop the memory"),
    "gather(topk()) + backup_workers()": ("is biased", "error_feedback()"),
    "topk + backup_workers()": ("residual would be lost", "scatter(qsgd())"),
    "powersgd + backup_workers()": ("residual would be lost", "an exchange that needs none"),
    "backup + rule('ndim < 2', allreduce(fp32()))": ("one ticket closes the whole step", "drop the rules"),
    "backup + accordion_batch(2, 3)": ("late ranks would change the recipe at another step", "accordion_batch(2, 3)"),
    # values without sense
    "allreduce(fp32()) + overlap_local_sgd(8, alpha=1.0)": ("1 freezes the model", "the paper uses 0.6"),
    "allreduce(fp32()) + overlap_local_sgd(8, alpha=0.0)": ("0 never synchronises", "the paper uses 0.6"),
    "slowmo(0)": ("at least 1 step", "12"),
    "slowmo(8, beta=1.0)": ("beta must lie in [0, 1)", "0.4 to 0.8"),
    "slowmo(8, alpha=0.0)": ("alpha must be positive", "freeze"),
    "local_sgd(0)": ("at least 1 step", "4 to 16"),
    "sgp(every=0)": ("at least 1 step", "every"),
    "topk(ratio=0.0)": ("ratio must lie in (0, 1]", "0.01"),
    "topk(ratio=1.5)": ("ratio must lie in (0, 1]", "0.01"),
    "qsgd(bits=0)": ("bits must be between 1 and 8", "bf16"),
    "qsgd(bits=9)": ("bits must be between 1 and 8", "fp32"),
    "qsgd(bucket=0)": ("bucket must be at least 1", "512"),
    "powersgd(rank=0)": ("rank must be at least 1", "1 to 4"),
    "terngrad(clip=-1.0)": ("clip must be 0 (off) or more than 1", "2.5"),
    "terngrad(clip=0.5)": ("clip must be 0 (off) or more than 1", "all elements"),
    "terngrad(levels=128)": ("levels must be between 1 and 127", "got 128"),
    "gather(qsgd()) + diana(alpha=1.5)": ("alpha must lie in [0, 1]", "leave it out"),
    "diana(momentum=1.0)": ("momentum must lie in [0, 1)", "got 1.0"),
    "topk + error_feedback(decay=0.0)": ("decay must lie in (0, 1]", "1 loses nothing"),
    "accordion(epoch=0)": ("epoch must be at least 1 step", "got 0"),
    "accordion_batch(epoch=2, factor=0)": ("factor must be at least 1", "got 0"),
    "backup(backups=-1)": ("backups must be 0 or more", "got -1"),
    "allreduce + bucket(0.0)": ("mb must be positive", "6 to 25"),
    "allreduce + bucket(nan)": ("mb must be positive", "6 to 25"),
    "sgp(topology=exponential(count=0))": ("at least 1 peer", "got 0"),
    # controllers' levels are checked like the exchange
    "gather(topk()) + accordion(gather(topk()), gather(topk(ratio=0.1)), 2)": ("is biased", "error_feedback()"),
    "scatter(qsgd()) + accordion(scatter(qsgd(bits=8)), scatter(qsgd(bits=2)), 2)": ("starts with its mild", "write"),
    "gather(topk()) + error_feedback() + accordion(gather(topk()), gather(ternary()), 2)": ("can diverge", "drop it"),
    # where a preset and a part share a name, the one that was meant refuses
    "diana(bits=9)": ("qsgd: bits must be between 1 and 8", "bf16"),
    "diana(bits='x')": ("diana: bits must be a whole number", "got 'x'"),
    "diana(alpha=1.5)": ("alpha must lie in [0, 1]", "leave it out"),
    "accordion()": ("accordion needs epoch", "accordion(...)"),
    "slowmo(4) + accordion_batch(2, 3)": ("grows the batch", "use every_step()"),
    "overlap_local_sgd(4) + accordion_batch(2, 3)": ("grows the batch", "use every_step()"),
    # sentences that are no recipe
    "qsgd(bits=2, buckets=4)": ("no argument 'buckets'", "Did you mean 'bucket'?"),
    "terngrad + qsgd()": ("cannot be a part of a recipe on its own", "put it in an exchange: scatter(qsgd())"),
    "ternary()": ("cannot be a part of a recipe on its own", "put it in an exchange: scatter(ternary())"),
    "fp32()": ("cannot be a part of a recipe on its own", "put it in an exchange: allreduce(fp32())"),
    "powersgd(min_ratio=3.0)": (
        "cannot be a part of a recipe",
        "an exchange: allreduce(powersgd(min_ratio=3.0)) + error_feedback()",
    ),
    "topk(index='rice')": ("cannot be a part of a recipe on its own", "gather(topk(index='rice')) + error_feedback()"),
    "ring()": ("cannot be a part of a recipe on its own", "allreduce(fp32()) + gossip(push_sum(ring()))"),
    "gossip()": ("a recipe needs an exchange", "allreduce(fp32())", "'allreduce + gossip()'"),
    "slowmo(4, by_lr=False)": ("a recipe needs an exchange", "'allreduce + slowmo(4, by_lr=False)'"),
    "error_feedback()": ("a recipe needs an exchange", "allreduce(fp32())"),
    "3": ("cannot be a part of a recipe", "name an exchange"),
    "slowmo(8) + terngrad + powersgd": ("from one preset only", "recipe"),
    "terngrad + slowmo(8) + local_sgd(4)": ("two parts say schedule", "slowmo(8) and local_sgd(4)"),
    "allreduce(fp32()) + gather(fp32())": ("two parts say exchange", "allreduce(fp32()) and gather(fp32())"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_it_is_refused_with_the_reason_and_the_fix(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.of(text)
    message = str(caught.value)
    assert [words for words in REFUSED[text] if words not in message] == [], message


ALLOWED = [
    "topk + none(allow_biased=True)",
    "allreduce(powersgd()) + none(allow_biased=True)",
    "gather(qsgd(bits=8)) + error_feedback()",
    "gather(qsgd(bits=4, bucket=64)) + error_feedback()",
    "gather(ternary(clip=0.0)) + diana()",
    "allreduce(ternary(clip=0.0)) + diana()",
    "scatter(qsgd()) + diana()",
    "topk + slowmo(8)",
    "topk + error_feedback(units='update')",
    "terngrad + slowmo(8)",
    "allreduce(fp32()) + slowmo(48, inner=push_sum())",
    "allreduce(fp32()) + gossip(push_sum())",
    "scatter(fp32()) + gossip()",
    "scatter(qsgd()) + backup_workers()",
    "allreduce(fp32()) + backup_workers(backups=0)",
    "scatter(bf16())",
]


@pytest.mark.parametrize("text", ALLOWED)
def test_its_neighbours_are_allowed(text: str) -> None:
    assert Recipe.of(repr(Recipe.of(text))) == Recipe.of(text)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Recipe(Gather(PowerSGD())), "allreduce(powersgd())"),
        (lambda: Recipe(AllReduced(PowerSGD()), DIANA()), "diana() needs an unbiased exchange"),
        (lambda: Recipe(AllReduced(FP32()), ErrorFeedback(), Gossip()), "drop the memory"),
        (lambda: Recipe(PushSum()), "is no exchange"),
        (lambda: Recipe(QSGD()), "put it in one: scatter(qsgd())"),
        (lambda: Recipe("terngrad"), "is no exchange"),
        (lambda: Recipe(AllReduced(FP32()), EveryStep()), "every_step() is no memory"),
        (lambda: Recipe(AllReduced(FP32()), schedule=DIANA()), "diana() is no schedule"),
        (lambda: Rule("ndim < 2", AllReduced(PowerSGD())), "+ error_feedback()"),
        (lambda: Rule("ndim < 2", PushSum()), "exchange must be"),
        (lambda: Recipe.of(3), "not 3"),
        (lambda: Recipe.of(None), "not None"),
        (lambda: Recipe.of(["terngrad"]), "not ['terngrad']"),
        (lambda: Recipe.of(QSGD()), "put it in an exchange: scatter(qsgd())"),
    ],
)
def test_python_is_refused_like_text(make, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make()
    assert words in str(caught.value)
