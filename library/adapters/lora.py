"""Adapters put into the parts of a pipeline, found again in them, read out and back in.

A state is a dict of tensors named by peft, without the adapter's own name, behind the part of the pipeline:
``<part>.<module>.lora_A.weight`` (rank, in) and ``<part>.<module>.lora_B.weight`` (out, rank), with two more
dimensions where the module is a convolution; other kinds have other tensors.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, equal, nn

from ..config.network_args import LORAS, arguments_of, kind_of
from ..config.schema import AdapterConfig
from ..errors import ConfigError
from .keys import clean
from .kinds import MARKS, Size, put_in, unfit
from .layouts import LAYOUTS, Group, groups
from .sites import Part, Site, matching, sites_of
from .sizing import sizes_of

__all__ = [
    "Adapter", "Part", "Site", "Size", "State", "inject", "load_state", "matching", "module_of", "parameters", "put",
    "state",
]  # fmt: skip

State = dict[str, Tensor]


@dataclass(frozen=True)
class Adapter:
    """What was put into the parts of a pipeline."""

    kind: str
    """lora, dora, loha, lokr, oft or boft."""
    rank: int
    alpha: float
    """These two hold where nothing else was asked for."""
    sizes: Mapping[str, Size]
    """Of each module, named as in a state, in the models' own order."""
    sites: tuple[Site, ...]
    """The modules of ``sizes``, and what they are."""

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def alphas(self) -> dict[str, float]:
        """Of each module, named as in a state."""
        return {name: size.alpha for name, size in self.sizes.items()}


def put(
    parts: Sequence[Part], config: AdapterConfig, seed: int, family: str = "",
    given: Mapping[str, Size] | None = None,
) -> Adapter:  # fmt: skip
    """Freeze all parts and give an adapter to those of their sites that are to have one, or that are ``given``.

    Modules that are one in the original model share their down matrix, as when sd-scripts trains them.  The start is
    a function of the seed and the module's name, so that every process makes the same one; the update is zero.  The
    new weights are float32 whatever the model is.
    """
    kind = kind_of(config)
    if given is None:
        sites, wanted = chosen(parts, config, family)
    else:
        sites = [site for part in parts for site in sites_of(part)]
        if strangers := sorted(given.keys() - {site.name for site in sites}):
            raise ConfigError([f"--network_weights: it trains {strangers[0]}, and this run would not"])
        wanted = dict(given)
    built: dict[str, Size] = {}
    for part in parts:
        part.model.requires_grad_(False)
        names = {site.module: site.name for site in sites if site.part == part.name and site.name in wanted}
        # Text encoders have the same names inside, and must not start alike.
        seeds = {module: name if part.is_text else module for module, name in names.items()}
        sizes = {module: wanted[name] for module, name in names.items()}
        found = put_in(part.model, kind, arguments_of(config), sizes, seeds, seed)
        built |= {names[module]: size for module, size in found.items()}
        if kind in LORAS and part.style in LAYOUTS:
            _share(part.model, groups(names, LAYOUTS[part.style]))
    alpha = float(config.network_alpha or config.network_dim)
    return Adapter(kind, config.network_dim, alpha, built, tuple(site for site in sites if site.name in built))


def chosen(parts: Sequence[Part], config: AdapterConfig, family: str) -> tuple[list[Site], dict[str, Size]]:
    """All sites, and the sizes of those that are to have an adapter; mistakes in ``network_args`` are told."""
    sites = [site for part in parts for site in sites_of(part)]
    sizes = sizes_of(sites, config, family)
    for part in parts:
        own = {site.module: sizes[site.name] for site in sites if site.part == part.name and site.name in sizes}
        if problems := unfit(part.model, kind_of(config), own):
            raise ConfigError(problems)
    return sites, sizes


def inject(
    model: nn.Module,
    config: AdapterConfig,
    targets: Sequence[str],
    seed: int,
    style: str = "diffusers",
    idle: Sequence[str] = (),
) -> Adapter:
    """The same for one model alone, whose modules then have no part before their names."""
    found = put([Part("", model, targets, style, idle=idle)], config, seed)
    return Adapter(found.kind, found.rank, found.alpha,
                   {name.removeprefix("."): size for name, size in found.sizes.items()}, found.sites)  # fmt: skip


def _share(model: nn.Module, found: Sequence[Group]) -> None:
    """One down matrix for all modules of a group."""
    for group in found:
        first, *others = (model.get_submodule(name) for name in group.modules if name is not None)
        for layer in others:
            layer.lora_A["default"] = first.lora_A["default"]  # type: ignore[index, operator]


def module_of(name: str) -> str:
    """The module that a weight of a state belongs to."""
    return re.split(MARKS, name)[0]


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The adapters' weights of a model, wrapped or not, with their names in a state; a shared one under each name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if re.search(MARKS, name):
            yield clean(name), parameter


def state(model: nn.Module) -> State:
    """The adapters' weights as they are now; they share memory with the model, and shared ones are one tensor."""
    found = dict(parameters(model))
    once = {id(parameter): parameter.detach() for parameter in found.values()}
    return {name: once[id(parameter)] for name, parameter in found.items()}


def load_state(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Put weights into a model that has its adapters; names and shapes must be the same."""
    own = state(model)
    wrong = [name for name in own.keys() & given.keys() if own[name].shape != given[name].shape]
    if own.keys() != given.keys() or wrong:
        examples = sorted({*(own.keys() ^ given.keys()), *wrong})[:3]
        raise ValueError(f"the LoRA weights do not fit the model, for example {', '.join(examples)}")
    for name, tensor in own.items():
        tensor.copy_(given[name])
    torn = [name for name, tensor in own.items() if not equal(tensor, given[name].to(tensor))]
    if torn:
        raise ValueError(f"modules that share a matrix were given different ones, for example {torn[0]}")
