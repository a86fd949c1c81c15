"""A LoRA that is made in five steps: a folder with its choices, its pictures, and the dataset file that follows.

The folder is ``loras/NAME`` below the first opened folder.  Its dataset file and run file are those of the command
line; nothing else is needed to train again without the page.
"""

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...atomic_files import write_atomic
from ...config.operating_systems import find_name_problem
from ...dataset.kohya_folders import parse_folder_name
from ...dataset.listing import is_image_file
from ...errors import UserError
from ...problems import Problem, report_file
from ..folders import OpenedFolders
from ..validate_requests import HEADER
from .uploads import make_safe_name

PROJECTS_FOLDER, PICTURES_FOLDER, OUTPUT_FOLDER = "loras", "pictures", "output"
STATE_FILE, DATASET_FILE, PROMPTS_FILE = "project.json", "dataset.toml", "prompts.txt"
MASK_FOLDERS = ("masks", "mask")
REGULARIZATION_FOLDERS = ("reg", "regularization", "regularisation")
IMAGE_FOLDERS = ("img", "images", "image")
"""The folder that kohya's programs make around ``10_name class``."""

DATASET_KEYS = ("resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps")
"""Settings that are written into the dataset file."""

_MAX_REPEATS = 1000


@dataclass(frozen=True)
class PictureFolder:
    """One folder of pictures, which is a subset of the dataset file."""

    path: Path
    names: Sequence[str]
    """The file names of its pictures."""
    repeats: int = 1
    class_tokens: str = ""
    is_reg: bool = False
    masks: Mapping[str, Path] = field(default_factory=dict)
    """The mask of each picture that has one, by the name of the picture."""
    mask_folder: Path | None = None

    @property
    def has_all_masks(self) -> bool:
        return bool(self.names) and len(self.masks) == len(self.names)


@dataclass(frozen=True)
class DatasetPlan:
    """The ``[[datasets]]`` of a project: sd-scripts has folders with and without masks in one of each.

    A folder with masks has its ``class_tokens`` in the table of the dataset, since that of a subset may not have them.
    """

    without_masks: Sequence[PictureFolder]
    with_masks: Mapping[str, Sequence[PictureFolder]]
    """The folders with masks, by their ``class_tokens``."""
    unused: Sequence[PictureFolder] = ()
    """Regularization pictures that no dataset can have: they need one with a folder to train on, and without masks."""

    @classmethod
    def build(cls, folders: Sequence[PictureFolder]) -> "DatasetPlan":
        with_masks = dict[str, list[PictureFolder]]()
        for each in folders:
            if each.has_all_masks:
                with_masks.setdefault(each.class_tokens, []).append(each)
        others = [each for each in folders if not each.has_all_masks]
        if with_masks and all(each.is_reg for each in others):
            return cls((), with_masks, others)
        return cls(others, with_masks)


