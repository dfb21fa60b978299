"""The pretended device itself: each rule, broken once, is seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.gpu.nursery import Nursery, RankError
from torch import Tensor

pytestmark = pytest.mark.gang


def watched(rank: int, size: int, act: Callable[[], Any]) -> dict[str, Any]:
    """What the device saw of an act."""
    from tests.gpu.diary import diary

    result = act()
    return {
        "races": [*diary.races],
        "lifetimes": [*diary.lifetimes],
        "syncs": sum((diary.syncs + diary.lane_syncs).values()),
        "launches": sum(diary.launches.values()),
        "result": result,
    }


def see(nursery: Nursery, act: Callable[[], Any]) -> dict[str, Any]:
    return nursery.run(1, watched, act)[0]


def ones() -> Tensor:
    return torch.ones(100, device="cuda:0")


# -- races ---------------------------------------------------------------------------------------------------------------


def reads_too_early() -> None:
    x = ones()
    with torch.cuda.stream(torch.cuda.Stream()):
        x.sum()


def reads_after_an_event_of_before() -> None:
    begin, stream = torch.cuda.current_stream().record_event(), torch.cuda.Stream()
    x = ones()
    with torch.cuda.stream(stream):
        stream.wait_event(begin)
        x.sum()


def overwrites_what_is_read() -> None:
    x, stream = ones(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kept = x + 1
    x.zero_()
    torch.cuda.current_stream().wait_stream(stream)
    del kept


def fills_a_pinned_tensor_that_is_still_read() -> None:
    host = torch.ones(100).pin_memory()
    host.to("cuda:0", non_blocking=True)
    host.zero_()


def reads_a_pinned_tensor_too_early() -> float:
    host = torch.zeros(100).pin_memory()
    host.copy_(ones(), non_blocking=True)
    return float(host.sum())


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (reads_too_early, "reads at"),
        (reads_after_an_event_of_before, "reads at"),
        (overwrites_what_is_read, "overwrites at"),
        (fills_a_pinned_tensor_that_is_still_read, "the host"),
        (reads_a_pinned_tensor_too_early, "the host"),
    ],
)
def test_races_are_seen(nursery: Nursery, act: Callable[[], Any], words: str) -> None:
    races = see(nursery, act)["races"]
    assert len(races) == 1
    assert words in races[0]


def reads_after_an_event() -> float:
    x, stream = ones(), torch.cuda.Stream()
    stream.wait_event(torch.cuda.current_stream().record_event())
    with torch.cuda.stream(stream):
        y = x + 1
        done = stream.record_event()
    torch.cuda.current_stream().wait_event(done)
    y.record_stream(torch.cuda.current_stream())
    return float(y.sum())


def reads_a_pinned_tensor_in_time() -> float:
    host = torch.zeros(100).pin_memory()
    host.copy_(ones(), non_blocking=True)
    torch.cuda.current_stream().record_event().synchronize()
    return float(host.sum())


@pytest.mark.parametrize(("act", "total"), [(reads_after_an_event, 200.0), (reads_a_pinned_tensor_in_time, 100.0)])
def test_what_is_in_order_is_none(nursery: Nursery, act: Callable[[], Any], total: float) -> None:
    seen = see(nursery, act)
    assert (seen["races"], seen["lifetimes"], seen["syncs"], seen["result"]) == ([], [], 1, total)


# -- lifetimes -------------------------------------------------------------------------------------------------------------


def lets_go_too_early() -> None:
    x, stream = ones(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.sum()
    del x


def records_the_stream() -> None:
    x, stream = ones(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.sum()
    x.record_stream(stream)
    del x


def lets_go_once_streams_have_met() -> None:
    x, stream = ones(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.sum()
    torch.cuda.current_stream().wait_stream(stream)
    del x


@pytest.mark.parametrize(
    ("act", "count"), [(lets_go_too_early, 1), (records_the_stream, 0), (lets_go_once_streams_have_met, 0)]
)
def test_memory_that_is_let_go_too_early_is_seen(nursery: Nursery, act: Callable[[], Any], count: int) -> None:
    assert len(see(nursery, act)["lifetimes"]) == count


# -- what the host waits for, and what is launched -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "syncs", "launches"),
    [
        ("x.sum()", 0, 1),
        ("x.view(10, 10).t()", 0, 0),
        ("torch.empty_like(x)", 0, 0),
        ("x.sum().item()", 1, 2),
        ("bool((x > 0).all())", 1, 3),
        ("x.tolist()", 1, 0),
        ("x.cpu()", 1, 0),
        ("x.to('cpu')", 1, 0),
        ("x.nonzero()", 1, 1),
        ("x[x > 0]", 1, 2),
        ("x[torch.arange(3)]", 1, 1),
        ("torch.tensor([1, 2], device='cuda:0')", 1, 0),
        ("torch.zeros(3, device='cuda:0')", 0, 0),
        ("torch.ones(3).to('cuda:0')", 1, 1),
        ("torch.ones(3).to('cuda:0', non_blocking=True)", 1, 1),
        ("torch.ones(3).pin_memory().to('cuda:0', non_blocking=True)", 0, 1),
        ("torch.cuda.current_stream().record_event().synchronize()", 1, 0),
        ("torch.cuda.current_stream().record_event().query()", 0, 0),
        ("torch.cuda.synchronize()", 1, 0),
    ],
)
def test_waits_and_launches_are_counted(nursery: Nursery, text: str, syncs: int, launches: int) -> None:
    seen = nursery.run(1, evaluated, text)[0]
    assert (seen["syncs"], seen["launches"]) == (syncs, launches)


def evaluated(rank: int, size: int, text: str) -> dict[str, Any]:
    x = ones()

    def act() -> None:
        eval(text, {"torch": torch, "x": x})

    return watched(rank, size, act)


def divided() -> list[bool]:
    x = torch.arange(100.0) ** 3
    there = x.to("cuda:0")
    three = torch.tensor(3.0, device="cuda:0")
    return [torch.equal((y).cpu(), x / 3) for y in (there / 3, there.clone().div_(3), there / three)]


def test_by_a_plain_number_torch_does_not_divide_on_gpus(nursery: Nursery) -> None:
    assert see(nursery, divided)["result"] == [False, False, True]


def levels_units() -> bool:
    from gossamer.kernels.layout import units

    scales = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.1
    return all(torch.equal(units(scales.to("cuda:0"), 0.7, top).cpu(), units(scales, 0.7, top)) for top in (3, 5, 7))


def test_what_a_level_is_worth_is_the_same_on_gpus(nursery: Nursery) -> None:
    assert see(nursery, levels_units)["result"]


# -- devices -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "x + torch.ones(100)",
        "torch.cat([x, torch.ones(())])",
        "x + torch.ones(100, device='cuda:1')",
        "torch.cat([x, torch.ones(3, device='cuda:1')])",
    ],
)
def test_devices_do_not_mix(nursery: Nursery, text: str) -> None:
    with pytest.raises(RankError, match="Expected all tensors to be on the same device"):
        nursery.run(1, evaluated, text)


def on_another_device() -> list[str]:
    from tests.gpu.programs import pretended

    absmax, x = pretended("triton", "scales", "absmax"), torch.ones(100, device="cuda:1")
    out = [str(torch.ones(3, device="cuda").device), str((x * 2).device)]
    try:
        absmax(x, (0, 100))
    except ValueError as error:
        out.append(str(error)[:24])
    torch.cuda.set_device(1)
    return [*out, str(torch.ones(3, device="cuda").device), str(absmax(x, (0, 100)).tolist())]


def test_triton_launches_on_the_current_device(nursery: Nursery) -> None:
    found = see(nursery, on_another_device)["result"]
    assert found == ["cuda:0", "cuda:1", "Pointer argument cannot ", "cuda:1", "[1.0]"]


def bytes_of_a_step() -> tuple[int, int, int]:
    from tests.gpu.diary import diary

    before = diary.live
    x = torch.ones(1000, device="cuda:0")
    y = x + 1
    between = diary.live - before
    del y
    return between, diary.live - before, diary.peak - before


def test_live_bytes_and_their_peak_are_counted(nursery: Nursery) -> None:
    assert see(nursery, bytes_of_a_step)["result"] == (8000, 4000, 8000)
