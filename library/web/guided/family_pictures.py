"""The picture of a model in the list: what it takes in, the shape of what it gives, and how large it is.

It is drawn from the facts of the family (``templates/model_picture.html``), so it shows nothing that is not known.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ...models.facts import FamilyFacts

WIDTH, HEIGHT = 132, 76
"""The size of the drawing, which is that on the screen in pixels."""

OUTPUT_LEFT, OUTPUT_HEIGHT, OUTPUT_WIDTH = 50, 46, 78
"""Where the output is drawn, and the space that it has."""

UNITS_PER_PIXEL = 42 / 1024
LEAST_SIDE = 9.0

LARGEST_PARAMETERS = 33e9
"""The number of parameters at which the bar is full."""

TEXTS: Mapping[tuple[bool, int], str] = {
    (False, 0): "From a text a picture of {0} pixels",
    (False, 1): "From a text and a picture a picture of {0} pixels",
    (True, 0): "From a text a video of {0} pixels",
    (True, 1): "From a text and a picture a video of {0} pixels",
    (True, 2): "From a text and two pictures a video of {0} pixels",
}
"""The words for each picture: whether a video comes out, and how many pictures go in."""

BILLION, MILLION = "{0} billion parameters", "{0} million parameters"


@dataclass(frozen=True)
class ModelPicture:
    """What the picture of a model shows."""

    is_video: bool
    num_inputs: int
    """The pictures that go in beside the text."""
    width: int
    """The width of what the model makes by default, in pixels."""
    height: int
    num_parameters: int = 0
    """0: not known, so no bar is drawn."""

    @property
    def text(self) -> str:
        return TEXTS[self.is_video, self.num_inputs]

    @property
    def size_text(self) -> str:
        return f"{self.width} × {self.height}"

    @property
    def output_box(self) -> tuple[float, float, float, float]:
        """Left, top, width and height of the output: to scale among the models as far as there is space."""
        width, height = self.width * UNITS_PER_PIXEL, self.height * UNITS_PER_PIXEL
        scale = min(1.0, OUTPUT_WIDTH / width, OUTPUT_HEIGHT / height)
        scale = max(scale, LEAST_SIDE / min(width, height))
        width, height = round(width * scale, 1), round(height * scale, 1)
        left = round(OUTPUT_LEFT + (OUTPUT_WIDTH - width) / 2, 1)
        return left, round(2 + (OUTPUT_HEIGHT - height) / 2, 1), width, height

    @property
    def bar_width(self) -> float:
        """The part of the bar that is filled, in units of the drawing."""
        return round((WIDTH - 8) * min(1.0, self.num_parameters / LARGEST_PARAMETERS), 1)


def build_picture(facts: FamilyFacts, num_parameters: int = 0) -> ModelPicture:
    """Build the picture of a family, of whose models this one has ``num_parameters``."""
    is_video = facts.pipeline.kind == "video"
    num_inputs = len(facts.sampling.frame_images) if is_video else int(facts.pipeline.kind == "edit")
    return ModelPicture(is_video, num_inputs, *facts.sampling.image_size, num_parameters)


def describe_parameters(num_parameters: int) -> tuple[str, str]:
    """Return the words for how large a model is, and the number to fill in; empty where it is not known."""
    if not num_parameters:
        return "", ""
    is_small = num_parameters < 0.5e9
    return (MILLION, _round(num_parameters / 1e6)) if is_small else (BILLION, _round(num_parameters / 1e9))


def _round(number: float) -> str:
    """Format a number with two digits, or all those before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.2g}"