@dataclass
class Project:
    """The choices of one LoRA."""

    folder: Path
    source: Path
    values: dict[str, Any] = field(default_factory=dict)
    """Settings as the fields of a form have them."""
    prompts: str = ""
    """The prompts of preview pictures, one a line."""
    model: str = ""
    """The id of the chosen model, as the step *Model* lists it; empty before the choice."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def dataset_path(self) -> Path:
        return self.folder / DATASET_FILE

    @property
    def is_uploaded(self) -> bool:
        """Whether the pictures were dropped into the page, and are in the project's own folder."""
        return self.source == self.folder / PICTURES_FOLDER

    def save(self) -> None:
        """Write the choices and the dataset file."""
        source = "" if self.is_uploaded else str(self.source)
        state = {"source": source, "values": self.values, "prompts": self.prompts, "model": self.model}
        write_atomic(self.folder / STATE_FILE, json.dumps(state, indent=1, ensure_ascii=False).encode())
        self.write_dataset()

    @classmethod
    def load(cls, folder: Path) -> "Project":
        """Read the choices of a project."""
        try:
            state = json.loads((folder / STATE_FILE).read_text("utf-8"))
            source = Path(state["source"]) if state["source"] else folder / PICTURES_FOLDER
            return cls(folder, source, dict(state["values"]), str(state["prompts"]), str(state["model"]))
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(report_file(folder / STATE_FILE, "cannot be read", "begin a new LoRA")) from None

    def list_folders(self) -> list[PictureFolder]:
        """List the folders with pictures: the chosen one, those in it, and kohya's ``img`` and ``reg``."""
        return [each for each in _iter_picture_folders(self.source) if each.names]

    def count_pictures(self) -> int:
        return sum(len(each.names) for each in self.list_folders() if not each.is_reg)

    def has_own_pictures(self) -> bool:
        """Whether the folder itself has pictures, or folders in the order of kohya's programs."""
        return any(
            each.path == self.source or parse_folder_name(each.path.name) or each.path.parent != self.source
            for each in self.list_folders()
        )

    def list_prompts(self) -> list[str]:
        """List the lines of the file of prompts; those of the built-in model get the size that it knows."""
        lines = [line.strip() for line in self.prompts.splitlines() if line.strip()]
        if self.values.get("pretrained_model_name_or_path"):
            return lines
        side = str(self.values.get("resolution", ""))
        size = f" --w {side} --h {side}" if side.isdecimal() else ""
        return [line if "--w" in line.split() else f"{line}{size}" for line in lines]

    def has_masks(self) -> bool:
        return any(each.has_all_masks for each in self.list_folders())

    def format_dataset(self) -> str:
        """Format the dataset file."""
        lines = [HEADER.rstrip(), "", "[general]", f"caption_extension = {_quote(self.find_caption_extension())}"]
        lines += [f"{key} = {_format_setting(key, self.values[key])}" for key in DATASET_KEYS if key in self.values]
        plan = self.plan_datasets()
        if plan.without_masks or not plan.with_masks:
            lines += ["", "[[datasets]]", *(line for each in plan.without_masks for line in self._format_subset(each))]
        for class_tokens, folders in plan.with_masks.items():
            lines += ["", "[[datasets]]", *([f"class_tokens = {_quote(class_tokens)}"] if class_tokens else [])]
            lines += [line for each in folders for line in self._format_subset(each)]
        return "\n".join(lines) + "\n"

    def plan_datasets(self) -> DatasetPlan:
        """Plan which folders are in a dataset together."""
        return DatasetPlan.build(self.list_folders())

    def list_notices(self) -> list[str]:
        """List what is not trained."""
        return [
            f"{each.path.relative_to(self.source).as_posix()}: these regularization pictures are not used, because all"
            " pictures to train on have masks; to use them, add a folder without masks or remove the masks"
            for each in self.plan_datasets().unused
        ]

    def _format_subset(self, folder: PictureFolder) -> Iterator[str]:
        yield from ("", "  [[datasets.subsets]]", f"  image_dir = {_quote(self._format_path(folder.path))}")
        if folder.repeats != 1:
            yield f"  num_repeats = {folder.repeats}"
        if folder.is_reg:
            yield "  is_reg = true"
        if folder.has_all_masks and folder.mask_folder is not None:
            yield f"  conditioning_data_dir = {_quote(self._format_path(folder.mask_folder))}"
        elif folder.class_tokens:
            yield f"  class_tokens = {_quote(folder.class_tokens)}"

    def write_dataset(self) -> None:
        """Write the dataset file, if it is another one now."""
        data = self.format_dataset().encode()
        with suppress(OSError):
            if self.dataset_path.read_bytes() == data:
                return
        write_atomic(self.dataset_path, data)

    def find_caption_extension(self) -> str:
        """Return the extension of the caption files that are there; ``.txt`` without any."""
        counts = {".txt": 0, ".caption": 0}
        for each in self.list_folders():
            for name in os.listdir(each.path):
                extension = Path(name).suffix.lower()
                if extension in counts:
                    counts[extension] += 1
        return ".caption" if counts[".caption"] > counts[".txt"] else ".txt"

    def _format_path(self, path: Path) -> str:
        """Format a path relative to the dataset file, if it is below it."""
        return (path.relative_to(self.folder) if path.is_relative_to(self.folder) else path).as_posix()


def _quote(text: str) -> str:
    """Quote a basic string of TOML."""
    return json.dumps(text, ensure_ascii=False)


