"""The adapter of one module (LoRA, DoRA, LoHa, LoKr, OFT, BOFT), and the keys of its tensors in peft and in files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

TENSOR_NAMES: Mapping[str, tuple[str, ...]] = {
    "loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    "lokr": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    "oft": ("oft_R",),
    "boft": ("boft_R", "boft_s"),
}
"""Adapter types whose tensors have the same names in all formats."""

DOWN, UP, MAGNITUDE = "down", "up", "magnitude"
ALPHA = "alpha"
DORA_SCALE = "dora_scale"

PEFT_SUFFIXES = {
    DOWN: "lora_A.weight",
    UP: "lora_B.weight",
    MAGNITUDE: "lora_magnitude_vector.weight",
    "oft_R": "oft_R.weight",
}
"""Key suffixes in the model and in a state dict."""

KOHYA_SUFFIXES = {DOWN: "lora_down.weight", UP: "lora_up.weight", MAGNITUDE: DORA_SCALE}
COMFY_SUFFIXES = {DOWN: "lora_A.weight", UP: "lora_B.weight", MAGNITUDE: DORA_SCALE}
DIFFUSERS_SUFFIXES = {**PEFT_SUFFIXES, MAGNITUDE: "lora_magnitude_vector"}

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
"""Key suffix in any format -> tensor name."""


@dataclass(frozen=True)
class ModuleAdapter:
    """The adapter tensors of one module."""

    tensors: Mapping[str, Tensor]
    """``down``, ``up`` and, for DoRA, ``magnitude``; or the ``TENSOR_NAMES`` of another adapter type."""
    alpha: float
    """LoRA alpha: the adapter is scaled by alpha / rank."""

    @property
    def adapter_type(self) -> str:
        """lora, dora, loha, lokr, oft or boft."""
        for adapter_type, names in TENSOR_NAMES.items():
            if any(name in self.tensors for name in names):
                return adapter_type
        return "dora" if MAGNITUDE in self.tensors else "lora"

    @property
    def rank(self) -> int:
        """The divisor of alpha; 1 for a LoKr of two full matrices."""
        for name, axis in ((DOWN, 0), ("hada_w1_b", 0), ("lokr_w2_b", 0), ("lokr_w1_b", 0)):
            if name in self.tensors:
                return int(self.tensors[name].shape[axis])
        return 1

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input features of the module; zeros if the tensors do not tell."""
        tensors = self.tensors
        if self.adapter_type in ("lora", "dora"):
            return len(tensors[UP]), tensors[DOWN].shape[1]
        if self.adapter_type == "loha":
            return len(tensors["hada_w1_a"]), tensors["hada_w1_b"].shape[1]
        if self.adapter_type == "lokr":
            sizes = [
                tensors[name].shape[:2]
                if name in tensors
                else (len(tensors[f"{name}_a"]), tensors[f"{name}_b"].shape[1])
                for name in ("lokr_w1", "lokr_w2")
            ]
            return sizes[0][0] * sizes[1][0], sizes[0][1] * sizes[1][1]
        return 0, 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def parse_tensor_key(key: str) -> tuple[str, str] | None:
    """``a.b.lora_A.weight`` -> ``a.b`` and ``down``; None if the key is not of an adapter."""
    parts = key.split(".")
    for count in (3, 2, 1):
        suffix = ".".join(parts[-count:])
        if len(parts) > count and suffix in _SUFFIX_TO_TENSOR_NAME:
            return ".".join(parts[:-count]), _SUFFIX_TO_TENSOR_NAME[suffix]
    return None


def group_by_module(state_dict: Mapping[str, Tensor], alphas: Mapping[str, float]) -> dict[str, ModuleAdapter]:
    """Group a state dict by module; ``alphas`` are by module, too."""
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state_dict.items():
        parsed = parse_tensor_key(key)
        if parsed is None:
            raise ValueError(f"{key} is not a tensor of an adapter")
        groups.setdefault(parsed[0], {})[parsed[1]] = tensor
    return {module: ModuleAdapter(tensors, alphas[module]) for module, tensors in groups.items()}


def iter_named_tensors(
    module: str, adapter: ModuleAdapter, suffixes: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an adapter with their keys in a file or a state dict."""
    for name, tensor in adapter.tensors.items():
        yield f"{module}.{suffixes.get(name, name)}", tensor
