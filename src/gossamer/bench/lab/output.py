"""Split a stream of bytes into lines."""

from collections.abc import Iterator

_LONGEST = 1 << 16


class LineSplitter:
    """Splits one stream into lines; a line longer than 64 KiB is cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Add bytes and return the complete lines; empty bytes mean the end of the stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST):
            lines, self._rest = [*lines, self._rest], b""
        return (line.removesuffix(b"\r").decode(errors="replace") for line in lines)
