"""Layer 4: controllers, which change the recipe during training. One controller per file, one import line here."""

from gossamer.controllers.accordion import Accordion
from gossamer.controllers.accordion_batch import AccordionBatch
from gossamer.controllers.adacomm import AdaComm
from gossamer.controllers.adascale import AdaScale
from gossamer.controllers.auto import Auto
from gossamer.controllers.dqsgd import DQSGD
from gossamer.controllers.fixed import Fixed
from gossamer.controllers.noise_batch import NoiseBatch
from gossamer.controllers.switch_exchange import SwitchExchange

__all__ = [
    "DQSGD",
    "Accordion",
    "AccordionBatch",
    "AdaComm",
    "AdaScale",
    "Auto",
    "Fixed",
    "NoiseBatch",
    "SwitchExchange",
]
