"""Options by which one picture is worked on by several devices; part of ``schema.py``."""

import math
from dataclasses import dataclass
from typing import Literal

from .options import define_option
from .values import DeviceMap


@dataclass(frozen=True)
class ParallelConfig:
    """Models that do not fit on one device: the frozen model is cut, and adapters stay whole everywhere."""

    pp_size: int = define_option(
        1,
        "pipeline: so many devices have some of the blocks each; micro-batches go from one to the next",
        minimum=1,
    )
    tp_size: int = define_option(
        1, "tensor parallel: so many devices have a part of each layer, and exchange a sum in each half of a block",
        minimum=1,
    )  # fmt: skip
    cp_size: int = define_option(
        1, "context parallel: so many devices have a part of each picture, and exchange it in each attention",
        minimum=1,
    )  # fmt: skip
    pp_schedule: Literal["gpipe", "1f1b", "interleaved"] = define_option(
        "1f1b", "pp_size: in which order micro-batches run; interleaved gives each device two shorter stages"
    )
    device_map: DeviceMap | None = define_option(
        None, "one process with several devices: deal the blocks of the model out over them"
    )

    @property
    def model_parallel_sizes(self) -> dict[str, int]:
        """The options by which several devices work on one picture."""
        return {"pp_size": self.pp_size, "tp_size": self.tp_size, "cp_size": self.cp_size}

    @property
    def model_parallel_size(self) -> int:
        """So many devices work on one picture."""
        return math.prod(self.model_parallel_sizes.values())
