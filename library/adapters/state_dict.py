"""What is trained of one module: LoRA or DoRA, LoHa, LoKr, OFT, BOFT; and what peft and files call its tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

TENSOR_NAMES: Mapping[str, tuple[str, ...]] = {
    "loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    "lokr": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    "oft": ("oft_R",),
    "boft": ("boft_R", "boft_s"),
}
"""Kinds that are called the same everywhere, as far as they can be written at all."""


DOWN, UP, MAGNITUDE = "down", "up", "magnitude"


PEFT_SUFFIXES = {
    DOWN: "lora_A.weight",
    UP: "lora_B.weight",
    MAGNITUDE: "lora_magnitude_vector.weight",
    "oft_R": "oft_R.weight",
}
"""What a LoRA's tensors are called in a state, which is as in the model."""


KOHYA_SUFFIXES = {DOWN: "lora_down.weight", UP: "lora_up.weight", MAGNITUDE: "dora_scale"}


COMFY_SUFFIXES = {DOWN: "lora_A.weight", UP: "lora_B.weight", MAGNITUDE: "dora_scale"}


DIFFUSERS_SUFFIXES = {**PEFT_SUFFIXES, MAGNITUDE: "lora_magnitude_vector"}


ALPHA = "alpha"


_SUFFIX_TO_TENSOR_NAME: Mapping[str, str] = {
    **{end: name for ends in (PEFT_SUFFIXES, KOHYA_SUFFIXES, DIFFUSERS_SUFFIXES) for name, end in ends.items()},
    "lora_A.default.weight": DOWN,
    "lora_B.default.weight": UP,
    "lora.down.weight": DOWN,
    "lora.up.weight": UP,
    "lora_linear_layer.down.weight": DOWN,
    "lora_linear_layer.up.weight": UP,
    **{end: end for ends in TENSOR_NAMES.values() for end in ends},
    "oft_R.weight": "oft_R",
    ALPHA: ALPHA,
}
"""How a tensor's name may end -> what it is."""


@dataclass(frozen=True)
class ModuleUpdate:
    """What is added to one module, or done to it."""

    tensors: Mapping[str, Tensor]
    """``down``, ``up`` and, for DoRA, ``magnitude``; or the names of another kind."""
    alpha: float
    """The update is scaled by alpha / rank."""

    @property
    def adapter_type(self) -> str:
        """lora, dora, loha, lokr, oft or boft."""
        for kind, ends in TENSOR_NAMES.items():
            if any(end in self.tensors for end in ends):
                return kind
        return "dora" if MAGNITUDE in self.tensors else "lora"

    @property
    def rank(self) -> int:
        """What alpha is divided by; 1 for a LoKr of two full matrices, which has none."""
        for name, axis in ((DOWN, 0), ("hada_w1_b", 0), ("lokr_w2_b", 0), ("lokr_w1_b", 0)):
            if name in self.tensors:
                return int(self.tensors[name].shape[axis])
        return 1

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of the module; zeros where they cannot be told."""
        found = self.tensors
        if self.adapter_type in ("lora", "dora"):
            return len(found[UP]), found[DOWN].shape[1]
        if self.adapter_type == "loha":
            return len(found["hada_w1_a"]), found["hada_w1_b"].shape[1]
        if self.adapter_type == "lokr":
            sizes = [
                found[half].shape[:2] if half in found else (len(found[f"{half}_a"]), found[f"{half}_b"].shape[1])
                for half in ("lokr_w1", "lokr_w2")
            ]
            return sizes[0][0] * sizes[1][0], sizes[0][1] * sizes[1][1]
        return 0, 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def parse_tensor_key(key: str) -> tuple[str, str] | None:
    """``a.b.lora_A.weight`` -> ``a.b`` and ``down``; None for what is no tensor of an update."""
    pieces = key.split(".")
    for count in (3, 2, 1):
        end = ".".join(pieces[-count:])
        if len(pieces) > count and end in _SUFFIX_TO_TENSOR_NAME:
            return ".".join(pieces[:-count]), _SUFFIX_TO_TENSOR_NAME[end]
    return None


def group_updates(state_dict: Mapping[str, Tensor], alphas: Mapping[str, float]) -> dict[str, ModuleUpdate]:
    """The updates in a state by their modules' names, in its order; ``alphas`` by the same names."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state_dict.items():
        named = parse_tensor_key(key)
        if named is None:
            raise ValueError(f"{key} is no tensor of an adapter")
        found.setdefault(named[0], {})[named[1]] = tensor
    return {module: ModuleUpdate(tensors, alphas[module]) for module, tensors in found.items()}


def iter_named_tensors(module: str, update: ModuleUpdate, suffixes: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an update with their names in a file or a state."""
    for name, tensor in update.tensors.items():
        yield f"{module}.{suffixes.get(name, name)}", tensor
