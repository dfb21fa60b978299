"""Rank 1 sends bytes to rank 0, which answers when it has them all; rank 1 prints the seconds it took."""

import contextlib
import os
import socket
import sys
import time

PORT = 5000


def receive(size: int) -> None:
    with socket.create_server(("", PORT)) as server, server.accept()[0] as peer:
        while size:
            size -= len(peer.recv(min(size, 1 << 20)))
        peer.send(b"k")


def send(size: int) -> None:
    peer = None
    while peer is None:
        with contextlib.suppress(OSError):
            peer = socket.create_connection(("host0", PORT))
    with peer:
        began = time.monotonic()
        peer.sendall(bytes(size))
        peer.recv(1)
        print(time.monotonic() - began)


if __name__ == "__main__":
    (receive if os.environ["RANK"] == "0" else send)(int(sys.argv[1]))
