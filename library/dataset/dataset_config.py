"""Parse the datasets of a run: a file, TOML or JSON in sd-scripts' or musubi-tuner's format, or sd-scripts' folders.

Keys of musubi-tuner's format become those of sd-scripts' in musubi_format.py.  All problems are reported at once.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config.kohya_compat import RENAMED_OPTIONS, format_rename_notice
from ..config.schema_data import DataConfig
from ..config.toml_positions import KeyPath, read_text_file, read_toml_with_lines
from ..config.types import Resolution, ResolutionSchedule
from ..errors import ConfigError
from ..problems import Place, Problem, report_file
from ..storage.remote_store import RemoteStore
from .caption_files import DEFAULT_EXTENSION
from .kohya_folders import read_kohya_dataset
from .musubi_format import (
    MUSUBI_BUCKET_STEP,
    MUSUBI_KEYS,
    MUSUBI_RESOLUTION,
    MUSUBI_SUBSET_KEYS,
    MUSUBI_TARGET_FRAMES,
    ONE_FRAME_KEYS,
    PUBLISHED_WINDOW,
    RENAMED_DATASET_KEYS,
    SOURCE_KEYS,
    VIDEO_KEYS,
    VIDEO_SOURCE_KEYS,
    WINDOW_KEY,
    explain_mixed_key,
    find_mixed_keys,
    find_musubi_key,
    is_musubi_dataset,
)
from .one_frame import MAX_POSITION, OneFrame, describe_window, is_list_of_positions, is_position
from .schema import (
    DATASET_KEYS,
    DATASET_TABLE,
    GENERAL_TABLE,
    SUBSET_TABLE,
    DatasetConfig,
    SubsetConfig,
    build_remote_store,
    collect_flag_defaults,
)
from .slider_prompts import ParsedSliderPrompts, parse_slider_prompts
from .validate_keys import (
    UNSUPPORTED_KEYS_BY_KIND,
    LocatedValue,
    explain_misplaced_key,
    explain_unknown_key,
    infer_dataset_kind,
    validate_across_datasets,
    validate_dataset_keys,
    validate_source_keys,
    validate_subset_keys,
)

Values = dict[str, LocatedValue]
_Locate = Callable[[KeyPath], Place]
_PLACEHOLDER_RESOLUTION = Resolution(1, 1)  # keeps the config complete when the resolution is missing or invalid
_EXTRA_DATASET_KEYS = (
    "bucket_mode bucket_max_crop bucket_min_images weight resolution_schedule from_step to_step control_resolution"
    " no_resize_control".split()
)
_EXTRA_SUBSET_KEYS = (
    "parquet webdataset recursive include exclude image_column caption_column cache_directory control_directory"
    " control_from_image control_column video_dir target_frames frame_extraction frame_stride frame_sample max_frames"
    " source_fps multiple_target".split()
)
_INTERNAL_FIELDS = (
    *("kind", "subsets", "locations", "dataset_file", "uses_musubi_captions", "dataset_index_in_file"),
    *("conditioning_is_control", "remote", "file_format", "keeps_all_frames", "one_frame", "window"),
)
_MUSUBI_BUCKETS = {
    **{name: DATASET_KEYS[name].option.default for name in ("bucket_mode", "bucket_max_crop", "bucket_min_images")},
    "min_bucket_reso": MUSUBI_BUCKET_STEP,
    "bucket_reso_steps": MUSUBI_BUCKET_STEP,
}
"""Keys that do not belong in musubi-tuner's format, so that the run's options do not apply to them either."""


@dataclass(frozen=True)
class ParsedDatasetConfig:
    """The datasets as far as they could be parsed, and all problems of the file."""

    datasets: tuple[DatasetConfig, ...]
    problems: list[Problem]
    notices: tuple[str, ...] = ()  # deprecated keys

    def require_valid(self) -> tuple[DatasetConfig, ...]:
        """Return the datasets; raise ``ConfigError`` with all problems if there are any."""
        if self.problems:
            raise ConfigError(self.problems)
        return self.datasets


def can_load_datasets(config: DataConfig) -> bool:
    """Whether the run has a dataset file that exists, or sd-scripts' folders."""
    if config.slider_prompts is not None:
        return Path(config.slider_prompts).expanduser().is_file()
    if config.dataset_config is not None:
        return Path(config.dataset_config).is_file()
    return config.dataset_option is not None


