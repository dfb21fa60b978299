"""Schedules: when ranks exchange what (floor 4). Each file has one schedule, imported here by one line."""

from gossamer.schedules.accelerated import Accelerated, Stage, stages
from gossamer.schedules.backup_workers import BackupWorkers
from gossamer.schedules.bmuf import BMUF
from gossamer.schedules.by_speed import BySpeed
from gossamer.schedules.cocod import CoCoD
from gossamer.schedules.delayed import Delayed
from gossamer.schedules.des_loc import DESLOC
from gossamer.schedules.eager import Eager
from gossamer.schedules.easgd import EASGD
from gossamer.schedules.every_step import EveryStep
from gossamer.schedules.gossip import Gossip
from gossamer.schedules.guard import EDiTGuard
from gossamer.schedules.hierarchical import Hierarchical
from gossamer.schedules.inner_outer import InnerOuter
from gossamer.schedules.local_sgd import LocalSGD
from gossamer.schedules.lookahead import Lookahead
from gossamer.schedules.noloco import NoLoCo
from gossamer.schedules.on_arrival import OnArrival
from gossamer.schedules.overlap_local_sgd import OverlapLocalSGD
from gossamer.schedules.pairwise import Pairwise
from gossamer.schedules.post_local import PostLocal
from gossamer.schedules.quorum_rounds import QuorumRounds
from gossamer.schedules.resync import Resync
from gossamer.schedules.slowmo import SlowMo
from gossamer.schedules.sparta import SPARTA
from gossamer.schedules.streaming import Streaming
from gossamer.schedules.zero_one import ZeroOne

__all__ = [
    "BMUF",
    "DESLOC",
    "EASGD",
    "SPARTA",
    "Accelerated",
    "BackupWorkers",
    "BySpeed",
    "CoCoD",
    "Delayed",
    "EDiTGuard",
    "Eager",
    "EveryStep",
    "Gossip",
    "Hierarchical",
    "InnerOuter",
    "LocalSGD",
    "Lookahead",
    "NoLoCo",
    "OnArrival",
    "OverlapLocalSGD",
    "Pairwise",
    "PostLocal",
    "QuorumRounds",
    "Resync",
    "SlowMo",
    "Stage",
    "Streaming",
    "ZeroOne",
    "stages",
]
