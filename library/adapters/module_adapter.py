"""The adapter of one module (LoRA, DoRA, LoHa, LoKr, OFT ...): its update, its tensors and their keys in files.

The forward of a trained layer is peft's, or that of ``parallel.lora_linear`` in half precision.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

TENSOR_NAMES: Mapping[str, tuple[str, ...]] = {
    "loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    "lokr": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    "oft": ("oft_R",),
    "boft": ("boft_R", "boft_s"),
    "glora": ("a1", "a2", "b1", "b2", "bm"),
    "diag-oft": ("oft_blocks", "rescale"),
    "norm": ("w_norm", "b_norm"),
    "full": ("diff", "diff_b"),
}
"""Adapter types whose tensors have the same names in all formats; the last four are LyCORIS'."""

TRAINABLE_TYPES = ("lora", "dora", "loha", "lokr", "oft", "boft")
"""The adapter types that peft computes; files of the others can be merged and converted."""

DOWN, UP, MAGNITUDE = "down", "up", "magnitude"
INPUT_MAGNITUDE = "input_magnitude"
"""The magnitudes of a DoRA that has one for each input instead of each output (``wd_on_output=False``)."""
MID = "mid"
"""The core of a Tucker LoRA of a convolution, which is multiplied into ``down`` when a file is read."""
BIAS = "diff_b"
"""What an update of any type adds to the bias of its layer, without alpha; alone it is of type ``full``."""
ALPHA = "alpha"
DORA_SCALE = "dora_scale"

_GLORA_SUFFIXES = {name: f"{name}.weight" for name in TENSOR_NAMES["glora"]}

PEFT_SUFFIXES = {
    DOWN: "lora_A.weight",
    UP: "lora_B.weight",
    MAGNITUDE: "lora_magnitude_vector.weight",
    "oft_R": "oft_R.weight",
    **_GLORA_SUFFIXES,
}
"""Suffixes of the keys of each tensor in peft's models and state dicts."""

_MAGNITUDE_SUFFIXES = {MAGNITUDE: DORA_SCALE, INPUT_MAGNITUDE: DORA_SCALE}
KOHYA_SUFFIXES = {DOWN: "lora_down.weight", UP: "lora_up.weight", **_MAGNITUDE_SUFFIXES, **_GLORA_SUFFIXES}
COMFY_SUFFIXES = {DOWN: "lora_A.weight", UP: "lora_B.weight", **_MAGNITUDE_SUFFIXES, **_GLORA_SUFFIXES}
DIFFUSERS_SUFFIXES = {**PEFT_SUFFIXES, MAGNITUDE: "lora_magnitude_vector"}

_SUFFIX_TO_TENSOR_NAME: Mapping[str, str] = {
    **{end: name for ends in (PEFT_SUFFIXES, KOHYA_SUFFIXES, DIFFUSERS_SUFFIXES) for name, end in ends.items()},
    DORA_SCALE: MAGNITUDE,
    INPUT_MAGNITUDE: INPUT_MAGNITUDE,
    "lora_A.default.weight": DOWN,
    "lora_B.default.weight": UP,
    "lora.down.weight": DOWN,
    "lora.up.weight": UP,
    "lora_linear_layer.down.weight": DOWN,
    "lora_linear_layer.up.weight": UP,
    "lora_mid.weight": MID,
    **{end: end for kind, ends in TENSOR_NAMES.items() if kind != "glora" for end in ends},
    "oft_R.weight": "oft_R",
    ALPHA: ALPHA,
}
"""The tensor name for each key suffix of any format."""