def load_dataset_config(config: DataConfig, invalid_flags: Set[str] = frozenset()) -> ParsedDatasetConfig:
    """Parse the run's datasets with the run's options as defaults; reads no image."""
    if config.slider_prompts is not None:
        path = Path(config.slider_prompts).expanduser()
        return build_slider_datasets(path, parse_slider_prompts(path))
    parsed = _parse_run_datasets(config, invalid_flags)
    if config.masked_loss:
        return parsed
    datasets = [
        replace(dataset, subsets=tuple(map(_read_conditioning_as_control, dataset.subsets)))
        for dataset in parsed.datasets
    ]
    return replace(parsed, datasets=tuple(datasets))


def build_slider_datasets(path: Path, parsed: ParsedSliderPrompts) -> ParsedDatasetConfig:
    """Build a dataset without images for each of the prompts, with its size, batch size and strength of the LoRA."""

    def locate(key_path: KeyPath) -> Place:
        if len(key_path) < 2:
            return Place(str(path))
        places = parsed.prompts[int(key_path[1])].places
        last = key_path[-1] if isinstance(key_path[-1], str) else ""
        name = "multiplier" if last == "network_multiplier" else last
        return places[name].with_key(name) if name in places else places[""].with_key(name)

    document = {
        "datasets": [
            {
                "resolution": [prompt.resolution.width, prompt.resolution.height],
                "batch_size": prompt.batch_size,
                "network_multiplier": prompt.multiplier,
                "enable_bucket": False,
                "subsets": [{"metadata_file": str(path)}],
            }
            for prompt in parsed.prompts
        ]
    }
    parser = _DatasetConfigParser(locate, None, collect_flag_defaults(DataConfig()), frozenset(), RemoteStore())
    datasets = parser.parse(document).datasets if parsed.prompts else ()
    return ParsedDatasetConfig(datasets, [*parsed.problems, *parser.problems], parsed.notices)


def _read_conditioning_as_control(subset: SubsetConfig) -> SubsetConfig:
    """sd-scripts' folder of conditioning images holds masks only with ``--masked_loss``."""
    return replace(subset, conditioning_is_control=subset.conditioning_data_dir is not None)


def _parse_run_datasets(config: DataConfig, invalid_flags: Set[str]) -> ParsedDatasetConfig:
    flag_defaults = collect_flag_defaults(config)
    if config.dataset_config is None:
        remote = build_remote_store(config)
        dataset = read_kohya_dataset(config, remote)
        parser = _DatasetConfigParser(dataset.locate, None, flag_defaults, invalid_flags, remote)
        parser.problems += dataset.problems
        parser.notices += dataset.notices
        if dataset.subsets:
            return parser.parse(dataset.document)
        settings_problems = validate_dataset_keys(parser.apply_flag_defaults({}), [], dataset.locate(()))
        return ParsedDatasetConfig((), [*dataset.problems, *settings_problems])
    return parse_dataset_config(Path(config.dataset_config), flag_defaults, invalid_flags, build_remote_store(config))


def parse_dataset_config(
    path: Path,
    flag_defaults: Mapping[str, Any],
    invalid_flags: Set[str] = frozenset(),
    remote: RemoteStore | None = None,
) -> ParsedDatasetConfig:
    """Parse the file; ``flag_defaults`` (see ``collect_flag_defaults``) supply keys that it does not set.

    ``invalid_flags`` are options of the run that could not be parsed and are reported already; ``remote`` reads URLs.
    """
    try:
        document, locate = (_read_json if path.suffix.lower() == ".json" else _read_toml)(path)
    except ConfigError as error:
        return ParsedDatasetConfig((), error.problems)
    return _DatasetConfigParser(locate, path, flag_defaults, invalid_flags, remote or RemoteStore()).parse(document)


