"""Rules for keys that sd-scripts does not know: where pictures come from, and how large a part each dataset has."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ..dataset.file_discovery import PathPattern
from ..dataset.schema import DatasetConfig
from .dataset_rules import LocatedValue

_SOURCE_KEYS = ("image_dir", "parquet", "webdataset")
_UNSUPPORTED_KEYS_BY_SOURCE: Mapping[str, tuple[str, ...]] = {
    "image_dir": (),
    "parquet": ("metadata_file", "conditioning_data_dir", "cache_info", "caption_extension"),
    "webdataset": ("metadata_file", "conditioning_data_dir", "cache_info"),
}
"""Keys of sd-scripts that a source cannot use; standing above the subset they are no mistake, as there."""
_UNSUPPORTED_EXTRA_KEYS_BY_SOURCE: Mapping[str, tuple[str, ...]] = {
    "image_dir": (),
    "parquet": ("include", "exclude"),
    "webdataset": ("include", "exclude", "image_column"),
    "metadata_file": ("include", "exclude", "recursive"),
}
"""The same for keys that sd-scripts does not know."""
_EXTRA_KEYS = ("recursive", "include", "exclude", "image_column", "caption_column")
_LIST_KEYS = ("caption_extension", "include", "exclude", "parquet", "webdataset")


def validate_source_keys(values: Mapping[str, LocatedValue], own_keys: Mapping[str, LocatedValue]) -> Iterator[str]:
    """What is wrong with the sources of one subset; ``own`` are the keys written in it."""
    sources = [name for name in _SOURCE_KEYS if values[name].value]
    for name in sources[1:]:
        yield (f"{values[name].location}: {name}: stands beside {sources[0]}; a subset has one of the two, so write another"
               " [[datasets.subsets]]")  # fmt: skip
    for name in _UNSUPPORTED_KEYS_BY_SOURCE[sources[0]] if sources else ():
        if name in own_keys:
            yield f"{own_keys[name].location}: {name}: has no meaning beside {sources[0]}; take one of the two out"
    for name in _LIST_KEYS:
        item = values[name]
        is_empty = not item.value and item.location is not None and not item.is_invalid
        # an ending may be nothing: sd-scripts reads captions from files without one, then
        if is_empty or (name != "caption_extension" and "" in item.value):
            yield f"{item.location}: {name}: is empty; name at least one, or take it out"
    for name in ("include", "exclude"):
        yield from (f"{values[name].location}: {name}: {reason}" for reason in _validate_patterns(values[name].value))


def _validate_patterns(patterns: Sequence[str]) -> Iterator[str]:
    for text in patterns:
        try:
            PathPattern.compile(text)
        except ValueError as error:
            yield str(error)


def validate_across_datasets(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """What is wrong between datasets, or on the levels above them."""
    yield from _find_ineffective_keys(datasets)
    yield from _validate_weights(datasets)


def _find_ineffective_keys(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Keys that none of the subsets below them can use."""
    reached: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for subset in (subset for dataset in datasets for subset in dataset.subsets):
        source = subset.source_key
        for name in _EXTRA_KEYS:
            if name in subset.locations:
                reached[name, subset.locations[name]].append(source)
    for (name, place), sources in reached.items():
        if all(name in _UNSUPPORTED_EXTRA_KEYS_BY_SOURCE[source] for source in sources):
            yield f"{place}: {name}: has no meaning beside {' and '.join(dict.fromkeys(sources))}; take it out"


def _validate_weights(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    places = [dataset.locations["weight"] for dataset in datasets if "weight" in dataset.locations]
    for dataset in datasets:
        if dataset.weight is not None and dataset.weight <= 0:
            yield (f"{dataset.locate('weight')}: weight: {dataset.weight:g} would leave the dataset out; write a share"
                   " such as 0.5")  # fmt: skip
        if places and "weight" not in dataset.locations:
            yield f"{dataset.locate('')}: weight: missing here; {places[0]} has one: give all [[datasets]] one, or none"
