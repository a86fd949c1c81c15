"""Find the family that a configuration of another trainer means, by the names in ``TrainerNames``; no torch.

Some trainers have one name for models that are several families here, such as FLUX.2 dev and klein.  These are told
apart by the names of the model's files, and by control images, which only editing models take.
"""

import re
from collections.abc import Sequence
from typing import Literal

from .families import FAMILY_FACTS

TrainerId = Literal["ai_toolkit", "diffusion_pipe", "kohya_gui", "onetrainer", "simpletuner"]
"""A trainer, as the fields of ``TrainerNames`` call it."""


def list_names(trainer: TrainerId, family: str) -> tuple[str, ...]:
    """List the names of a family in a trainer."""
    names: tuple[str, ...] = getattr(FAMILY_FACTS[family].detection.trainer_names, trainer)
    return names


def list_trained_families(trainer: TrainerId) -> tuple[str, ...]:
    """List the families that a trainer has a name for."""
    return tuple(family for family in FAMILY_FACTS if list_names(trainer, family))


def find_families(trainer: TrainerId, name: str) -> tuple[str, ...]:
    """Return the families that a trainer calls by this name, in the order of the table of families."""
    return tuple(family for family in FAMILY_FACTS if name in list_names(trainer, family))


def choose_family(families: Sequence[str], files: str, has_control_images: bool = False) -> str:
    """Choose among the families of one name, by the names of the model's files and whether there are control images.

    The last match counts: a variant of a variant stands after it in the table.
    """
    patterns = {family: FAMILY_FACTS[family].detection.trainer_names.variant_pattern for family in families}
    matching = [family for family, text in patterns.items() if text and re.search(text, files.lower())]
    if matching:
        return matching[-1]
    editing = [family for family in families if FAMILY_FACTS[family].pipeline.kind == "edit"]
    if has_control_images and editing:
        return editing[0]
    return next((family for family in families if not patterns[family]), families[0])


def format_trained_titles(trainer: TrainerId) -> str:
    """Format the titles of the models that a trainer trains and that are here, for messages and docs."""
    return ", ".join(FAMILY_FACTS[family].title for family in list_trained_families(trainer))
