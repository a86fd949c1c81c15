"""Runs of a row of the covering array over settings: dry checks, training, and the comparison with one plain process.

``PYTHONPATH=.:tests/support python tests/support/pair_runs.py 3/8`` runs a slice of the rows and prints a table; ``all``
runs all of them, ``list`` prints what is covered and what is refused.
"""

import hashlib
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from clip_files import write_clip
from covering_array import CoveringArray, Pair, Row
from filelock import FileLock
from pair_factors import GLOBAL_BATCH, MAX_RANKS, STEPS, Factor, Value, list_factors
from PIL import Image, ImageChops
from rank_processes import CONTEXT, run_on_ranks
from resumed_runs import copy_as_killed
from safetensors.torch import load_file
from training_runs import max_relative_difference, write_images

from library.atomic_files import write_atomic
from library.dataset.controls import find_settings_that_controls_lack
from library.dataset.dataset_config import load_dataset_config
from library.distributed.parallel_dims import build_parallel_dims
from library.distributed.validate_launch import validate_distributed
from library.distributed.world import World
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.training import validate_model
from library.training.preflight import RunFacts, find_settings_problems, list_run_checks, load_settings

ROOT = Path(__file__).resolve().parents[2]
COMMON = (
    *f"--max_train_steps {STEPS} --learning_rate 0.1 --network_dim 4 --seed 3 --quiet".split(),
    *"--mixed_precision no --output_name lora".split(),
)
SAVING = ("--save_every_n_steps", "1", "--save_state")
RESUMED_STEP = 2
MAX_DIFFERENCE = 1e-5
"""Of adapter weights, relative to the largest of a tensor."""
MAX_AMPLIFIED_DIFFERENCE = 1e-4
"""The same for models that amplify rounding: up to twice the difference that halved batches make in one process."""
MAX_LOSS_DIFFERENCE = 1e-4
MAX_PIXEL_DIFFERENCE = 3
PICTURE_INPUTS = ("controls", "layers")
"""What pictures may have beside themselves, by the model."""
CLIP_INPUTS = {"clips": frozenset({"clips"}), "control_clips": frozenset({"clips", "control_clips"})}
NUM_CONTROL_CLIPS = 2
NUM_FRAMES = 17
"""Of clips, as every model of clips has them."""
MERGED_FLAGS = ("--network_args", "--optimizer_args")
"""Flags that several values of a row may have, each with arguments of its own."""


