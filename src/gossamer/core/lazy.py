"""Sequences whose items are made when they are asked for."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """A sequence that makes an item each time it is asked for, for those who need few of many.

    >>> class Squares(LazySequence[int]):
    ...     def __len__(self): return 4
    ...     def item(self, index): return index * index
    >>> Squares()[-1], [*Squares()], Squares()[1:3]
    (9, [0, 1, 4, 9], [1, 4])
    """

    @abstractmethod
    def item(self, index: int) -> T:
        """Make the item at an index from 0 to the length."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> Any:
        which = range(len(self))[index]
        return self.item(which) if isinstance(which, int) else [self.item(i) for i in which]

    def __iter__(self) -> Iterator[T]:
        return map(self.item, range(len(self)))
