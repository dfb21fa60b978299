"""Floor 4: when. One schedule per file, one import line here."""

from gossamer.schedules.accelerated import Accelerated, Stage, stages
from gossamer.schedules.every_step import EveryStep
from gossamer.schedules.first import First
from gossamer.schedules.gossip import Gossip
from gossamer.schedules.inner_outer import InnerOuter
from gossamer.schedules.overlap_local_sgd import OverlapLocalSGD
from gossamer.schedules.resync import Resync
from gossamer.schedules.slowmo import LocalSGD, SlowMo

__all__ = [
    "Accelerated",
    "EveryStep",
    "First",
    "Gossip",
    "InnerOuter",
    "LocalSGD",
    "OverlapLocalSGD",
    "Resync",
    "SlowMo",
    "Stage",
    "stages",
]
