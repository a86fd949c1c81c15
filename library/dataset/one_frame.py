"""One-frame training of models of videos: which position each control image has, and which the picture that is made."""

import re
from dataclasses import dataclass, replace

MAX_POSITION = 1000
_FLAGS = ("default", "no_post", "no_2x", "no_4x")
_INDEX = re.compile(r"(target_index|control_index)=(\d+(?:;\d+)*)")


@dataclass(frozen=True)
class OneFrame:
    """Positions in latent frames, as musubi-tuner's ``one_frame_inference`` writes them."""

    target_index: int | None = None
    """The position of the picture; None is the last one of a section."""
    control_index: tuple[int, ...] = (0,)
    """The position of each control image."""
    has_post: bool = True
    """Whether an empty frame comes after a section."""
    has_2x: bool = True
    """Whether two empty frames that are compressed twofold come after that."""
    has_4x: bool = True
    """Whether sixteen empty frames that are compressed fourfold come after these."""

    def resolve_target(self, window: int) -> "OneFrame":
        """Set the position of the picture, in sections of ``window`` latent frames."""
        return replace(self, target_index=window if self.target_index is None else self.target_index)

    def format(self) -> str:
        """Format the settings as ``parse_one_frame`` reads them."""
        parts = {"no_post": self.has_post, "no_2x": self.has_2x, "no_4x": self.has_4x}
        found = [name for name, is_given in parts.items() if not is_given]
        found += [] if self.target_index is None else [f"target_index={self.target_index}"]
        return ",".join([*found, f"control_index={';'.join(map(str, self.control_index))}"])


def is_position(value: object) -> bool:
    """Whether a value is a position."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_POSITION


def is_list_of_positions(value: object) -> bool:
    """Whether a value is a list of some positions."""
    return isinstance(value, list) and bool(value) and all(map(is_position, value))


def parse_one_frame(text: str) -> OneFrame:
    """Parse settings such as ``no_2x,no_4x,target_index=1,control_index=0;10``; ``ValueError`` says what is wrong."""
    flags, indices = set[str](), dict[str, tuple[int, ...]]()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _INDEX.fullmatch(part)
        name = match[1] if match else part
        if not match and part not in _FLAGS:
            known = ", ".join((*_FLAGS, "target_index=N", "control_index=N;N"))
            raise ValueError(f"expected some of {known}, separated by commas, got {part!r}")
        if name in flags or name in indices:
            raise ValueError(f"{name} is set twice")
        if match is None:
            flags.add(part)
            continue
        indices[name] = tuple(map(int, match[2].split(";")))
        if max(indices[name]) > MAX_POSITION:
            raise ValueError(f"{name}: expected at most {MAX_POSITION}, got {max(indices[name])}")
    target = indices.get("target_index", (None,))
    if len(target) > 1:
        raise ValueError(f"target_index: expected one integer, got {len(target)}")
    return OneFrame(
        target[0],
        indices.get("control_index", (0,)),
        has_post="no_post" not in flags,
        has_2x="no_2x" not in flags,
        has_4x="no_4x" not in flags,
    )


def describe_window(size: int) -> tuple[str, str]:
    """Say of a dataset that its sections have another size than those of the run, and what to do."""
    text = f"sections of {size} latent frames are an option of the run, for all datasets"
    return text, f"remove it, and set --latent_window_size {size}"