def _read_toml(path: Path) -> tuple[dict[str, Any], _Locate]:
    document, lines = read_toml_with_lines(path)
    return document, lambda key_path: Place(str(path), lines[key_path])


class _JsonObject(dict[str, Any]):
    """A JSON object that records duplicate keys, of which the json module silently keeps the last."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]):
        pairs = list(pairs)
        super().__init__(pairs)
        self.duplicates = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def _read_json(path: Path) -> tuple[dict[str, Any], _Locate]:
    """Read a JSON file; raise ``ConfigError`` with the line of a syntax error."""
    text = read_text_file(path)
    try:
        document = json.loads(text, object_pairs_hook=_JsonObject, parse_constant=_reject_constant)
        duplicates = list(_find_duplicates(document, ()))
    except json.JSONDecodeError as error:
        place = Place(str(path), error.lineno)
        text = f"not valid JSON: {error.msg} (column {error.colno})"
        raise ConfigError([Problem("", text, place=place)]) from None
    except ValueError as error:
        raise ConfigError([report_file(path, f"not valid JSON: {error}")]) from None
    except RecursionError:
        raise ConfigError([report_file(path, "nested too deeply")]) from None
    if not isinstance(document, dict):
        raise ConfigError([report_file(path, "expected an object {...}")])
    if duplicates:
        places = {key: _locate_in_json(path, key).with_key(str(key[-1])) for key in duplicates}
        raise ConfigError([Problem(str(key[-1]), "duplicate key", place=place) for key, place in places.items()])
    return document, partial(_locate_in_json, path)


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _find_duplicates(value: Any, key_path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, _JsonObject):
        yield from ((*key_path, key) for key in value.duplicates)
    members = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for key, member in members:
        yield from _find_duplicates(member, (*key_path, key))


def _locate_in_json(path: Path, key_path: KeyPath) -> Place:
    """Return the file and the table of a key, as ``set.json: datasets[0].subsets[1]``."""
    table = key_path[:-1] if isinstance(key_path[-1], str) else key_path
    keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in table).removeprefix(".")
    return Place(str(path), part=keys)


class _DatasetConfigParser:
    """Turns the tables of one document into configs and collects problems; an invalid value becomes its default."""

    def __init__(
        self,
        locate: _Locate,
        dataset_file: Path | None,
        flag_defaults: Mapping[str, Any],
        invalid_flags: Set[str],
        remote: RemoteStore,
    ):
        self.locate, self.dataset_file, self.remote = locate, dataset_file, remote
        self.flag_defaults, self.invalid_flags = flag_defaults, invalid_flags
        self.problems: list[Problem] = []
        self.notices: list[str] = []
        self.mixed_keys: Set[KeyPath] = frozenset()  # keys of another format than the file's
        self.musubi_keys: Set[str] = frozenset()  # the keys that a file in musubi-tuner's format may have

    def parse(self, document: Mapping[str, Any]) -> ParsedDatasetConfig:
        datasets = tuple(self.parse_datasets(document))
        self.add_musubi_notices(datasets)
        problems = [*self.problems, *validate_across_datasets(datasets)]
        return ParsedDatasetConfig(datasets, problems, tuple(self.notices))

    def parse_datasets(self, document: Mapping[str, Any]) -> list[DatasetConfig]:
        for name in document:
            if name not in ("general", "datasets"):
                reason = explain_misplaced_key(name, "the top of the file")
                self.add_problem(
                    (name,), reason or "unknown table", "" if reason else "expected [general] or [[datasets]]"
                )
        if (musubi_key := find_musubi_key(document)) is not None:
            mixed, self.musubi_keys = find_mixed_keys(document), MUSUBI_KEYS
            self.problems += [explain_mixed_key(key_path, musubi_key, self.locate) for key_path in mixed]
            self.mixed_keys = frozenset(mixed)
        general = self.parse_table(("general",), document.get("general", {}), GENERAL_TABLE)
        tables = document.get("datasets", [])
        if not self.is_array_of_tables(("datasets",), tables, DATASET_TABLE):
            return []
        if not tables:
            fix, place = "add one, and [[datasets.subsets]] with image_dir", Place(str(self.dataset_file))
            self.problems.append(Problem("", "no [[datasets]]", fix, place))
        datasets = list[DatasetConfig]()
        for index, table in enumerate(tables):
            if is_musubi_dataset(table) or (musubi_key is not None and "subsets" not in table):
                datasets.append(self.parse_musubi_dataset(("datasets", index), table, general))
            elif not self.mixed_keys:  # otherwise it is of the other format, which is reported
                datasets.append(self.parse_dataset(("datasets", index), table, general))
        return datasets

    def parse_dataset(self, key_path: KeyPath, table: Mapping[str, Any], general: Values) -> DatasetConfig:
        own = {name: value for name, value in table.items() if name != "subsets"}
        values = {**general, **self.parse_table(key_path, own, DATASET_TABLE)}
        subsets = self.parse_subsets(key_path, table, values)
        resolved = self.apply_flag_defaults(values)
        location = self.locate(key_path)
        self.problems += validate_dataset_keys(resolved, subsets, location)
        return DatasetConfig(
            kind=infer_dataset_kind(subsets),
            subsets=tuple(self.build_subset_config(subset) for subset in subsets),
            dataset_index_in_file=int(key_path[-1]),
            **_collect_fields(DatasetConfig, resolved, location),
        )

    def parse_musubi_dataset(self, key_path: KeyPath, table: Mapping[str, Any], general: Values) -> DatasetConfig:
        """Read a dataset in musubi-tuner's format, with the sizes and buckets that it has there."""
        is_video = any(name in table for name in VIDEO_SOURCE_KEYS)
        ignored = {*MUSUBI_SUBSET_KEYS, *ONE_FRAME_KEYS, *(() if is_video else VIDEO_KEYS)}
        if table.get("multiple_target") is False:
            ignored.add("multiple_target")
        own = {name: value for name, value in table.items() if name not in ignored}
        values = {**general, **self.parse_table(key_path, own, DATASET_TABLE)}
        for name in (name for name in VIDEO_KEYS if name in table and not is_video):
            self.add_problem((*key_path, name), "only for videos, and this dataset has images", "remove it")
        if is_video and "target_frames" not in values and table.get("frame_extraction") != "full":
            values["target_frames"] = LocatedValue(MUSUBI_TARGET_FRAMES, None)
            where = self.locate(key_path).with_key("target_frames")
            self.notices.append(f"{where}: not set; musubi-tuner's is [1]: one frame of each window")
        self._report_one_frame_keys(key_path, table, is_video=is_video)
        subset = self.parse_musubi_subset(key_path, table, values)
        location, resolved = self.locate(key_path), self.apply_flag_defaults(values)
        resolved |= {name: LocatedValue(value, None) for name, value in _MUSUBI_BUCKETS.items()}
        resolution, schedule = resolved["resolution"], resolved["resolution_schedule"]
        if not (resolution.value or resolution.is_invalid or schedule.value or schedule.is_invalid):
            resolved["resolution"] = LocatedValue(MUSUBI_RESOLUTION, None)
            self.notices.append(f"{location.with_key('resolution')}: not set; musubi-tuner's is {MUSUBI_RESOLUTION}")
        self.problems += validate_dataset_keys(resolved, [subset], location, "musubi-tuner")
        dataset = DatasetConfig(
            kind=infer_dataset_kind([subset]),
            subsets=(replace(self.build_subset_config(subset), uses_musubi_captions=True, keeps_all_frames=True),),
            dataset_index_in_file=int(key_path[-1]),
            file_format="musubi-tuner",
            one_frame=None if is_video else self._read_one_frame(key_path, table),
            window=None if is_video else self._read_window(key_path, table),
            **_collect_fields(DatasetConfig, resolved, location),
        )
        own_places = {name: self.locate((*key_path, name)).with_key(name) for name in ONE_FRAME_KEYS if name in table}
        return replace(dataset, locations={**dataset.locations, **own_places})

    def _report_one_frame_keys(self, key_path: KeyPath, table: Mapping[str, Any], *, is_video: bool) -> None:
        """Name the keys of one-frame training, and the size of FramePack's sections, which is an option of the run."""
        for name in (name for name in ONE_FRAME_KEYS if name in table):
            where = self.locate((*key_path, name)).with_key(name)
            reason = "one_frame_settings of the run sets the positions of one-frame training"
            if name == WINDOW_KEY:
                reason = "the option latent_window_size sets it"
                if is_video and (size := self._read_window(key_path, table)) not in (None, PUBLISHED_WINDOW):
                    self.add_problem((*key_path, name), *describe_window(size))
                    continue
            self.notices.append(f"{where}: no effect: {reason}")

    def _read_window(self, key_path: KeyPath, table: Mapping[str, Any]) -> int | None:
        """Read the size of FramePack's sections, which a run with --one_frame compares with its own."""
        size = table.get(WINDOW_KEY)
        if size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0):
            return size
        self.add_problem((*key_path, WINDOW_KEY), f"expected an integer, 1 or more, got {size!r}")
        return None

    def _read_one_frame(self, key_path: KeyPath, table: Mapping[str, Any]) -> OneFrame | None:
        """Read the positions of one-frame training, which a run with --one_frame compares with its own."""
        expected = {
            "fp_1f_clean_indices": (f"a list of integers from 0 to {MAX_POSITION}", is_list_of_positions),
            "fp_1f_target_index": (f"an integer from 0 to {MAX_POSITION}", is_position),
            "fp_1f_no_post": ("true or false", lambda value: isinstance(value, bool)),
        }
        found = {name: table[name] for name in expected if name in table}
        wrong = [name for name, value in found.items() if not expected[name][1](value)]
        for name in wrong:
            self.add_problem((*key_path, name), f"expected {expected[name][0]}, got {found[name]!r}")
        if wrong or not found:
            return None
        indices = tuple(found.get("fp_1f_clean_indices", (0,)))
        return OneFrame(found.get("fp_1f_target_index"), indices, has_post=not found.get("fp_1f_no_post", False))

    def parse_musubi_subset(self, key_path: KeyPath, table: Mapping[str, Any], inherited: Values) -> Values:
        """Read the only subset of a musubi-tuner dataset, whose keys are in the dataset itself."""
        values = dict(inherited)
        names = [name for name in MUSUBI_SUBSET_KEYS if name in table]
        sources = [name for name in SOURCE_KEYS if name in table]
        lists = [name for name in sources if MUSUBI_SUBSET_KEYS[name] == "metadata_file"]
        for name in sources[1:]:
            text, fix = f"{sources[0]} is set too, and a dataset has one source", "use a [[datasets]] for each"
            self.add_problem((*key_path, name), text, fix)
            names.remove(name)
        if not sources:
            text = "set the folder of images: image_directory = 'FOLDER'; or image_jsonl_file, video_directory"
            place = self.locate(key_path).with_key("image_directory")
            self.problems.append(Problem("image_directory", "missing", f"{text}, video_jsonl_file", place))
            values["image_dir"] = LocatedValue(None, self.locate(key_path), is_invalid=True)
        elif lists and len(sources) == 1 and "control_directory" in names:
            names.remove("control_directory")
            where = self.locate((*key_path, "control_directory")).with_key("control_directory")
            kind = "images" if lists[0].startswith("image") else "clips"
            self.notices.append(f"{where}: no effect: {lists[0]} lists the control {kind} itself, as control_path")
        for name in names:
            value, location = table[name], self.locate((*key_path, name)).with_key(name)
            if isinstance(value, str):
                values[MUSUBI_SUBSET_KEYS[name]] = LocatedValue(value, location)
            else:
                values[MUSUBI_SUBSET_KEYS[name]] = LocatedValue(None, location, is_invalid=True)
                self.add_problem((*key_path, name), f"expected a string, got {value!r}")
        if lists:
            values.setdefault("caption_column", LocatedValue("caption", None))
        return self.resolve_subset(key_path, values, {})

    def add_musubi_notices(self, datasets: Sequence[DatasetConfig]) -> None:
        """Say that the file has musubi-tuner's format, and what is not read of its caches."""
        musubi = [dataset for dataset in datasets if dataset.file_format == "musubi-tuner"]
        if musubi:
            self.notices.append(f"{self.dataset_file}: in musubi-tuner's format, with its sizes, buckets and captions")
        subsets = [subset for dataset in musubi for subset in dataset.subsets if subset.cache_directory is not None]
        if subsets:
            text = "this program keeps its own caches there; those that musubi-tuner made are not needed, and not read"
            self.notices.append(f"{subsets[0].locate('cache_directory')}: {text}")

    def parse_subsets(self, key_path: KeyPath, table: Mapping[str, Any], inherited: Values) -> list[Values]:
        tables = table.get("subsets", [])
        if not self.is_array_of_tables((*key_path, "subsets"), tables, SUBSET_TABLE):
            return []
        if not tables:
            self.add_problem(key_path, "no [[datasets.subsets]]", "add one with image_dir = 'FOLDER'")
        subsets = []
        for index, subset in enumerate(tables):
            subset_path = (*key_path, "subsets", index)
            own = self.parse_table(subset_path, subset, SUBSET_TABLE)
            subsets.append(self.resolve_subset(subset_path, {**inherited, **own}, own))
        return subsets

    def resolve_subset(self, key_path: KeyPath, values: Values, own_keys: Values) -> Values:
        """Add the defaults and validate; the location of the subset itself is stored under the empty key."""
        location = self.locate(key_path)
        resolved = {**self.apply_flag_defaults(values), "": LocatedValue(None, location)}
        self.problems += validate_subset_keys(resolved, own_keys, location)
        self.problems += validate_source_keys(resolved, own_keys)
        return resolved

    def parse_table(self, key_path: KeyPath, table: Any, table_name: str) -> Values:
        """Parse the keys of one table."""
        values: Values = {}
        if not isinstance(table, dict):
            self.add_problem(key_path, f"expected the table {table_name}, got {table!r}")
            return values
        for written_name, value in table.items():
            name = str({**RENAMED_OPTIONS, **RENAMED_DATASET_KEYS}.get(written_name, written_name))
            value_path = (*key_path, written_name)
            key = DATASET_KEYS.get(name)
            if value_path in self.mixed_keys:
                continue
            if key is None or table_name not in key.tables:
                reason = explain_misplaced_key(name, table_name)
                reason = reason or explain_unknown_key(name, table_name, self.musubi_keys)
                self.add_problem(value_path, reason)
                continue
            location = self.locate(value_path)
            if name in values:
                first = values[name].location
                self.add_problem(value_path, f"duplicate key: the former name of {name}, set at {first}")
            elif name != written_name:
                self.notices.append(format_rename_notice(location.with_key(written_name), name))
            try:
                values[name] = LocatedValue(key.option.parse_toml_value(value), location)
            except ValueError as error:
                self.add_problem(value_path, str(error))
                values[name] = LocatedValue(None, location, is_invalid=True)
        return values

    def is_array_of_tables(self, key_path: KeyPath, value: Any, table_name: str) -> bool:
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            return True
        self.add_problem(key_path, f"expected an array of tables: {table_name}")
        return False

    def apply_flag_defaults(self, values: Values) -> Values:
        """Return every key with its value: from the file, from the run's options, or the default of the option."""
        resolved = {}
        for name, key in DATASET_KEYS.items():
            location = Place(flag=f"--{key.flag}") if key.flag is not None else None
            default = self.flag_defaults.get(name, key.option.default)
            resolved[name] = LocatedValue(default, location, key.flag in self.invalid_flags)
        for name, item in values.items():
            is_usable = not item.is_invalid
            resolved[name] = item if is_usable else LocatedValue(resolved[name].value, item.location, is_invalid=True)
        return resolved

    def build_subset_config(self, values: Values) -> SubsetConfig:
        return SubsetConfig(
            dataset_file=self.dataset_file,
            remote=self.remote,
            **_collect_fields(SubsetConfig, values, values[""].location or Place()),
        )

    def add_problem(self, key_path: KeyPath, text: str, fix: str = "") -> None:
        name, place = key_path[-1], self.locate(key_path)
        if isinstance(name, str):
            self.problems.append(Problem(name, text, fix, place.with_key(name)))
        else:
            self.problems.append(Problem("", text, fix, place))


