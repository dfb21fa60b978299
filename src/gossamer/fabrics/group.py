"""A group of a lane's ranks: the connection between them, and how far they have come together."""

from collections.abc import Callable

from gossamer.core.groups import listed
from gossamer.core.verbs import Among
from gossamer.fabrics.board import Board
from gossamer.fabrics.channel import Channel
from gossamer.fabrics.habits import Habits
from gossamer.fabrics.tickets import Tickets

Wait = Callable[[Callable[[], bool]], object]  # until something is ready


class Group:
    """Everybody, or those who were named. All of them ask the same of one another, in the same order; nobody else need know.

    So each group counts its own collectives, has its own habits, and compares on a board of its own.
    """

    def __init__(self, among: Among, lane: Board, fabric: Board) -> None:
        """`lane` is the board of the lane, and `fabric` that of all lanes: one may claim what another waits for."""
        self.among = among
        self.ranks = range(lane.size) if among is None else among
        self.board = lane if among is None else lane.among(among)
        self.tickets = Tickets((fabric if among is None else fabric.among(among)).under("tickets"))
        self.habits = Habits()
        self.collectives = self.before = 0  # in all, and of the program under way
        self.came_out = False  # of a collective after the last meeting, to which all had come
        self._posted = list[tuple[Board, str]]()  # keys of the last meeting, which others may still read
        self._channel: Channel | None = None

    @property
    def name(self) -> str:
        """What other ranks know it by; nothing for everybody."""
        return "" if self.among is None else listed(self.among)

    @property
    def channel(self) -> Channel:
        assert self._channel is not None, "a group is connected before it is used"
        return self._channel

    def connect(self, channel: Channel) -> None:
        self._channel = channel

    def meet(self, board: Board, key: str, text: str, wait: Wait) -> dict[int, str]:
        """Post a text and read everybody else's, by place in the group; fewer, if there is no more hope."""
        posts = board.meet(key, text, wait)
        if len(posts) == board.size - 1:
            self.clear()  # who has come here has read what was posted before
            self._posted.append((board, f"{key}/{board.rank}"))
            self.came_out = False
        return posts

    def clear(self) -> None:
        for board, key in self._posted:
            board.take_down(key)
        self._posted.clear()

    def tear(self) -> None:
        if self._channel is not None:
            self._channel.tear()

    def hang_up(self, patience: float) -> None:
        if self._channel is not None:
            self._channel.hang_up(patience)
