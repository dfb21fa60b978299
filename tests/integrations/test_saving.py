"""A rank that dies or freezes inside of checkpoint.save or checkpoint.load: every other one raises in time, and says who and where."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.gang import Call, at_once
from tests.integrations.loops import attached, small_step
from tests.integrations.test_frozen import process_of
from tests.marked import SLACK

from gossamer.checkpoints.folder import Folder
from gossamer.core.errors import CheckpointError, PeerError
from gossamer.integrations import checkpoint

pytestmark = pytest.mark.gang

DEADLINE = 3.0


def struck(rank: int, size: int, path: str, where: str, victim: int, blow: signal.Signals) -> tuple[str, float, str]:
    """The victim is hit where it writes, ends or reads a checkpoint; the others put an end to it when they have noticed."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    doomed = process_of(victim, size)

    def hit(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), blow)

    with attached("slowmo(3)", deadline=DEADLINE) as (model, optimizer, comm):
        while comm.step < 4:
            small_step(model, optimizer, comm, rank)
        if where == "load":
            checkpoint.save(comm, path)
        if rank == victim:
            owner, name = (Folder, "__init__") if where == "load" else (FileSystemWriter, where)
            setattr(owner, name, hit)
        began = time.monotonic()
        try:
            (checkpoint.load if where == "load" else checkpoint.save)(comm, path)
        except PeerError as error:
            text, waited = str(error), time.monotonic() - began
        else:
            raise AssertionError("nobody noticed that a rank is gone")
        finally:
            if rank != victim:
                with suppress(ProcessLookupError):
                    os.kill(doomed, signal.SIGKILL)
    if where == "load":
        return text, waited, ""
    with pytest.raises(CheckpointError) as refused:
        Folder(path)
    return text, waited, str(refused.value)


CASES = [
    ("write_data", 1, signal.SIGSTOP),
    ("write_data", 0, signal.SIGSTOP),
    ("write_data", 1, signal.SIGKILL),
    ("finish", 0, signal.SIGKILL),
    ("load", 1, signal.SIGSTOP),
]


@pytest.fixture(scope="module")
def noticed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], list[Any]]]:
    home: Path = tmp_path_factory.mktemp("saving")
    calls: dict[Any, Call] = {
        (where, victim, blow): Call(struck, (str(home / f"{where}{victim}{blow.name}"), where, victim, blow), (victim,))
        for where, victim, blow in CASES
    }
    with at_once(3, calls) as outcome_of:
        yield outcome_of


@pytest.mark.parametrize(("where", "victim", "blow"), CASES)
def test_the_others_learn_who_is_gone_and_where(
    noticed: Callable[[Any], list[Any]], where: str, victim: int, blow: signal.Signals
) -> None:
    call = "checkpoint.load" if where == "load" else "checkpoint.save"
    for rank, outcome in enumerate(noticed((where, victim, blow))):
        if rank == victim:
            continue
        text, waited, refused = outcome
        assert f"rank {rank} of 3: step 4, '{call}'" in text
        assert (f"No answer from rank {victim}:" if victim else "The store does not answer") in text
        assert waited < DEADLINE + 2.0 + SLACK
        if where != "load":
            assert "load the checkpoint before it" in text
            assert "not a finished distributed checkpoint" in refused
