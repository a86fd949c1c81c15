"""Build empty models and fill them: with tensors of a checkpoint, or with random weights.

Random weights are slices of one block of random numbers at different offsets: fast for billions of parameters, and
independent of the device and of which components are built.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import ModelMixin
from diffusers.models.model_loading_utils import _fetch_remapped_cls_from_config
from diffusers.models.modeling_utils import LegacyModelMixin
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from ..randomness import Purpose, derive_generator, derive_seed
from .stored_weights import StoredWeight

STORED_WEIGHT = "stored_weight_of_file"
"""The attribute of a layer without weight that has what the file stores; ``keep_stored_layers`` turns it into one."""
_NOISE_LENGTH = 4_194_301
"""Length of the block: a prime, so that no two rows of a matrix begin at the same offset."""


def build_empty_model(model_class: Any, config: Mapping[str, Any]) -> Any:
    """Build a diffusers or transformers model with parameters on the meta device and real buffers."""
    if issubclass(model_class, LegacyModelMixin):  # PixArt's published folders name the class of which it was a part
        model_class = _fetch_remapped_cls_from_config(config, model_class)  # type: ignore[no-untyped-call]
    with init_empty_weights(include_buffers=False), no_init_weights():  # initializing on meta takes most of the time
        if hasattr(model_class, "from_config"):  # a class of diffusers
            return model_class.from_config(dict(config)).eval()
        # Folders of T5Gemma have the configuration of the encoder inside of that of the whole model.
        own = config.get(getattr(model_class.config_class, "base_config_key", ""), config)
        model = model_class(model_class.config_class(**own)).eval()
    model.tie_weights()  # init_empty_weights unties them
    return model


def load_tensors(
    model: Any,
    tensors: Mapping[str, Tensor | StoredWeight],
    dtype: torch.dtype,
    device: torch.device | None,
    *,
    keeps_stored: bool = False,
) -> list[str]:
    """Load tensors into an empty model and return the names of missing weights; unexpected tensors are ignored.

    Weights that are stored quantized are dequantized; with ``keeps_stored`` those of layers in lists, as blocks are,
    are left empty, and their layers have what the file stores.

    Modules that diffusers keeps in float32 when it loads a folder are so here, too; ``from_single_file`` does that for
    float16 only.
    """
    own = model.state_dict()
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if isinstance(model, ModelMixin) else set()

    def choose_dtype(name: str, tensor: Tensor | StoredWeight) -> torch.dtype:
        if isinstance(tensor, Tensor) and not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if kept & {*name.split(".")} else dtype

    for name, tensor in tensors.items():
        if name in own and tensor.shape != own[name].shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} in the file and {list(own[name].shape)} in the model"
            )
    kept_layers = _keep_stored_weights(model, tensors, choose_dtype) if keeps_stored else set()
    # Parts of one tensor, of a file or of a fused layer, would share a count of changes, and an update of one of them
    # within the backward pass would be taken for one of all; ``data`` has its own.
    state_dict = {
        name: tensor.to(device=device, dtype=choose_dtype(name, tensor)).data
        for name, tensor in tensors.items()
        if name in own and name not in kept_layers
    }
    model.load_state_dict(state_dict, strict=False, assign=True)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    if device is not None and device.type != "meta":
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
    model.requires_grad_(True)
    if device is not None and device.type == "meta":
        return [name for name, _ in model.named_parameters() if name not in tensors]
    return [name for name, parameter in model.named_parameters() if parameter.is_meta and name not in kept_layers]


def _keep_stored_weights(
    model: Any,
    tensors: Mapping[str, Tensor | StoredWeight],
    choose_dtype: Callable[[str, Tensor | StoredWeight], torch.dtype],
) -> set[str]:
    """Give layers what the file stores of their weights, which stay empty; return the names of these weights."""
    kept = set()
    for name, stored in tensors.items():
        path, _, leaf = name.rpartition(".")
        if not isinstance(stored, StoredWeight) or leaf != "weight" or not any(map(str.isdigit, path.split("."))):
            continue
        try:
            layer = model.get_submodule(path)
        except AttributeError:  # what the file has more than the model
            continue
        if type(layer) in (nn.Linear, nn.Conv2d) and stored.saves_memory:
            empty = torch.empty(stored.shape, dtype=choose_dtype(name, stored), device="meta")
            layer.weight = nn.Parameter(empty, requires_grad=False)
            setattr(layer, STORED_WEIGHT, stored)
            kept.add(name)
    return kept


def build_random_component(
    component_class: Any,
    config: Mapping[str, Any],
    component: str,
    dtype: torch.dtype,
    device: torch.device | None,
    seed: int = 0,
) -> Any:
    """Build a component with random weights, directly in its dtype and on its device."""
    model = build_empty_model(component_class, config)
    generator = derive_generator(seed, Purpose.RANDOM_MODEL)
    noise = torch.randn(_NOISE_LENGTH, generator=generator).to(device=device, dtype=dtype)
    parameters: dict[int, nn.Parameter] = {}  # by the id of the empty parameter, so that tied weights stay tied
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in parameters:
            weight = torch.empty(parameter.shape, dtype=dtype, device=device)
            _fill_weight(weight, name, noise, derive_seed(seed, f"{component}/{name}"))
            parameters[id(parameter)] = nn.Parameter(weight)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameters[id(parameter)])
    cast_persistent_buffers(model, dtype, device)
    _reduce_vae_variance(model)
    return model


def cast_persistent_buffers(model: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Cast the buffers that a checkpoint has, as reading it would."""
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.to(device=device, dtype=dtype)


def _fill_weight(weight: Tensor, name: str, noise: Tensor, offset: int) -> None:
    """Initialize a weight: matrices preserve the variance of their input, norms are one and biases zero."""
    if weight.ndim < 2:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    scale = (weight.numel() / weight.shape[0]) ** -0.5
    flat, start, done = weight.view(-1), offset % _NOISE_LENGTH, 0
    while done < len(flat):
        count = min(_NOISE_LENGTH - start, len(flat) - done)
        torch.mul(noise[start : start + count], scale, out=flat[done : done + count])
        done, start = done + count, 0


@torch.no_grad()
def _reduce_vae_variance(model: nn.Module) -> None:
    """Set the bias of a VAE's log variance, which is near 0 in an untrained model: its noise would hide the image."""
    weights = dict(model.named_parameters())
    bias = weights.get("quant_conv.bias", weights.get("encoder.conv_out.bias"))
    if bias is not None:
        bias[len(bias) // 2 :] = -6
