"""Work that is equal on all ranks is done once in the simulator, and many wires are made or read in one call, to the same bits."""

from collections import Counter
from typing import Any

import pytest
import torch
from tests.exchanges.test_averages import flats, layout
from torch import Tensor

from gossamer.codecs import BF16, QSGD, Ternary, TopK
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Codec, Context, Exchange
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import AllGather, AllToAll, Program, Verb
from gossamer.core.wire import LazyWires
from gossamer.costs.crossing import traffic
from gossamer.exchanges import Gather, Scatter
from gossamer.fabrics.sim import simulate

QSGDS = [QSGD(), QSGD(bits=1, bucket=8), QSGD(bits=3, bucket=7), QSGD(bits=4, norm="l2"), QSGD(code="rice")]


def one_by_one(program: Program[Any]) -> Program[Any]:
    """The program with requests whose wires are made and read one after the other, by every rank."""
    reply: Any = None
    while True:
        try:
            verb: Verb = program.send(reply)
        except StopIteration as stop:
            return stop.value
        match verb:
            case AllToAll(wires, lengths, read) if read is not None:
                verb = AllToAll(wires, lengths, lambda j, wire, read=read: read(j, wire))
            case AllGather(wire, read) if read is not None:
                verb = AllGather(wire, lambda j, wire, read=read: read(j, wire))
            case _:
                pass
        reply = yield verb
        if isinstance(verb, AllGather) and verb.read is None:
            reply = [*reply]


def together(program: Program[Any]) -> Program[Any]:
    """The program as it is."""
    return program


def states(size: int) -> list[State]:
    return [State() for _ in range(size)]


def means(exchange: Exchange, size: int, wrap: Any, kept: list[State]) -> list[Tensor]:
    of, programs = layout({"a": (17, 13), "b": (8,)}), list[Program[Any]]()
    for rank, flat in enumerate(flats(size, of)):
        context = Context(rank, size, 1, CounterRng(0, 1, rank))
        programs.append(wrap(exchange.average(Bucket(flat, of), kept[rank], context)))
    results = simulate(programs).results
    sent = list[Tensor]()
    for result in results:
        sent.append(torch.zeros_like(result.mean))
        result.add_sent(sent[-1], 1.0)
    return [*(r.mean for r in results), *sent]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("codec", [*QSGDS, Ternary(), BF16(), TopK(0.2)], ids=str)
def test_ranks_that_copy_get_the_bits_of_ranks_that_read(codec: Codec, size: int) -> None:
    for exchange in (Scatter(codec), Scatter(codec, own="encoded"), Gather(codec)):
        mine, theirs = states(size), states(size)
        ours_means, apart = means(exchange, size, together, mine), means(exchange, size, one_by_one, theirs)
        for a, b in zip(ours_means, apart, strict=True):
            assert torch.equal(a, b), str(exchange)
        assert len({t.data_ptr() for t in ours_means}) == len(ours_means)  # nobody's mean is another's memory


def test_the_mean_of_gathered_wires_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [0], TopK.mean

    def counted(self: TopK, *given: Any) -> Any:
        calls[0] += 1
        return real(self, *given)

    monkeypatch.setattr(TopK, "mean", counted)
    means(Gather(TopK(0.2)), 8, together, states(8))
    assert calls[0] == 1
    means(Gather(TopK(0.2)), 8, one_by_one, states(8))
    assert calls[0] == 9


def test_a_rank_makes_and_reads_all_wires_in_one_call_and_one_rank_decodes_the_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Counter[str]()

    def counted(name: str) -> Any:
        real = getattr(QSGD, name)

        def call(*given: Any) -> Any:
            calls[name] += 1
            return real(*given)

        return call

    for name in ("encode", "encode_each", "accumulate", "accumulate_each", "overwrite"):
        monkeypatch.setattr(QSGD, name, counted(name))
    of, programs = layout({"a": (17, 13)}), list[Program[Any]]()
    for rank, flat in enumerate(flats(8, of)):
        programs.append(Scatter(QSGD()).average(Bucket(flat, of), State(), Context(rank, 8, 1, CounterRng(0, 1, rank))))
    simulate(programs)
    assert calls == {"encode": 8, "encode_each": 8, "accumulate_each": 8, "overwrite": 8}  # 8 answers, read by one rank


@pytest.mark.parametrize("per_node", [1, 2, 3, 8])
@pytest.mark.parametrize("among", [None, (5, 0, 2, 3)])
def test_wires_that_are_not_made_yet_count_as_those_that_are(per_node: int, among: tuple[int, ...] | None) -> None:
    count, place = (8, 5) if among is None else (4, 0)
    lengths = [0 if j == place else 3 + j for j in range(count)]
    wires = [torch.zeros(n, dtype=torch.uint8) for n in lengths]
    told = traffic(AllToAll(wires, [7] * count, among=among), 5, 8, per_node)
    assert traffic(AllToAll(LazyWires(wires.__getitem__, lengths), [7] * count, among=among), 5, 8, per_node) == told
    near = [j for j, r in enumerate(among or range(8)) if r // per_node == 5 // per_node]
    assert told == (sum(lengths), sum(lengths), 7 * (count - 1), sum(lengths[j] for j in near))


def test_a_damaged_wire_among_many_is_refused() -> None:
    of, codec = layout({"a": (20,)}), QSGD(bucket=8)
    wire = codec.encode(Bucket(torch.ones(20), of), {}, Context(0, 2, 1, CounterRng(0, 1, 0)))
    with pytest.raises(Exception, match=f"qsgd: expected {wire.numel()} bytes, got {wire.numel() - 1}"):
        codec.accumulate_each([wire, wire[:-1]], of, torch.zeros(20))
