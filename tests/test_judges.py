"""Judges by others, each run shortly: figures that are known elsewhere, and what they refuse."""

import sys

import pytest
from benchmarks.judges import ddp_hooks, deepspeed_onebit, torchft
from tests.gang import Gang


def said(judge, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What its command prints where all pass."""
    monkeypatch.setattr(sys, "argv", ["judge", *words])
    with pytest.raises(SystemExit) as ended:
        judge.main()
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_streaming_diloco_has_the_weights_of_torchft_at_every_step(monkeypatch, capsys) -> None:
    lines = said(torchft, monkeypatch, capsys).splitlines()
    assert [line.count("passes") for line in lines] == [1] * 6
    assert lines[4].startswith("delay 1, alpha 0.5: ours end at -35.75 and -35, theirs at -35.75 and -35;")


def test_torchft_s_judge_refuses_the_weights_of_another_delay_and_of_another_mixing() -> None:
    at_once, mixed, _, late = torchft.FIXTURES[:4]
    assert torchft.largest_error(at_once._replace(layers=late.layers)) > 1000
    assert torchft.largest_error(mixed._replace(layers=at_once.layers)) > 1000


def test_onebit_optimizers_send_what_deepspeed_s_reference_does(monkeypatch, capsys) -> None:
    lines = said(deepspeed_onebit, monkeypatch, capsys, "--elements", "5000", "--ranks", "4").splitlines()
    assert [line.split(":")[0].split(" ", 1)[1].strip() for line in lines[:3]] == [
        "own='encoded') passes",
        "is another message",
        "is another message",
    ]
    assert sum("momentum of still rows at most 0.0e+00" in line for line in lines) == 2


def test_deepspeed_s_judge_refuses_a_scale_that_is_off_by_a_hundred_thousandth(monkeypatch) -> None:
    tensors = deepspeed_onebit.given(2, 4096, shuffled=True)
    assert deepspeed_onebit.judge(deepspeed_onebit.MUST_PASS, tensors).passes
    ours = deepspeed_onebit.ours

    def longer(*given) -> deepspeed_onebit.Message:
        found = ours(*given)
        return deepspeed_onebit.Message(found.mean * 1.00001, found.kept)

    monkeypatch.setattr(deepspeed_onebit, "ours", longer)
    assert deepspeed_onebit.judge(deepspeed_onebit.MUST_PASS, tensors).apart > 4000


def hooks(rank: int, size: int) -> tuple[float, float, dict[str, float]]:
    powers = {recipe: ddp_hooks.error_of_powers(recipe) for recipe in ddp_hooks.POWERS}
    return ddp_hooks.largest_error("allreduce"), ddp_hooks.error_of_powers("scatter(eden(2))", (1e-5, 1e-4)), powers


@pytest.mark.gang
def test_gradients_are_within_what_pytorch_s_own_hooks_may_err_by(gang2: Gang) -> None:
    for parity, coarse, powers in gang2.run(hooks):
        assert parity <= 1
        assert all(error <= 1 for error in powers.values()), powers
        assert coarse > 1  # two bits are refused


def test_the_judge_of_hooks_starts_two_ranks_as_pytorch_s_tests_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four, the largest of the powers is beyond what 8 bits may err by."""
    started: list[int] = []
    monkeypatch.setattr(ddp_hooks, "start_ranks", lambda count, port: started.append(count) or 0)
    monkeypatch.setattr(sys, "argv", ["judge"])
    with pytest.raises(SystemExit):
        ddp_hooks.main()
    assert started == [2]
