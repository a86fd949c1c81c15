"""Which settings of masks go together; a mask that somebody made is used, or it is said why not."""

from collections.abc import Iterator, Sequence

from ..config.schema import DataConfig
from ..dataset.schema import DatasetConfig
from .mask_files import get_mask_source


def validate_masks(datasets: Sequence[DatasetConfig], config: DataConfig) -> Iterator[str]:
    """What is wrong with the settings, without a look at any folder.

    As in sd-scripts a folder of masks needs ``masked_loss`` and ``alpha_mask`` does not.
    """
    subsets = [subset for dataset in datasets for subset in dataset.subsets]
    sources = {get_mask_source(subset) for subset in subsets}
    for subset in subsets:
        folder, masks, place = subset.resolve_image_dir(), subset.resolve_mask_dir(), subset.locate("conditioning_data_dir")
        if masks is None:
            continue
        if not config.masked_loss:
            yield f"{place}: conditioning_data_dir: masks in a folder are used with --masked_loss; set it for the run"
        if folder is None or not folder.is_dir() or not masks.is_dir():
            continue  # which is told elsewhere
        if folder.samefile(masks):
            yield f"{place}: conditioning_data_dir: is the folder of the pictures; masks need a folder of their own"
        elif subset.recursive and not subset.exclude and masks.resolve().is_relative_to(folder.resolve()):
            pattern = masks.resolve().relative_to(folder.resolve()).as_posix() + "/**"
            yield (f"{place}: conditioning_data_dir: lies below image_dir, where recursive takes masks for pictures;"
                   f" move it, or set exclude = ['{pattern}']")  # fmt: skip
    if not subsets:
        return
    way_out = "set conditioning_data_dir or alpha_mask in a subset, or take this option out"
    for name in ("masked_loss", "masked_loss_normalize"):
        if getattr(config, name) and sources == {None}:
            yield f"--{name}: no subset has masks; {way_out}"
    if config.alpha_mask and sources == {"folder"}:
        yield "--alpha_mask: every subset has its masks in conditioning_data_dir; take one of the two out"