@dataclass(frozen=True)
class ModuleAdapter:
    """The adapter tensors of one module."""

    tensors: Mapping[str, Tensor]
    """``down``, ``up`` and, for DoRA, ``magnitude``; or the ``TENSOR_NAMES`` of another adapter type."""
    alpha: float
    """LoRA alpha: the adapter is scaled by alpha / rank."""

    @property
    def adapter_type(self) -> str:
        """lora, dora, input-dora (one magnitude for each input), or one of ``TENSOR_NAMES``."""
        is_lora = DOWN in self.tensors or UP in self.tensors
        for adapter_type, names in TENSOR_NAMES.items():
            if any(name in self.tensors for name in names if name != BIAS or not is_lora):
                return adapter_type
        if INPUT_MAGNITUDE in self.tensors:
            return "input-dora"
        return "dora" if MAGNITUDE in self.tensors else "lora"

    @property
    def has_magnitudes(self) -> bool:
        """Whether it is a DoRA, or a LoHa or LoKr with magnitudes."""
        return MAGNITUDE in self.tensors or INPUT_MAGNITUDE in self.tensors

    @property
    def title(self) -> str:
        """The adapter type in messages."""
        if BIAS in self.tensors and self.adapter_type != "full":
            without = {name: tensor for name, tensor in self.tensors.items() if name != BIAS}
            return f"{ModuleAdapter(without, self.alpha).title} with a bias (diff_b)"
        if INPUT_MAGNITUDE in self.tensors:
            name = "dora" if self.adapter_type == "input-dora" else self.adapter_type
            return f"{name} with a dora_scale per input"
        if self.adapter_type in ("loha", "lokr") and MAGNITUDE in self.tensors:
            return f"{self.adapter_type} with dora_scale"
        return f"tucker {self.adapter_type}" if self.is_tucker else self.adapter_type

    @property
    def is_tucker(self) -> bool:
        """Whether a LoHa or LoKr of a convolution has a core."""
        return "hada_t1" in self.tensors or "lokr_t2" in self.tensors

    @property
    def is_trainable(self) -> bool:
        """Whether peft has this type."""
        has_more = BIAS in self.tensors or (self.has_magnitudes and self.adapter_type != "dora")
        return self.adapter_type in TRAINABLE_TYPES and not has_more

    @property
    def rank(self) -> int:
        """The divisor of alpha; 1 for a LoKr of two full matrices, and for types without rank."""
        for name, axis in ((DOWN, 0), ("hada_w1_b", 0), ("lokr_w2_b", 0), ("lokr_w1_b", 0), ("a2", 0)):
            if name in self.tensors:
                return int(self.tensors[name].shape[axis])
        return 1

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs of the module, and weights for each; zeros if the tensors do not tell."""
        tensors = self.tensors
        match self.adapter_type:
            case "lora" | "dora" | "input-dora":
                return len(tensors[UP]), tensors[DOWN][0].numel() * math.prod(self.kernel if MID in tensors else ())
            case "loha":
                return self._get_factor_shape("hada_w1", "hada_t1")
            case "lokr":
                (rows, columns), (inner_rows, inner_columns) = (
                    self._get_factor_shape("lokr_w1", ""),
                    self._get_factor_shape("lokr_w2", "lokr_t2"),
                )
                return rows * inner_rows, columns * inner_columns
            case "glora":
                kernel = tensors["bm"].shape[2:] if "bm" in tensors else ()
                return len(tensors["b1"]), tensors["b2"][0].numel() * math.prod(kernel)
            case "full" if "diff" in tensors:
                return len(tensors["diff"]), tensors["diff"][0].numel()
            case "norm" if "w_norm" in tensors:
                return len(tensors["w_norm"]), 1
        return 0, 0

    @property
    def kernel(self) -> tuple[int, ...]:
        """The kernel of a LoRA of a convolution, or of a linear layer stored as 1x1; otherwise empty."""
        return tuple(self.tensors[MID if MID in self.tensors else DOWN].shape[2:]) if DOWN in self.tensors else ()

    def _get_factor_shape(self, name: str, core: str) -> tuple[int, int]:
        """The shape of a factor that is full, decomposed, or a Tucker decomposition."""
        if name in self.tensors:
            return len(self.tensors[name]), self.tensors[name][0].numel()
        first, second = self.tensors[f"{name}_a"], self.tensors[f"{name}_b"]
        if core in self.tensors:
            return first.shape[1], second.shape[1] * math.prod(self.tensors[core].shape[2:])
        return len(first), second[0].numel()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def parse_tensor_key(key: str) -> tuple[str, str] | None:
    """Split ``a.b.lora_A.weight`` into ``a.b`` and ``down``; return None if the key is not of an adapter."""
    parts = _upgrade_diffusers_key(key).split(".")
    for count in (3, 2, 1):
        suffix = ".".join(parts[-count:])
        if len(parts) > count and suffix in _SUFFIX_TO_TENSOR_NAME:
            return ".".join(parts[:-count]), _SUFFIX_TO_TENSOR_NAME[suffix]
    return None


def parse_tensor(key: str, tensor: Tensor) -> tuple[str, str] | None:
    """Do as ``parse_tensor_key``, and tell by its shape for which axis a ``dora_scale`` has magnitudes.

    LyCORIS and OneTrainer write it as one column for the outputs, or as one row for the inputs.
    """
    parsed = parse_tensor_key(key)
    if parsed is None or parsed[1] != MAGNITUDE or not key.endswith(f".{DORA_SCALE}"):
        return parsed
    is_row = tensor.dim() > 1 and tensor.shape[0] == 1 and tensor.numel() == tensor.shape[1] > 1
    return (parsed[0], INPUT_MAGNITUDE) if is_row else parsed


_LEGACY_ATTENTION_KEY = re.compile(r"\.to_(q|k|v|out)_lora\.")
_XLABS_KEY = re.compile(r"\.(qkv|proj)_lora([12]?)\.(down|up)\.weight$")


def _upgrade_diffusers_key(key: str) -> str:
    """Convert a key of older diffusers versions, or of XLabs, to that of newer ones."""
    if ".processor." not in key and "_lora." not in key:
        return key
    key = _XLABS_KEY.sub(r".\1_lora\2.lora.\3.weight", key.replace(".processor.", "."))
    names = {"q": "to_q", "k": "to_k", "v": "to_v", "out": "to_out.0"}
    if ".self_attn." in key:
        names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
    return _LEGACY_ATTENTION_KEY.sub(lambda match: f".{names[match[1]]}.lora.", key)


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