@dataclass(frozen=True)
class Case:
    """The settings of a row."""

    factors: tuple[Factor, ...]
    row: Row
    accumulated: int = 1
    """Micro-batches of a step of a reference whose micro-batches are as small as those of the row."""

    @property
    def values(self) -> Mapping[str, Value]:
        return {factor.name: factor.values[index] for factor, index in zip(self.factors, self.row, strict=True)}

    @property
    def name(self) -> str:
        settings = (f"{name} {value.name}" for name, value in self.values.items() if value != self.get_default(name))
        return "; ".join(settings)

    def get_default(self, factor_name: str) -> Value:
        return next(factor.values[0] for factor in self.factors if factor.name == factor_name)

    @property
    def ranks(self) -> int:
        ranks = 1
        for value in self.values.values():
            ranks *= value.ranks
        return ranks

    @property
    def batch_size(self) -> int:
        splits = [value.ranks if value.ranks > 1 else 2 for value in self.values.values() if value.splits_batch]
        batch = GLOBAL_BATCH // self.accumulated
        for count in splits:
            batch //= count
        return batch

    @property
    def reference(self) -> "Case":
        """The same training in one process, with the defaults of everything that cannot change the result."""
        return self._replace_others(lambda factor: factor.changes_result)

    @property
    def split_reference(self) -> "Case":
        """The reference with batches of the row's sizes, whose matrix products are rounded alike."""
        reference = self._replace_others(lambda factor: factor.changes_result or factor.changes_rounding)
        return replace(reference, accumulated=GLOBAL_BATCH // self.batch_size)

    def _replace_others(self, is_kept: Callable[[Factor], bool]) -> "Case":
        row = (index if is_kept(factor) else 0 for factor, index in zip(self.factors, self.row, strict=True))
        return Case(self.factors, tuple(row))

    @property
    def data_kinds(self) -> frozenset[str]:
        return frozenset(filter(None, (value.data for value in self.values.values())))

    def build_flags(self, workspace: "Workspace") -> list[str]:
        """Build the command line, without the folder of the output."""
        merged: dict[str, list[str]] = {flag: [] for flag in MERGED_FLAGS}
        flags = [*COMMON, "--train_batch_size", str(self.batch_size)]
        flags += ["--gradient_accumulation_steps", str(self.accumulated)] if self.accumulated > 1 else []
        for value in self.values.values():
            words = list(value.flags)
            for flag in MERGED_FLAGS:
                if flag in words:
                    start = words.index(flag)
                    end = next((at for at in range(start + 1, len(words)) if words[at].startswith("--")), len(words))
                    merged[flag] += words[start + 1 : end]
                    del words[start:end]
            flags += words
        flags += [word for flag, words in merged.items() if words for word in (flag, *words)]
        family = self.values["family"]
        kinds = self.data_kinds | workspace.find_inputs(family)
        flags += ["--dataset_config", str(workspace.write_dataset(kinds))]
        if "prompts" in self.data_kinds:
            flags += ["--sample_prompts", str(workspace.find_prompts(family))]
        return flags


@dataclass
class Workspace:
    """A folder with the datasets, the references that rows share, and the output of runs."""

    folder: Path
    references: dict[tuple[Any, ...], Path] = field(default_factory=dict)
    inputs: dict[str, frozenset[str]] = field(default_factory=dict)
    prompts: dict[str, Path] = field(default_factory=dict)

    def find_inputs(self, family: Value) -> frozenset[str]:
        """Find what the dataset has for this model: ``controls`` or ``layers`` of pictures, clips, or pictures alone."""
        if family.name not in self.inputs:
            kinds = [CLIP_INPUTS[family.data]] if family.data else [frozenset({kind}) for kind in PICTURE_INPUTS]
            self.inputs[family.name] = next((kind for kind in kinds if self._takes(family, kind)), frozenset())
        return self.inputs[family.name]

    def _takes(self, family: Value, kinds: frozenset[str]) -> bool:
        loaded = load_settings(["--dataset_config", str(self.write_dataset(kinds)), *family.flags])
        return not find_settings_problems(loaded)

    def write_dataset(self, kinds: frozenset[str]) -> Path:
        """Write the dataset file for these kinds of data, unless it is there."""
        names = sorted(kinds - {"prompts"})
        folder = self.folder / "_".join(["data", *names])
        if not folder.exists():
            _write_dataset(folder, names)
        return folder / "dataset.toml"

    def find_prompts(self, family: Value) -> Path:
        """Find the file of two prompts that this model accepts, with the images that it needs."""
        if family.name not in self.prompts:
            inputs = self.find_inputs(family)
            paths = [self._write_prompts(inputs, key) for key in ("--ci" if inputs else "", "--i")]
            self.prompts[family.name] = next((path for path in paths if self._samples(family, path)), paths[0])
        return self.prompts[family.name]

    def _samples(self, family: Value, prompts: Path) -> bool:
        data = self.write_dataset(self.find_inputs(family))
        words = ["--dataset_config", str(data), "--sample_prompts", str(prompts), "--sample_every_n_steps", "2"]
        return not find_settings_problems(load_settings([*words, *family.flags]))

    def _write_prompts(self, inputs: frozenset[str], image_key: str) -> Path:
        """Write a file of two prompts, with an image by this key if there is one."""
        path = self.folder / ("_".join(["prompts", *sorted(inputs), image_key.strip("-")]) + ".txt")
        if not path.exists():
            data = self.write_dataset(inputs).parent
            image = data / ("controls" if "controls" in inputs else "images") / "01.png"
            images = f" {image_key} {image}" if image_key else ""
            sizes = ("--w 96 --h 64 --d 1 --s 2 --l 3", "--n red --w 64 --h 96 --d 2 --s 2 --l 3")
            if "clips" in inputs:
                clips = f" --cn {data / 'controls' / '01'}"
                images = f" --i {data / 'images' / '01.png'}"
                images += "".join(
                    f"{clips}_{number}.mp4" for number in range(NUM_CONTROL_CLIPS * ("control_clips" in inputs))
                )
                sizes = tuple(f"{size} --f {NUM_FRAMES}" for size in sizes)
            if "layers" in inputs:  # as large as the image
                sizes = ("--f 2 --d 1 --s 2 --l 3", "--n red --f 1 --d 2 --s 2 --l 3")
            path.write_text("".join(f"a red circle {size}{images}\n" for size in sizes))
        return path

    def clear(self) -> None:
        """Remove the output of runs, but not what rows share."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)


def _write_dataset(folder: Path, kinds: Sequence[str]) -> None:
    """Write two buckets, of which each divides into whole steps, and images that are held out."""
    path = write_images(folder, {(96, 64): 2 * GLOBAL_BATCH, (64, 96): GLOBAL_BATCH})
    text = path.read_text().rpartition("[[datasets.subsets]]")[0]
    text = text.replace("bucket_reso_steps = 16", "bucket_reso_steps = 32")  # a step that every model has
    text += _write_subset(folder, kinds)
    if "validation" in kinds:
        held_out = folder / "held_out"
        (held_out / "images").mkdir(parents=True)
        for file in sorted((folder / "images").iterdir())[:6]:
            shutil.copy(file, held_out / "images")
        for file in (held_out / "images").glob("*.png"):  # other pictures than those that are trained
            ImageChops.offset(Image.open(file), 7, 5).save(file)
        text += _write_subset(held_out, kinds) + "validation_split = 1.0\n"
    path.write_text(text)
    if "layers" in kinds:
        for file in sorted(folder.rglob("images/*.png")):
            _write_layers(file)


def _write_clips(folder: Path, *, has_controls: bool) -> None:
    """Write a clip for each picture of a folder, with its caption, and control clips of other shades."""
    for number, file in enumerate(sorted((folder / "images").glob("*.png"))):
        clip, size = folder / "clips" / f"{file.stem}.mp4", Image.open(file).size
        shade = 4 * number + 2 * (folder.name == "held_out")
        write_clip(clip, 24, 30, size, shade=shade)
        shutil.copy(file.with_suffix(".txt"), clip.parent)
        for control in range(NUM_CONTROL_CLIPS * has_controls):
            path = folder / "controls" / f"{file.stem}_{control}.mp4"
            write_clip(path, 24, 30, size, shade=shade + 60 * (control + 1))


def _write_layers(file: Path) -> None:
    """Write two layers of a picture beside it."""
    picture = Image.open(file).convert("RGB")
    for number in range(2):
        picture.putalpha(Image.linear_gradient("L").rotate(90 * number).resize(picture.size))
        picture.save(file.with_name(f"{file.stem}_{number}.png"))


def _write_subset(folder: Path, kinds: Sequence[str]) -> str:
    """Give the images of a folder what these kinds of data are, and return the lines of the subset."""
    lines = ["[[datasets.subsets]]", f"image_dir = '{folder / 'images'}'"]
    if "clips" in kinds:
        has_controls = "control_clips" in kinds
        _write_clips(folder, has_controls=has_controls)
        lines[1:] = [f"video_dir = '{folder / 'clips'}'", f"target_frames = [{NUM_FRAMES}]"]
        lines += [f"control_directory = '{folder / 'controls'}'"] * has_controls
    for kind, key in {"masks": "conditioning_data_dir", "controls": "control_directory"}.items():
        if kind in kinds:
            (folder / kind).mkdir()
            lines.append(f"{key} = '{folder / kind}'")
    lines += ["multiple_target = true"] if "layers" in kinds else []
    for number, file in enumerate(sorted((folder / "images").glob("*.png"))):
        image = Image.open(file).convert("RGB")
        gradient = Image.linear_gradient("L").resize(image.size).rotate(90 * (number % 4))
        if "masks" in kinds:
            gradient.save(folder / "masks" / file.name)
        if "controls" in kinds:
            ImageChops.invert(image).save(folder / "controls" / file.name)
        if "alpha" in kinds:
            image.putalpha(gradient)
            image.save(file)
    return "\n".join([*lines, ""])


def find_problem(case: Case, workspace: Workspace) -> str:
    """Say why a run with these settings would be refused, or that a value would have no effect; empty if neither."""
    if case.ranks > MAX_RANKS:
        return f"more than {MAX_RANKS} processes"
    flags = case.build_flags(workspace)
    try:
        loaded = load_settings([*flags, "--output_dir", str(workspace.folder / "none")])
        problems = list(find_settings_problems(loaded))
        config, world = loaded.config, World(world_size=case.ranks)
        problems += [] if problems else validate_distributed(config, world)
        if not problems:
            detected = detect_model(config.model)
            family = FAMILIES.get(detected.family)(config.model)
            dims = build_parallel_dims(config.parallel, case.ranks)
            is_zero3 = bool(config.deepspeed.deepspeed) and config.deepspeed.zero_stage == 3
            has_full_model = not (config.sharding.fsdp or is_zero3) and dims.cp == dims.model_parallel_size
            engine = "DeepSpeed" if config.deepspeed.deepspeed else "FSDP" if config.sharding.fsdp else ""
            facts = RunFacts(family, detected, has_full_model, not is_zero3, optimizer_sharding_engine=engine)
            problems += [problem for check in list_run_checks() for problem in check(config, facts)]
            datasets = load_dataset_config(config.data).datasets
            pairs = [(dataset, subset) for dataset in datasets for subset in dataset.subsets if subset.control_key]
            problems += [problem for pair in pairs for problem in find_settings_that_controls_lack(*pair)]
    except ConfigError as error:
        problems = error.problems
    if problems:
        return str(problems[0])
    chosen = {word for name, value in case.values.items() if value != case.get_default(name) for word in value.flags}
    idle = [f"{place}: no effect: {reason}" for place, reason in loaded.unused if {*str(place).split()} & chosen]
    return idle[0] if idle else ""


def train_case(*flags: str) -> float:
    """Train in this process as the command line does; return the CPU seconds that it took."""
    from library.training.run import run_training

    torch.use_deterministic_algorithms(False)
    loaded = load_settings(flags)
    if problems := find_settings_problems(loaded):
        raise ConfigError(problems)
    run_training(loaded.config, loaded.locations)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


@dataclass
class Outcome:
    """What a row gave."""

    difference: float
    seconds: float
    """CPU time of all its processes."""
    failures: list[str] = field(default_factory=list)


def run_case(case: Case, workspace: Workspace) -> Outcome:
    """Train the row and its reference, unless that is there, and compare them."""
    workspace.clear()
    folder, resume = workspace.folder / "run", case.values["resume"].name
    flags = case.build_flags(workspace)
    reference, seconds = get_reference(case.reference, workspace, saves=resume == "of one process")
    outcome = Outcome(float("nan"), seconds)
    if resume == "of one process":
        copy_as_killed(reference, folder, RESUMED_STEP)
    outcome.seconds += _run(
        case, workspace, folder, [*flags, *(SAVING if resume != "none" else ())], resumes=resume == "of one process"
    )
    if resume == "same layout":
        resumed = copy_as_killed(folder, workspace.folder / "run" / "resumed", RESUMED_STEP)
        outcome.seconds += _run(case, workspace, resumed, [*flags, *SAVING], resumes=True)
        outcome.failures += _compare_resumed(folder, resumed)
    difference, limit = compute_difference(reference, folder), MAX_DIFFERENCE
    if difference >= limit and case.split_reference != case.reference:
        split, seconds = get_reference(case.split_reference, workspace, saves=False)
        outcome.seconds += seconds
        difference = min(difference, compute_difference(split, folder))
    if difference >= limit:
        halved, seconds = get_reference(replace(case.reference, accumulated=2), workspace, saves=False)
        outcome.seconds += seconds
        limit = min(MAX_AMPLIFIED_DIFFERENCE, max(limit, 2 * compute_difference(reference, halved)))
    outcome.difference = difference
    outcome.failures += [f"the adapter differs by {difference:.1e}"] if not difference < limit else []
    compare(reference, folder, outcome, is_resumed=resume == "of one process")
    return outcome


def _run(case: Case, workspace: Workspace, folder: Path, flags: Sequence[str], *, resumes: bool = False) -> float:
    words = [*flags, "--output_dir", str(folder), *(["--auto_resume"] if resumes else [])]
    environment = {}
    if "--deepspeed" in flags:  # weights as small as those of tiny models would stay whole under ZeRO 3
        path = workspace.folder / "deepspeed.json"
        stage = int(flags[list(flags).index("--zero_stage") + 1])
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        path.write_text(json.dumps({"zero_optimization": zero}))
        environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    return sum(run_on_ranks(case.ranks, train_case, *words, environment=environment, daemon=False))


def get_reference(reference: Case, workspace: Workspace, *, saves: bool) -> tuple[Path, float]:
    """Return the folder of a reference, and the CPU seconds that training it took now."""
    key = reference.row, reference.accumulated, saves
    if key in workspace.references:
        return workspace.references[key], 0.0
    folder = workspace.folder / f"reference{len(workspace.references)}"
    seconds = _run(reference, workspace, folder, [*reference.build_flags(workspace), *(SAVING if saves else ())])
    workspace.references[key] = folder
    return folder, seconds


def compute_difference(reference: Path, folder: Path) -> float:
    """Compute the largest relative difference of the last adapter and of its average."""
    return max(
        max_relative_difference(load_file(path), load_file(folder / path.name))
        for path in reference.glob("lora*.safetensors")
        if "-step" not in path.name
    )


def compare(reference: Path, folder: Path, outcome: Outcome, *, is_resumed: bool) -> None:
    """Compare losses and previews."""
    expected, actual = (read_losses(each) for each in (reference, folder))
    if expected.keys() != actual.keys():
        outcome.failures.append(f"metrics: {sorted(expected.keys() ^ actual.keys())}")
    for key in expected.keys() & actual.keys():
        if abs(expected[key] - actual[key]) > MAX_LOSS_DIFFERENCE * max(abs(expected[key]), 1e-3):
            outcome.failures.append(f"{key}: {actual[key]} instead of {expected[key]}")
    previews = {"_".join(path.stem.split("_")[:-2]): path for path in (reference / "sample").glob("*.png")}
    others = {"_".join(path.stem.split("_")[:-2]): path for path in (folder / "sample").glob("*.png")}
    if previews.keys() - others.keys() and not is_resumed:
        outcome.failures.append(f"previews: {sorted(previews)} and {sorted(others)}")
    for name in previews.keys() & others.keys():
        images = (Image.open(each[name]).convert("RGB") for each in (previews, others))
        largest = max(high for _, high in ImageChops.difference(*images).getextrema())
        if largest > MAX_PIXEL_DIFFERENCE:
            outcome.failures.append(f"preview {name} differs by {largest} of 255")


def read_losses(folder: Path) -> dict[tuple[int, str], float]:
    """Read the losses of training and validation by step."""
    lines = [json.loads(line) for line in (folder / "lora.metrics.jsonl").read_text("utf-8").splitlines()]
    names = ("loss/current", "validation/loss")
    return {(line["step"], name): line[name] for line in lines for name in names if name in line}


def _compare_resumed(folder: Path, resumed: Path) -> Iterator[str]:
    for path in folder.glob("lora*.safetensors"):
        one, other = load_file(path), load_file(resumed / path.name)
        if one.keys() != other.keys() or any(not torch.equal(one[key], other[key]) for key in one):
            yield f"{path.name} of the resumed run differs by {max_relative_difference(one, other):.1e}"


def speed_up_dry_checks() -> None:
    """Build each model on the meta device once; checks only look at it."""
    load, models = validate_model.load_components_on_meta, {}

    def load_once(detected: Any, names: Sequence[str]) -> Any:
        key = repr(detected), tuple(names)
        if key not in models:
            models[key] = load(detected, names)
        return models[key]

    validate_model.load_components_on_meta = load_once


def build_array(workspace: Workspace) -> tuple[CoveringArray, tuple[Factor, ...]]:
    """Build the array of the settings; its rows are generated as they are asked for."""
    factors = tuple(list_factors())
    speed_up_dry_checks()
    find = cache(lambda row: find_problem(Case(factors, row), workspace))
    return CoveringArray([len(factor.values) for factor in factors], find), factors


def start_warm_server() -> None:
    """Have the server of test processes import every model family; without effect once it runs."""
    CONTEXT.set_forkserver_preload(["tests.support.warm_server", "tests.support.warm_families"])


@dataclass(frozen=True)
class StoredArray:
    """The rows of the covering array, and the pairs that are in none of them."""

    rows: list[Row]
    refused_pairs: set[Pair]
    unreached: set[Pair]


def load_array() -> StoredArray:
    """Generate all rows, which takes minutes, or read what was generated on this machine from the same source files."""
    folders = (ROOT / "library", ROOT / "tests" / "support")
    sources = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".json"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    stored = Path(tempfile.gettempdir()) / f"lorikeet-pairs-{digest}.json"
    with FileLock(f"{stored}.lock"):  # workers of pytest-xdist collect the rows at the same time
        if not stored.exists():
            with tempfile.TemporaryDirectory() as folder:
                array, _ = build_array(Workspace(Path(folder)))
                rows = list(array.iter_rows())
                pairs = ([sorted(pair) for pair in part] for part in (array.refused_pairs, array.unreached))
                write_atomic(stored, json.dumps([rows, *pairs]).encode())
    rows, refused, unreached = json.loads(stored.read_text("utf-8"))
    refused_pairs, unreached_pairs = ({frozenset(map(tuple, pair)) for pair in part} for part in (refused, unreached))
    return StoredArray([tuple(row) for row in rows], refused_pairs, unreached_pairs)


def format_settings(factors: Sequence[Factor], settings: "frozenset[tuple[int, int]]") -> str:
    return " with ".join(f"{factors[f].name} {factors[f].values[v].name!r}" for f, v in sorted(settings))


def select_slice(rows: Sequence[Any], name: str) -> list[Any]:
    """Select ``3/8``, the third of eight slices, or ``all``."""
    if name == "all":
        return list(rows)
    number, _, count = name.partition("/")
    return list(rows)[int(number) - 1 :: int(count)]


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def describe_array(workspace: Workspace) -> Iterator[str]:
    """Describe what the rows cover, and what is refused."""
    array, factors = build_array(workspace)
    start = time.process_time()
    count = sum(1 for _ in array.iter_rows())
    impossible = array.refused_pairs | array.unreached
    yield (
        f"{len(factors)} factors, {sum(array.sizes)} values, {len(array.pairs)} pairs, of which {len(impossible)} are"
        f" refused; the others are in {count} rows ({time.process_time() - start:.0f} s to build)"
    )
    for settings, problem in array.refused.items():
        yield f"refused: {format_settings(factors, settings)}: {problem}"
    for settings in array.unreached:
        yield f"refused wherever it was tried: {format_settings(factors, settings)}"


def main(word: str) -> None:
    workspace = Workspace(Path(tempfile.mkdtemp(prefix="pairs-")))
    if word == "list":
        for line in describe_array(workspace):
            print_line(line)
        return
    start_warm_server()
    factors = tuple(list_factors())
    for number, row in select_slice(list(enumerate(load_array().rows)), word):
        case, start = Case(factors, row), time.monotonic()
        try:
            outcome = run_case(case, workspace)
        except Exception as error:
            outcome = Outcome(float("nan"), 0, [str(error).strip()[-1500:]])
        seconds = f"{outcome.seconds:.1f} s CPU, {time.monotonic() - start:.1f} s"
        verdict = "FAILED" if outcome.failures else "ok"
        print_line(f"{number} {verdict} {outcome.difference:.1e} {seconds}: {case.name}")
        for failure in outcome.failures:
            print_line("    " + failure.replace("\n", "\n    "))


if __name__ == "__main__":
    main(sys.argv[1])
