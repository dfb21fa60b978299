"""The contract of each kind of part. Every contract ends with its law, which `tests/laws` checks."""

from gossamer.core.contracts.codec import AsItsCodec, Biased, Codec, Levelled, LinearCodec
from gossamer.core.contracts.context import Context, Policy, ReduceResult, Unit
from gossamer.core.contracts.controller import Controller, Facts, ParamGroup
from gossamer.core.contracts.exchange import CodecExchange, Exchange, LosslessExchange
from gossamer.core.contracts.memory import ARREARS, UNBALANCED, Memory, Sender
from gossamer.core.contracts.mixer import Mixer
from gossamer.core.contracts.times import CandidateCost, RankTimes, TimesDue
from gossamer.core.contracts.update import StepsApart, Update
from gossamer.core.topology import Peers, Topology

__all__ = [
    "ARREARS",
    "UNBALANCED",
    "AsItsCodec",
    "Biased",
    "CandidateCost",
    "Codec",
    "CodecExchange",
    "Context",
    "Controller",
    "Exchange",
    "Facts",
    "Levelled",
    "LinearCodec",
    "LosslessExchange",
    "Memory",
    "Mixer",
    "ParamGroup",
    "Peers",
    "Policy",
    "RankTimes",
    "ReduceResult",
    "Sender",
    "StepsApart",
    "TimesDue",
    "Topology",
    "Unit",
    "Update",
]
