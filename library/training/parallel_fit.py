"""Whether a model can be taken apart as it was asked, known before it is loaded."""

from collections.abc import Iterator

from ..config import RunConfig
from ..distributed.chain import Chain
from ..distributed.device_map import unplaced
from ..errors import ConfigError
from ..families.base import Family
from ..families.detect import Detected
from ..families.tensor_cuts import tensor_cuts
from ..families.unloaded import unloaded


def refuse_misfits(config: RunConfig, family: Family, model: Detected) -> None:
    """Raise with what does not fit, and what would."""
    wanted = config.parallel.together > 1 or config.parallel.device_map is not None
    if wanted and (problems := [*misfits(config, family, model)]):
        raise ConfigError(problems)


def misfits(config: RunConfig, family: Family, model: Detected) -> Iterator[str]:
    """What does not fit, and what would."""
    stages, parts, title = config.parallel.pp_size, config.parallel.tp_size, family.facts.title
    denoiser = getattr(unloaded(model, (family.denoiser,)), family.denoiser)
    if config.parallel.device_map is not None:
        yield from unplaced(denoiser, config.parallel.device_map)
    if stages > 1 and not family.block_lists:
        yield (f"--pp_size {stages}: the blocks of {title} do not simply follow each other, for the first hand on to"
               f" the last, too; use --tp_size {stages}, or --fsdp")  # fmt: skip
    elif stages > 1:
        blocks = len(Chain.of(denoiser, family.block_lists, family.block_flow).blocks)
        each = 2 if config.parallel.pp_schedule == "interleaved" else 1
        if blocks < stages * each:
            why = f" with {each} stages each" if each > 1 else ""
            yield (f"--pp_size {stages}: {title} has {blocks} blocks, too few for {stages} devices{why}; use"
                   f" {max(1, blocks // each)}")  # fmt: skip
    if parts == 1:
        return
    heads = {denoiser.get_submodule(name.rpartition(".")[0]).heads for name in tensor_cuts(denoiser)
             if name.endswith(".to_q")}  # fmt: skip
    if odd := sorted(number for number in heads if number % parts):
        fits = [size for size in range(2, parts + 8) if not any(number % size for number in heads)]
        instead = f"use {' or '.join(map(str, fits))}" if fits else "use --fsdp"
        yield f"--tp_size {parts}: {odd[0]} heads of attention cannot be dealt out evenly; {instead}"
