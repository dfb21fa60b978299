"""Cut a stream of bytes into lines as they come."""

from collections.abc import Iterator

_LONGEST = 1 << 16


class LineSplitter:
    """One stream's unfinished line; a line without an end is let go at 64 KiB."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Take bytes and return the lines that are complete; no bytes mean the end of the stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST):
            lines, self._rest = [*lines, self._rest], b""
        return (line.removesuffix(b"\r").decode(errors="replace") for line in lines)