def _collect_fields(config_class: type, located: Values, location: Place) -> dict[str, Any]:
    """Collect the arguments of a config class, with the location of each."""
    names = [item.name for item in fields(config_class) if item.name in DATASET_KEYS]
    values = {name: located[name].value for name in names}
    if "resolution" in values:
        largest = values["resolution_schedule"] and values["resolution_schedule"].largest
        values["resolution"] = largest or values["resolution"] or _PLACEHOLDER_RESOLUTION
    locations = {name: where for name in names if (where := located[name].location)}
    return {**values, "locations": {**locations, "": location}}


def convert_to_sd_scripts(datasets: Sequence[DatasetConfig]) -> list[dict[str, Any]]:
    """Convert to the resolved form of sd-scripts, with only the keys that it knows."""
    return [_convert_dataset(dataset) for dataset in datasets]


def _convert_dataset(dataset: DatasetConfig) -> dict[str, Any]:
    params = _collect_values(dataset, _EXTRA_DATASET_KEYS)
    params["resolution"] = [dataset.resolution.width, dataset.resolution.height]
    params["debug_dataset"] = False
    if dataset.kind != "dreambooth":
        del params["prior_loss_weight"]
    if dataset.file_format == "musubi-tuner":
        del params["min_bucket_reso"], params["max_bucket_reso"]
    subsets = []
    for subset in dataset.subsets:
        values = _collect_values(subset, (*_EXTRA_SUBSET_KEYS, *UNSUPPORTED_KEYS_BY_KIND[dataset.kind]))
        if "caption_extension" in values:
            extensions = subset.caption_extension or (DEFAULT_EXTENSION,)
            values["caption_extension"] = extensions[0] if len(extensions) == 1 else list(extensions)
        # sd-scripts has these two in its subsets as well
        subsets.append({**values, "validation_seed": 0, "validation_split": subset.validation_split})
    # sd-scripts resolves controlnet datasets as dreambooth ones
    kind = "finetuning" if dataset.kind == "finetuning" else "dreambooth"
    return {"kind": kind, "params": params, "subsets": subsets}


def _collect_values(config: DatasetConfig | SubsetConfig, excluded: Sequence[str]) -> dict[str, Any]:
    names = [item.name for item in fields(config) if item.name not in (*excluded, *_INTERNAL_FIELDS)]
    return {name: _convert_to_json(getattr(config, name)) for name in names}


def collect_extra_keys(dataset: DatasetConfig) -> dict[str, Any]:
    """Collect the non-default values of keys that sd-scripts does not have."""
    own = _collect_non_default(dataset, _EXTRA_DATASET_KEYS)
    subsets = [_collect_non_default(subset, _EXTRA_SUBSET_KEYS) for subset in dataset.subsets]
    return {**own, "subsets": subsets} if any(subsets) else own


def _collect_non_default(config: DatasetConfig | SubsetConfig, keys: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in keys}
    defaults = {name: DATASET_KEYS[name].option.default for name in keys}
    return {name: _convert_to_json(value) for name, value in values.items() if value != defaults[name]}


def _convert_to_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, ResolutionSchedule) else value
