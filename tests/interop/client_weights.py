"""A model's weights under a client's names, the way back, and a tree of modules of these names and class names.

Writing a model for a client only renames, concatenates and swaps.  So the places of all elements can be traced once,
and a client's merged weights put back into the diffusers model, whose output is then compared.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class ClientLayout:
    """Where each element of one component is in a client's weights."""

    positions: Mapping[str, Tensor]

    @classmethod
    @torch.no_grad()
    def trace(cls, model: nn.Module, write: Callable[[nn.Module], Mapping[str, Tensor]]) -> "ClientLayout":
        """``write`` returns the weights of a model under the client's names."""
        traced, first = copy.deepcopy(model), 0
        places: dict[int, Tensor] = {}
        for tensor in _list_tensors(traced):
            count = tensor.numel()
            places[tensor.data_ptr()] = torch.arange(first, first + count, dtype=torch.int32).view(tensor.shape)
            first += count
        for module in traced.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module._parameters[name] = nn.Parameter(places[parameter.data_ptr()], requires_grad=False)
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.data_ptr() in places:
                    module._buffers[name] = places[buffer.data_ptr()]
        return cls({name: tensor for name, tensor in write(traced).items() if tensor.dtype == torch.int32})

    def export_weights(self, model: nn.Module) -> dict[str, Tensor]:
        flat = torch.cat([tensor.detach().flatten() for tensor in _list_tensors(model)])
        return {name: flat[position] for name, position in self.positions.items()}

    @torch.no_grad()
    def import_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        tensors = _list_tensors(model)
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        for name, position in self.positions.items():
            flat[position.flatten()] = weights[name].to(flat).flatten()
        for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def _list_tensors(model: nn.Module) -> list[Tensor]:
    """The weights, tied ones once."""
    tensors = {tensor.data_ptr(): tensor for tensor in model.state_dict().values() if tensor.is_floating_point()}
    return list(tensors.values())


def build_module_tree(weights: Mapping[str, Tensor], class_names: Mapping[str, str] | None = None) -> Any:
    """Modules with these weights: linear layers and convolutions, inside containers of the given class names."""
    root: Any = nn.Module()
    for name, tensor in weights.items():
        path, _, end = name.rpartition(".")
        module = root
        parts = path.split(".") if path else []
        for number, part in enumerate(parts):
            if part not in module._modules:
                here = ".".join(parts[: number + 1])
                matrix = weights.get(f"{here}.weight")
                module.add_module(part, _build_module(matrix, (class_names or {}).get(here, "Module"), weights, here))
            module = module._modules[part]
        module.register_parameter(end, nn.Parameter(tensor.clone(), requires_grad=False))
    return root


def _build_module(weight: Tensor | None, class_name: str, weights: Mapping[str, Tensor], path: str) -> nn.Module:
    if weight is not None and weight.dim() in (2, 4) and not path.endswith(("embedding", "shared", "embed_tokens")):
        has_bias = f"{path}.bias" in weights
        if weight.dim() == 2:
            return nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias)
        sizes = tuple(weight.shape[2:])
        return nn.Conv2d(weight.shape[1], weight.shape[0], sizes, padding=sizes[0] // 2, bias=has_bias)
    return type(class_name, (nn.Module,), {})()


@dataclass(frozen=True)
class ClientCase:
    """A LoRA file and the model it is for, as a client's process reads them."""

    folder: Path
    family: str
    facts: Mapping[str, Any]
    """What else the client has to know about the model."""

    def read_weights(self, client: str) -> dict[str, dict[str, Tensor]]:
        """By part (``denoiser``, ``text_encoder``), under the client's names."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in load_file(self.folder / f"{client}.safetensors").items():
            part, _, key = name.partition("|")
            found.setdefault(part, {})[key] = tensor
        return dict(sorted(found.items()))

    def list_files(self) -> list[Path]:
        return sorted((self.folder / "files").glob("*.safetensors"))

    def write_result(self, client: str, file: Path, parts: Mapping[str, Mapping[str, Tensor]], unread: int) -> None:
        merged = {
            f"{part}|{key}": each.contiguous() for part, each_part in parts.items() for key, each in each_part.items()
        }
        save_file(merged, self.folder / "results" / f"{client}-{file.name}")
        (self.folder / "results" / f"{client}-{file.name}.json").write_text(json.dumps({"unread": unread}))

    def write_error(self, client: str, file: Path, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        (self.folder / "results" / f"{client}-{file.name}.json").write_text(json.dumps({"error": text}))


def read_cases(root: str) -> list[ClientCase]:
    return [
        ClientCase(path.parent, path.parent.name.partition(" ")[0], json.loads(path.read_text()))
        for path in sorted(Path(root).glob("*/facts.json"))
    ]