def _format_setting(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value).strip()
    if not re.fullmatch(r"\d{1,5}([,x]\s*\d{1,5})?", text):
        raise UserError(Problem(key, f"{text!r}: expected a number of pixels, such as 512 or 768,512"))
    numbers = re.findall(r"\d+", text)
    return numbers[0] if len(numbers) == 1 else f"[{', '.join(numbers)}]"


def _iter_picture_folders(source: Path) -> Iterator[PictureFolder]:
    subfolders = _list_subfolders(source)
    yield _read_picture_folder(source, source, repeats=1)
    for path in subfolders:
        if path.name.lower() in REGULARIZATION_FOLDERS:
            for each in (path, *_list_subfolders(path)):
                yield _read_named_folder(each, source, is_reg=True)
        elif path.name.lower() in IMAGE_FOLDERS:
            for each in (path, *_list_subfolders(path)):
                if each.name.lower() not in MASK_FOLDERS:
                    yield _read_named_folder(each, source)
        elif path.name.lower() not in MASK_FOLDERS:
            yield _read_named_folder(path, source)


def _read_named_folder(path: Path, source: Path, *, is_reg: bool = False) -> PictureFolder:
    parsed = parse_folder_name(path.name) if "_" in path.name else None
    repeats, tokens = parsed if parsed is not None and 0 < parsed[0] <= _MAX_REPEATS else (1, "")
    return _read_picture_folder(path, source, repeats=repeats, class_tokens=tokens, is_reg=is_reg)


def _read_picture_folder(path: Path, source: Path, **facts: Any) -> PictureFolder:
    names = _list_pictures(path)
    if facts.get("is_reg"):  # whose whole pictures keep what the model knows
        return PictureFolder(path, names, **facts)
    candidates = [path / name for name in MASK_FOLDERS]
    candidates += [source / name / path.name for name in MASK_FOLDERS] + [source / name for name in MASK_FOLDERS]
    for folder in candidates if names else ():
        masks = {Path(name).stem: folder / name for name in _list_pictures(folder)}
        matched = {name: masks[Path(name).stem] for name in names if Path(name).stem in masks}
        if matched:
            return PictureFolder(path, names, masks=matched, mask_folder=folder, **facts)
    return PictureFolder(path, names, **facts)


def _list_pictures(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            # links may lead out of the opened folders: training reads them, the page does not
            visible = [each.name for each in entries if not each.name.startswith(".") and not each.is_symlink()]
    except OSError:
        return []
    return sorted(name for name in visible if is_image_file(name) and name.isprintable())


def _list_subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if not name.startswith(".") and name.isprintable()]


@dataclass
class ProjectShelf:
    """The projects below the first opened folder."""

    folders: OpenedFolders
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def root(self) -> Path:
        return self.folders.folders[0] / PROJECTS_FOLDER

    def list_projects(self) -> list[Path]:
        """List the folders of projects, the one that was changed last first."""
        found = [path for path in _list_subfolders(self.root) if (path / STATE_FILE).is_file()]
        return sorted(found, key=lambda path: -(path / STATE_FILE).stat().st_mtime)

    def create(self, name: str, source: Path | None, values: Mapping[str, Any]) -> Project:
        """Make the folder of a new project; a name that is taken gets a number."""
        wanted = make_safe_name(name) or "my-lora"
        if problem := find_name_problem(wanted, is_windows=True):
            raise UserError(Problem("output_name", f"{wanted!r} {problem}"))
        with self._lock:
            self.folders.resolve(self.root)
            folder = next(path for path in _iter_free_paths(self.root / wanted) if not path.exists())
            folder.mkdir(parents=True)
        project = Project(folder, source or folder / PICTURES_FOLDER, dict(values))
        project.source.mkdir(exist_ok=True)
        project.save()
        return project

    def open(self, key: str) -> Project:
        """Open the project of an address."""
        folder = self.folders.resolve_key(key)
        if folder.parent != self.root.resolve() or not (folder / STATE_FILE).is_file():
            raise UserError(f"{key}: no LoRA was begun there; begin a new one")
        project = Project.load(folder)
        self.folders.resolve(project.source)
        return project


def _iter_free_paths(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1
