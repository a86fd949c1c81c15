"""Rules for keys that sd-scripts does not know: where pictures come from, and how large a part each dataset has."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ..dataset.file_discovery import PathPattern
from ..dataset.schema import DatasetConfig
from .dataset_rules import Found

_SOURCES = ("image_dir", "parquet", "webdataset")
_LACKS: Mapping[str, tuple[str, ...]] = {
    "image_dir": (),
    "parquet": ("metadata_file", "conditioning_data_dir", "cache_info", "caption_extension"),
    "webdataset": ("metadata_file", "conditioning_data_dir", "cache_info"),
}
"""Keys of sd-scripts that a source cannot use; standing above the subset they are no mistake, as there."""
_LACKS_FURTHER: Mapping[str, tuple[str, ...]] = {
    "image_dir": (),
    "parquet": ("include", "exclude"),
    "webdataset": ("include", "exclude", "image_column"),
    "metadata_file": ("include", "exclude", "recursive"),
}
"""The same for keys that sd-scripts does not know."""
_FURTHER = ("recursive", "include", "exclude", "image_column", "caption_column")
_LISTS = ("caption_extension", "include", "exclude", "parquet", "webdataset")


def source_problems(found: Mapping[str, Found], own: Mapping[str, Found]) -> Iterator[str]:
    """What is wrong with the sources of one subset; ``own`` are the keys written in it."""
    sources = [name for name in _SOURCES if found[name].value]
    for name in sources[1:]:
        yield (f"{found[name].place}: {name}: stands beside {sources[0]}; a subset has one of the two, so write another"
               " [[datasets.subsets]]")  # fmt: skip
    for name in _LACKS[sources[0]] if sources else ():
        if name in own:
            yield f"{own[name].place}: {name}: has no meaning beside {sources[0]}; take one of the two out"
    for name in _LISTS:
        item = found[name]
        is_empty = not item.value and item.place is not None and not item.is_wrong
        # an ending may be nothing: sd-scripts reads captions from files without one, then
        if is_empty or (name != "caption_extension" and "" in item.value):
            yield f"{item.place}: {name}: is empty; name at least one, or take it out"
    for name in ("include", "exclude"):
        yield from (f"{found[name].place}: {name}: {reason}" for reason in _no_patterns(found[name].value))


def _no_patterns(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        try:
            PathPattern.compile(text)
        except ValueError as error:
            yield str(error)


def file_problems(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """What is wrong between datasets, or on the levels above them."""
    yield from _useless(datasets)
    yield from _weights(datasets)


def _useless(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    """Keys that none of the subsets below them can use."""
    reached: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for subset in (subset for dataset in datasets for subset in dataset.subsets):
        source = subset.source_key
        for name in _FURTHER:
            if name in subset.places:
                reached[name, subset.places[name]].append(source)
    for (name, place), sources in reached.items():
        if all(name in _LACKS_FURTHER[source] for source in sources):
            yield f"{place}: {name}: has no meaning beside {' and '.join(dict.fromkeys(sources))}; take it out"


def _weights(datasets: Sequence[DatasetConfig]) -> Iterator[str]:
    places = [dataset.places["weight"] for dataset in datasets if "weight" in dataset.places]
    for dataset in datasets:
        if dataset.weight is not None and dataset.weight <= 0:
            yield (f"{dataset.place('weight')}: weight: {dataset.weight:g} would leave the dataset out; write a share"
                   " such as 0.5")  # fmt: skip
        if places and "weight" not in dataset.places:
            yield f"{dataset.place('')}: weight: missing here; {places[0]} has one: give all [[datasets]] one, or none"
