"""Exchanges gloo's addresses between processes in one round, without blocking in the store."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.errors import PeerError

Meet = Callable[[str], dict[int, str]]  # posts a text, and returns every other rank's


class RendezvousStore(Store):
    """A store for gloo: a rank's keys are posted together when it first asks for keys of other ranks."""

    def __init__(self, meet: Meet) -> None:
        super().__init__()
        self._meet = meet
        self._mine, self._all = dict[str, bytes](), dict[str, bytes]()

    def set(self, key: str, value: Any) -> None:
        self._mine[key] = value.encode() if isinstance(value, str) else bytes(value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not all(key in self._all for key in keys):
            self._exchange()
        for key in keys:
            if key not in self._all:
                raise PeerError(
                    f"cannot connect gloo: no rank has written the key {key!r}; run the same version of torch on all ranks"
                )

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._all[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._all or key in self._mine for key in keys)

    def has_extended_api(self) -> bool:
        return False

    def _exchange(self) -> None:
        self._all |= self._mine
        posts = self._meet(json.dumps({key: value.hex() for key, value in self._mine.items()}))
        for rank, text in posts.items():
            self._all |= _entries(rank, text)


def _entries(rank: int, text: str) -> dict[str, bytes]:
    try:
        entries: Any = json.loads(text)
        read = {str(key): bytes.fromhex(value) for key, value in entries.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise PeerError(
            f"cannot connect gloo: the addresses of rank {rank} in the store cannot be read: {text[:80]!r}. Check that all "
            "ranks run the same version of gossamer, and that no other program writes to the store"
        ) from None
    return read


def gloo(meet: Meet, rank: int, size: int, seconds: float) -> Any:
    """Create and connect a gloo group of these ranks; its connections may take `seconds` seconds.

    It is not made by `new_group`, which names a group by the number of groups that a process knows: its ranks could miss
    each other, and a name could come back with old addresses.
    """
    failure: list[Exception] = []

    def noting(text: str) -> dict[int, str]:
        try:
            return meet(text)
        except Exception as error:  # gloo would replace its message
            failure.append(error)
            raise

    try:
        return dist.ProcessGroupGloo(RendezvousStore(noting), rank, size, timedelta(seconds=seconds))
    except Exception:
        if failure:
            raise failure[0] from None
        raise
