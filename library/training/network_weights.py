"""LoRA files a run starts from: ``base_weights`` and ``training_adapter`` for the model, ``network_weights``."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import injection
from ..adapters.alpha_folding import change_alpha
from ..adapters.component_key_names import ComponentKeys
from ..adapters.file_reader import read_adapter_file
from ..adapters.fused_qkv import needs_scale_shift_swap
from ..adapters.injection import Adapter, KeptTensors
from ..adapters.kohya_diffusers_comfyui_keys import EMBEDDING_PREFIX, AdapterFileContents, convert_from_file_format
from ..adapters.merge import merge_adapter, merge_bias_adapter
from ..adapters.module_adapter import BIAS, DOWN, MAGNITUDE, PEFT_SUFFIXES, UP, ModuleAdapter, iter_named_tensors
from ..adapters.peft_types import RankAlpha
from ..adapters.validate_file import describe_origin, list_layer_shapes
from ..config.network_args import get_adapter_type, get_network_args
from ..config.schema import AdapterConfig
from ..errors import FileError, UserError
from ..models.base import Family
from ..models.collect_component_keys import collect_component_keys
from ..models.detect import DetectedModel
from ..models.loading import load_components_on_meta
from ..models.training_adapter import attach_training_adapter, inspect_training_adapter
from ..problems import Problem

logger = logging.getLogger(__name__)
UNMERGEABLE_TYPES = {"oft", "boft"}


@dataclass(frozen=True)
class InitialWeights:
    """The contents of the adapter files that a run starts with."""

    base_weights: Sequence[tuple[str, AdapterFileContents, float]] = ()
    """Name, content and multiplier of each file of ``base_weights``."""
    training_adapter: tuple[str, AdapterFileContents] | None = None
    """Name and content of the file of the training adapter."""
    network_weights: AdapterFileContents | None = None
    is_dim_from_weights: bool = False
    idle_layers: AdapterFileContents | None = None
    """The layers of network_weights that cannot change the image: they are not trained, but saved again."""
    independent_modules: frozenset[str] = field(default_factory=frozenset)
    """Parts of a fused layer that have a lora_A of their own in the file."""

    @property
    def rank_alphas(self) -> Mapping[str, RankAlpha] | None:
        """The rank and alpha of each module with ``dim_from_weights``."""
        if self.network_weights is None or not self.is_dim_from_weights:
            return None
        updates = self.network_weights.updates
        return {module: RankAlpha(each.rank, each.alpha, each.is_tucker) for module, each in updates.items()}


def has_initial_weights(adapter: AdapterConfig) -> bool:
    """Whether there are files to read."""
    return bool(adapter.base_weights or adapter.training_adapter or adapter.network_weights)


def read_initial_weights(
    adapter: AdapterConfig, family: Family, detected: DetectedModel, *, cached_components: Collection[str] = ()
) -> InitialWeights:
    """Read all files before the model is loaded; all problems are reported at once."""
    if not has_initial_weights(adapter):
        return InitialWeights()
    pipe, components, shapes = _load_layer_names(family, detected)
    problems: list[Problem] = []
    bases, weights = [], None
    multipliers = [*adapter.base_weights_multiplier, *[1.0] * len(adapter.base_weights)]
    for path, multiplier in zip(adapter.base_weights, multipliers, strict=False):
        content = _read_contents("base_weights", path, components, shapes, problems)
        if content is not None:
            problems += _inspect_base_file(path, content, pipe, cached_components)
            bases.append((Path(path).name, content, multiplier))
    training = None
    if adapter.training_adapter is not None:
        path = adapter.training_adapter
        content = _read_contents("training_adapter", path, components, shapes, problems)
        if content is not None:
            reasons = inspect_training_adapter(content, family.facts.denoiser_name)
            problems += [Problem("training_adapter", f"{path}: {reason}") for reason in reasons]
            training = Path(path).name, content
    idle, independent = None, frozenset[str]()
    if adapter.network_weights is not None:
        weights = _read_contents("network_weights", adapter.network_weights, components, shapes, problems)
        if weights is not None:
            weights, idle = split_idle_layers(weights, _list_idle_modules(family, pipe))
            problems += _inspect_network_file(adapter, weights, family)
            independent = frozenset(_find_independent_modules(weights, components))
            _log_notices(adapter, weights, idle)
    if problems:
        raise FileError(problems)
    return InitialWeights(
        base_weights=bases,
        training_adapter=training,
        network_weights=weights,
        is_dim_from_weights=adapter.dim_from_weights,
        idle_layers=idle,
        independent_modules=independent,
    )


def _load_layer_names(
    family: Family, detected: DetectedModel
) -> tuple[Any, list[ComponentKeys], Mapping[str, Sequence[int]]]:
    """Load the components that adapters change on the meta device: with their key names and the shapes of layers."""
    names = (family.facts.denoiser_name, *family.facts.lora.text_encoders)
    pipe = load_components_on_meta(detected, names)
    layers = ((f"{name}.{module}", each) for name in names for module, each in getattr(pipe, name).named_modules())
    return pipe, collect_component_keys(family, pipe), list_layer_shapes(layers)


class MergeableFileReader:
    """Reads adapter files that are to be merged into a model, before it is loaded or while it is."""

    def __init__(self, family: Family, detected: DetectedModel):
        self._pipe, self._components, self._shapes = _load_layer_names(family, detected)

    def read(self, path: Path) -> tuple[AdapterFileContents | None, list[Problem]]:
        """Return what a file contains, and the reasons why it cannot be merged."""
        problems: list[Problem] = []
        content = _read_contents("", str(path), self._components, self._shapes, problems)
        if content is not None:
            problems += (replace(each, option="") for each in _inspect_base_file(str(path), content, self._pipe, ()))
        return content, problems


def _read_contents(
    option: str,
    path: str,
    components: Sequence[ComponentKeys],
    shapes: Mapping[str, Sequence[int]],
    problems: list[Problem],
) -> AdapterFileContents | None:
    try:
        tensors, metadata = read_adapter_file(Path(path).expanduser())
    except UserError as error:  # which names the file
        problems.append(Problem(option, str(error)))
        return None
    try:
        content = convert_from_file_format(tensors, metadata, components, shapes)
    except UserError as error:
        problems.append(Problem(option, f"{path}: {error}"))
        return None
    if not content.alphas and not content.fused:
        problems.append(Problem(option, f"{path}: it has no LoRA layers{describe_origin(metadata)}"))
        return None
    return content


def _inspect_base_file(
    path: str, content: AdapterFileContents, pipe: Any, cached_components: Collection[str]
) -> Iterator[Problem]:
    encoders = sorted({module.partition(".")[0] for module in content.alphas} & set(cached_components))
    if encoders:
        yield Problem(
            "base_weights",
            f"{path}: changes {encoders[0]}, but cached text encoder outputs are encoded without it",
            "remove cache_text_encoder_outputs",
        )
    if rotations := {update.adapter_type for update in content.updates.values()} & UNMERGEABLE_TYPES:
        yield Problem(
            "base_weights",
            f"{path}: has type {'/'.join(sorted(rotations))}, which cannot be merged",
            "LoRA, DoRA, LoHa, LoKr, GLoRA, LyCORIS' OFT and norm layers can",
        )
    fused = {
        f"{each.component}.{module}": each.update
        for each in content.fused.values()
        for module in each.group.modules
        if module is not None
    }
    for name, update in {**content.updates, **fused}.items():
        part, _, module = name.partition(".")
        bias = next((each for each in ("b_norm", BIAS) if each in update.tensors), None)
        if bias is not None and getattr(getattr(pipe, part).get_submodule(module), "bias", None) is None:
            yield Problem("base_weights", f"{path}: {name} has {bias} in the file, but no bias in the model")
            break
    if content.embeddings:
        logger.warning("base_weights: %s: %d bundled embeddings are not used", path, len(content.embeddings))


def _inspect_network_file(adapter: AdapterConfig, content: AdapterFileContents, family: Family) -> Iterator[Problem]:
    """Yield the reasons why an adapter cannot be trained further."""
    option, start = "network_weights", f"{adapter.network_weights}:"
    updates, own_type = content.updates, get_adapter_type(adapter)
    types = {update.adapter_type for update in updates.values()}
    if untrainable := sorted({each.title for each in updates.values() if not each.is_trainable}):
        yield Problem(
            option,
            f"{start} has layers of type {' and '.join(untrainable)}, which can be merged"
            " (--base_weights) but not trained",
        )
    elif content.fused:
        name, fused = next(iter(content.fused.items()))
        yield Problem(option, f"{start} {name}: {fused.reason}", "it can be merged (--base_weights) but not trained")
    elif types != {own_type}:
        found = "/".join(sorted(types)) or "no layer that has an effect"
        yield Problem(
            option, f"{start} has type {found}, but this run trains {own_type}", "change network_module or network_args"
        )
    elif not adapter.dim_from_weights and any(update.is_tucker for update in updates.values()):
        yield Problem(option, f"{start} has Tucker layers", "add dim_from_weights")
    encoders = sorted({module.partition(".")[0] for module in updates} - {family.facts.denoiser_name})
    if encoders and not adapter.trains_text_encoders:
        yield Problem(
            option,
            f"{start} has layers of {', '.join(encoders)}, which this run does not train",
            "remove network_train_unet_only, or use --base_weights",
        )
    elif (t5 := family.facts.text.t5_encoder) in encoders and not get_network_args(adapter).train_t5xxl:
        yield Problem(option, f"{start} has layers of {t5} (T5)", 'add network_args = ["train_t5xxl=True"]')
    denoiser = family.facts.denoiser_name
    if not adapter.trains_denoiser and any(module.startswith(f"{denoiser}.") for module in updates):
        yield Problem(option, f"{start} has layers of {denoiser}", "remove network_train_text_encoder_only")


def _list_idle_modules(family: Family, pipe: Any) -> list[str]:
    """The modules that get no gradient, since the model discards their output."""
    denoiser = family.facts.denoiser_name
    idle = [f"{denoiser}.{name}" for name in family.get_unused_layers(getattr(pipe, denoiser))]
    encoders = [(part, getattr(pipe, part, None)) for part in family.facts.lora.text_encoders]
    for part, encoder in encoders:
        if isinstance(encoder, nn.Module):  # else its outputs are cached
            idle += [f"{part}.{module}" for module in family.get_unused_text_layers(encoder, part)]
    return idle


def split_idle_layers(
    content: AdapterFileContents, modules: Iterable[str]
) -> tuple[AdapterFileContents, AdapterFileContents | None]:
    """Separate the layers of a file that are idle in this model, such as those that other trainers write."""
    idle = {module for module in modules if module in content.alphas}
    if not idle:
        return content, None
    prefixes = tuple(f"{module}." for module in idle)

    def select(is_idle: bool) -> AdapterFileContents:
        return replace(
            content,
            state_dict={key: each for key, each in content.state_dict.items() if key.startswith(prefixes) == is_idle},
            alphas={module: alpha for module, alpha in content.alphas.items() if (module in idle) == is_idle},
        )

    return select(False), select(True)


def _find_independent_modules(content: AdapterFileContents, components: Sequence[ComponentKeys]) -> Iterator[str]:
    """The parts of fused layers whose lora_A differ, as diffusers and ai-toolkit train them."""
    updates = content.updates
    for part in components:
        if not (key_map := part.get_key_map()).layout:
            continue
        for group in key_map.group_modules(key_map.filter_known_modules(part.modules)):
            names = [f"{part.name}.{module}" for module in group.modules if module is not None]
            found = [updates[name] for name in names if name in updates and DOWN in updates[name].tensors]
            if not all(_shares_lora_a(each, found[0]) for each in found):
                yield from names


def _shares_lora_a(one: ModuleAdapter, other: ModuleAdapter) -> bool:
    return one.alpha == other.alpha and torch.equal(one.tensors[DOWN], other.tensors[DOWN])


def _log_notices(adapter: AdapterConfig, content: AdapterFileContents, idle: AdapterFileContents | None) -> None:
    if idle is not None:
        logger.info(
            "network_weights: %s: %d layers have no effect in this model, for example %s; they are kept unchanged",
            Path(adapter.network_weights or "").name,
            len(idle.alphas),
            next(iter(idle.alphas)),
        )
    if content.num_tucker:
        logger.info("network_weights: %d Tucker modules are trained as LoRA of the same effect", content.num_tucker)
    trained = f"{EMBEDDING_PREFIX}{adapter.token_string}."  # its vectors start from these (token_embeddings.py)
    if others := [key for key in content.embeddings if not key.startswith(trained)]:
        logger.warning(
            "network_weights: %d bundled embeddings are not used and not trained; kohya and comfy files keep them",
            len(others),
        )


def merge_base_weights(pipe: Any, initial_weights: InitialWeights) -> None:
    """Merge ``base_weights`` into the loaded components."""
    for name, content, multiplier in initial_weights.base_weights:
        count = merge_adapter_file(pipe, content, multiplier)
        logger.info("base_weights: merged %s: %d modules, multiplier %g", name, count, multiplier)


def merge_adapter_file(pipe: Any, content: AdapterFileContents, multiplier: float) -> int:
    """Merge the contents of a file into the loaded components; return the number of its modules."""
    updates = content.updates
    for path, update in updates.items():
        part, _, module = path.partition(".")
        layer: Any = getattr(pipe, part).get_submodule(module)
        merge_adapter(layer.weight, update, multiplier)
        merge_bias_adapter(getattr(layer, "bias", None), update, multiplier)
    _merge_fused_adapters(pipe, content, multiplier)
    return len(updates) + len(content.fused)


@torch.no_grad()
def _merge_fused_adapters(pipe: Any, content: AdapterFileContents, multiplier: float) -> None:
    """Merge updates of fused layers into the weights of their parts together, in the original order."""
    for fused in content.fused.values():
        component = getattr(pipe, fused.component)
        layers = [component.get_submodule(module) for module in fused.group.modules if module is not None]
        weights = [layer.weight for layer in layers]
        rows = torch.cat(weights)
        swaps = needs_scale_shift_swap(fused.update, fused.group.original)
        rows = torch.cat(rows.chunk(2)[::-1]) if swaps else rows
        merge_adapter(rows, fused.update, multiplier)
        rows = torch.cat(rows.chunk(2)[::-1]) if swaps else rows
        start = 0
        for weight in weights:
            weight.copy_(rows[start : start + len(weight)])
            start += len(weight)
        if BIAS in fused.update.tensors:
            change = fused.update.tensors[BIAS]
            change = torch.cat(change.chunk(2)[::-1]) if swaps else change
            for layer, own in zip(layers, torch.split(change, [len(weight) for weight in weights]), strict=True):
                merge_bias_adapter(layer.bias, ModuleAdapter({BIAS: own}, 1.0), multiplier)


def add_training_adapter(pipe: Any, family: Family, initial_weights: InitialWeights) -> None:
    """Attach ``training_adapter`` to the loaded denoiser."""
    if initial_weights.training_adapter is None:
        return
    name, content = initial_weights.training_adapter
    prefix = f"{family.facts.denoiser_name}."
    updates = {path.removeprefix(prefix): update for path, update in content.updates.items()}
    attach_training_adapter(getattr(pipe, family.facts.denoiser_name), updates)
    logger.info("training_adapter: %s: %d modules; previews and the LoRA are without it", name, len(updates))


def load_network_weights(model: nn.Module, adapter: Adapter, initial_weights: InitialWeights) -> None:
    """Load ``network_weights`` into the adapter; modules that the file lacks keep their usual initialization."""
    content = initial_weights.network_weights
    if content is None:
        return
    updates = content.updates
    problems = [
        Problem("network_weights", f"the file has {module}, which these settings do not train", "add dim_from_weights")
        for module in updates
        if module not in adapter.rank_alphas
    ]
    for module, update in updates.items():
        own = adapter.rank_alphas.get(module)
        if own is not None and own.rank != update.rank:
            problems.append(
                Problem(
                    "network_weights",
                    f"{module} has rank {update.rank} in the file and {own.rank} in this run",
                    "add dim_from_weights, or change network_dim",
                )
            )
    if problems:
        more = [Problem("", f"... and {len(problems) - 3} more")] if len(problems) > 3 else []
        raise FileError([*problems[:3], *more])
    state_dict = injection.get_adapter_state_dict(model)
    for module, update in updates.items():
        rescaled = change_alpha(update, adapter.rank_alphas[module].alpha)
        for key, tensor in iter_named_tensors(module, rescaled, PEFT_SUFFIXES):
            own_tensor = state_dict.get(key)
            # A linear layer's LoRA fits a 1x1 convolution.
            has_same_size = own_tensor is not None and own_tensor.squeeze().shape == tensor.squeeze().shape
            state_dict[key] = tensor.view(own_tensor.shape) if own_tensor is not None and has_same_size else tensor
    try:
        injection.load_adapter_state_dict(model, state_dict)
    except ValueError as error:
        raise UserError(Problem("network_weights", f"cannot be loaded: {error}")) from None
    logger.info("network_weights: loaded %d of %d modules", len(updates), len(adapter.rank_alphas))


def keep_idle_layers(adapter: Adapter, initial_weights: InitialWeights, components: Sequence[ComponentKeys]) -> Adapter:
    """Add what the files of the run have to contain, although it is not trained."""
    idle, content = initial_weights.idle_layers, initial_weights.network_weights
    if content is None or (idle is None and not content.embeddings):
        return adapter
    updates = {} if idle is None else idle.updates
    siblings = _find_siblings(adapter, updates, components, initial_weights.independent_modules)
    for name, sibling in siblings.items():
        updates[name] = change_alpha(updates[name], adapter.rank_alphas[sibling].alpha)
    state: dict[str, Tensor] = {}
    for name, update in updates.items():
        state |= iter_named_tensors(name, update, PEFT_SUFFIXES)
    alphas = {name: update.alpha for name, update in updates.items()}
    return replace(adapter, kept=KeptTensors(state, alphas, siblings, content.embeddings))


def _find_siblings(
    adapter: Adapter, names: Collection[str], components: Sequence[ComponentKeys], independent: Collection[str]
) -> dict[str, str]:
    """Map the layers that are parts of a fused one with trained parts to the first of these."""
    siblings: dict[str, str] = {}
    for part in components:
        key_map = part.get_key_map()
        for group in key_map.group_modules(key_map.filter_known_modules(part.modules)) if key_map.layout else []:
            parts = [f"{part.name}.{module}" for module in group.modules]
            trained = next((name for name in parts if name in adapter.rank_alphas), None)
            if trained is not None and not any(name in independent for name in parts):
                siblings |= {name: trained for name in parts if name in names}
    return siblings


def keep_magnitudes(adapter: Adapter, family: Family, pipe: Any) -> Adapter:
    """Add to a DoRA the idle parts of fused layers, with the magnitudes that their weights have without it.

    A fused layer has one column of magnitudes for all of its parts.
    """
    if adapter.adapter_type != "dora":
        return adapter
    idle = [name for name in _list_idle_modules(family, pipe) if name not in adapter.kept.alphas]
    siblings = _find_siblings(adapter, idle, collect_component_keys(family, pipe), ())
    state, alphas = dict(adapter.kept.state_dict), dict(adapter.kept.alphas)
    for name, sibling in siblings.items():
        component, _, module = name.partition(".")
        rows: Tensor = getattr(pipe, component).get_submodule(module).weight.detach().float().flatten(1)
        size = adapter.rank_alphas[sibling]
        tensors = {
            DOWN: rows.new_zeros(size.rank, rows.shape[1]),
            UP: rows.new_zeros(len(rows), size.rank),
            MAGNITUDE: torch.linalg.vector_norm(rows, dim=1),
        }
        state |= iter_named_tensors(name, ModuleAdapter(tensors, size.alpha), PEFT_SUFFIXES)
        alphas[name] = size.alpha
    kept = replace(adapter.kept, state_dict=state, alphas=alphas, only_fused=siblings.keys())
    return replace(adapter, kept=replace(kept, siblings={**kept.siblings, **siblings}))
