"""Control images and clips: match them to their pictures or clips by name, and inspect them."""

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from ..problems import Problem, report_file
from ..storage.remote_path import resolve_links
from .clip_decoding import VIDEO_EXTENSIONS, is_video_file
from .clip_inspection import InspectedClip, build_clip_inspector
from .clip_windows import ClipFrames, FrameRule
from .image_inspection import InspectedImage, build_image_inspector
from .image_ref import ImageRef
from .listing import ListedImage, format_count, format_first_names, is_image_file
from .mask_files import MaskKey, get_relative_path, has_same_aspect_ratio, list_image_names, normalize_stem
from .scan import scan_images
from .scan_cache import ScanRoots
from .schema import DatasetConfig, SubsetConfig

CONTROL_COLUMN = "control_path"
"""Column of metadata files, as in musubi-tuner; further control images are in ``control_path_1`` and so on."""

MASK_FROM_IMAGE = "mask"
"""The value of ``control_from_image`` that draws masks, for inpainting models."""

CONTROLS_FROM_IMAGE: Mapping[str, bool] = {
    "canny": False,
    "inpainting": True,
    "colorization": False,
    "deblurring": True,
    MASK_FROM_IMAGE: True,
}
"""Values of ``control_from_image``, and whether the control image is another one each time."""

GREY = "grey"
"""What is made as the control clip of a clip that has reference images alone."""

_NUMBERED_COLUMN = re.compile(r"(?:control_path|control_image)(?:_(\d+))?")
_NUMBERED_MEMBER = re.compile(r"\.control(?:_(\d+))?\.\w+")
_NUMBERED_STEM = re.compile(r"(.+)_(\d+)")
_KEYS_THAT_CHANGE_THE_PICTURE = {"color_aug": "recolors the picture and not its control images"}


@dataclass(frozen=True, slots=True)
class ControlImage:
    """A control image, as inspected at the start of the run."""

    image: ImageRef
    size: tuple[int, int]  # (width, height) in EXIF orientation
    content_hash: str  # the hash of the file
    made: str = ""
    """The way the control image is derived from the picture itself: a key of ``CONTROLS_FROM_IMAGE``; or ``GREY``."""
    clip: ClipFrames | None = None
    """The frames of a control clip."""
    is_mask: bool = False
    """Whether this is the file of a mask of an inpainting model."""
    has_alpha: bool = False
    """Whether this is a layer, whose alpha channel is read."""
    square_side: int = 0
    """The side in pixels of a square that this is brought to, whatever the size of the picture; 0: it is not."""
    is_reference: bool = False
    """Whether this is a reference image of a clip, which shows something of it and is no frame."""


@dataclass(frozen=True)
class ControlLimits:
    """The numbers of control images that a model takes for a picture."""

    fewest: int
    most: int
    title: str
    editing_models: str
    """The models that take control images."""
    are_masks: bool = False
    group_size: int = 1
    """How many control images there are more of, if there are more than the fewest."""
    have_alpha: bool = False
    """Whether the alpha channel of control images is read."""
    are_clips: bool = False
    """Whether the model makes videos, whose controls are clips."""
    are_layers: bool = False
    """Whether the model is trained on pictures with layers, which count as their control images."""
    most_references: int = 0
    """The most reference images beside the controls of a clip."""
    reference_models: str = ""
    """The models that take reference images."""
    rejection: Problem | None = None
    """The problem of a run in which a picture has control images, which files may list: settings do not tell."""

    def describe_reference_problem(self, count: int) -> str | None:
        """Say what is wrong with this number of reference images, which are no control clips."""
        if count <= self.most_references:
            return None
        if not self.most_references:
            way = f"{self.reference_models} does; a folder with one image is a control clip"
            return f"{self.title} takes no reference images beside control clips; {way}"
        return f"{self.title} takes at most {format_count(self.most_references, 'reference image')}, not {count}"

    def describe_problem(self, count: int) -> str | None:
        """Say what is wrong with this number of control images."""
        noun, picture = ("control clip", "clip") if self.are_clips else ("control image", "picture")
        if count < self.fewest:
            if self.are_masks:
                way = f"set control_from_image = {MASK_FROM_IMAGE!r}, which draws them, or control_directory"
                return f"{self.title} needs a mask for each picture; {way}"
            if self.are_layers:
                way = "set multiple_target = true, and put NAME_0.png, NAME_1.png ... beside NAME.png"
                return f"{self.title} needs the layers of each picture; {way}"
            return f"{self.title} needs {format_count(self.fewest, noun)} for each {picture}, not {count}"
        if count <= self.most and (count - self.fewest) % self.group_size:
            counts = " or ".join(map(str, range(self.fewest, self.most + 1, self.group_size)))
            return f"{self.title} takes {counts} {noun}s for a {picture}, not {count}"
        if count <= self.most:
            return None
        if not self.most:
            return f"{self.title} takes no {noun}s; {self.editing_models} do"
        return f"{self.title} takes at most {format_count(self.most, noun)} for a {picture}, not {count}"


@dataclass(frozen=True)
class ColumnsWithControls(Container[str]):
    """The columns in ``names`` and those of control images, whose number is not known before the file is read."""

    names: Container[str]

    def __contains__(self, name: object) -> bool:
        return name in self.names or is_control_column(str(name))


def is_control_column(name: str) -> bool:
    """Whether a column of a metadata file lists control images."""
    return name.startswith(CONTROL_COLUMN) and _NUMBERED_COLUMN.fullmatch(name) is not None


def sort_control_columns(names: Iterable[str]) -> list[str]:
    """The columns of control images in the order of their numbers; ``ValueError`` if two have the same."""
    return _sort_by_number(names, _NUMBERED_COLUMN, "columns")


def sort_control_members(extensions: Iterable[str]) -> list[str]:
    """The control images among the members of a sample in a tar shard, as ``sort_control_columns``."""
    return _sort_by_number(extensions, _NUMBERED_MEMBER, "members")


def _sort_by_number(names: Iterable[str], pattern: re.Pattern[str], what: str) -> list[str]:
    by_number: dict[int, str] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            first = by_number.setdefault(int(match[1] or 0), name)
            if first != name:
                raise ValueError(f"{what} {first} and {name} are the same control image; remove one of them")
    return [by_number[number] for number in sorted(by_number)]


@dataclass
class ControlMatches:
    """The control images of each picture in the order of their numbers, and what could not be matched."""

    controls: dict[ImageRef, tuple[ImageRef, ...]] = field(default_factory=dict)
    missing: dict[ImageRef, str] = field(default_factory=dict)  # why a picture has none
    unmatched: list[Path] = field(default_factory=list)  # control images without a picture


def match_controls(images: Sequence[ImageRef], image_dir: Path, control_dir: Path) -> ControlMatches:
    """Match each picture to the files named as it is, or with ``_0``, ``_1`` ... added; opens no file."""
    matches = ControlMatches()
    by_parent: defaultdict[PurePath, list[ImageRef]] = defaultdict(list)
    for image in images:
        by_parent[get_relative_path(image, image_dir).parent].append(image)
    for parent, members in by_parent.items():
        _match_in_dir(matches, members, image_dir / parent, control_dir / parent)
    return matches


def _match_in_dir(matches: ControlMatches, images: Sequence[ImageRef], image_dir: Path, control_dir: Path) -> None:
    all_stems = set(map(normalize_stem, [*list_image_names(image_dir), *(image.name for image in images)]))
    numbered: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in list_image_names(control_dir):
        stem = normalize_stem(name)
        match = _NUMBERED_STEM.fullmatch(stem)
        # a.png and a_1.png may be two pictures: a file belongs to the picture of the longest name
        if stem in all_stems or match is None or match[1] not in all_stems:
            numbered[stem].append((-1, name))
        else:
            numbered[match[1]].append((int(match[2]), name))
    for image in images:
        members = sorted(numbered.get(normalize_stem(image.name), []))
        same = [name for number, name in members if [other for other, _ in members].count(number) > 1]
        if same:
            reason = f"has several control images of one number in {control_dir}: {', '.join(same)}; keep one of them"
            matches.missing[image] = reason
        elif members:
            matches.controls[image] = tuple(ImageRef(control_dir, name) for _, name in members)
        else:
            stem = image.name.rpartition(".")[0]
            matches.missing[image] = (
                f"has no control image: no {stem}.png, {stem}_0.png, or with another image extension, in {control_dir}"
            )
    strays = [name for stem, members in numbered.items() if stem not in all_stems for _, name in members]
    matches.unmatched += [control_dir / name for name in sorted(strays)]


def match_control_clips(clips: Sequence[ImageRef], video_dir: Path, control_dir: Path) -> ControlMatches:
    """Match each clip to the file of its name, the folder of frames of its stem, or a video with another extension.

    Further ones are named as the clip with ``_0``, ``_1`` ... added.  Images of these names are its reference images.
    """
    matches = ControlMatches()
    by_parent: defaultdict[PurePath, list[ImageRef]] = defaultdict(list)
    for clip in clips:
        by_parent[get_relative_path(clip, video_dir).parent].append(clip)
    for parent, members in by_parent.items():
        names = [*(clip.name for clip in members), *filter(is_video_file, _list_names(video_dir / parent))]
        stems = {*map(normalize_stem, names)}
        numbered = _find_numbered_clips(control_dir / parent, stems)
        references = _find_references(control_dir / parent, stems)
        for clip in members:
            stem = normalize_stem(clip.name)
            _match_control_clips_of(matches, clip, control_dir / parent, numbered[stem], references[stem])
    return matches


def _find_references(folder: Path, stems: Container[str]) -> Mapping[str, dict[int, list[str]]]:
    """Find the images ``NAME``, ``NAME_0``, ``NAME_1`` ... of the clip ``NAME``, the longest of ``stems``."""
    found: defaultdict[str, dict[int, list[str]]] = defaultdict(dict)
    for name in list_image_names(folder) if folder.is_dir() else []:
        stem = normalize_stem(name)
        match = _NUMBERED_STEM.fullmatch(stem)
        if stem in stems:
            found[stem].setdefault(-1, []).append(name)
        elif match and match[1] in stems:
            found[match[1]].setdefault(int(match[2]), []).append(name)
    return found


def _match_control_clips_of(
    matches: ControlMatches,
    clip: ImageRef,
    folder: Path,
    numbered: Mapping[int, Sequence[str]],
    references: Mapping[int, Sequence[str]],
) -> None:
    """Match a clip to its control clips in a folder, of which some are numbered, and to its reference images."""
    stem = clip.name.rpartition(".")[0] or clip.name
    names = [clip.name, stem, *(f"{stem}{extension}" for extension in VIDEO_EXTENSIONS)]
    names += [f"{stem}{extension.upper()}" for extension in VIDEO_EXTENSIONS]
    first = [name for name in names if (folder / name).exists()][:1]
    same = [", ".join(names) for found in (numbered, references) for names in found.values() if len(names) > 1]
    if same:
        matches.missing[clip] = f"has several control clips of one number in {folder}: {same[0]}; keep one of them"
    elif not first and not numbered and not references:
        matches.missing[clip] = f"has no control clip: no {stem}.mp4, no folder {stem}, in {folder}"
    else:
        ordered = [files[number][0] for files in (numbered, references) for number in sorted(files)]
        found = (*first, *ordered)
        matches.controls[clip] = tuple(ImageRef(folder, name) for name in found)


def _find_numbered_clips(folder: Path, stems: Container[str]) -> Mapping[str, dict[int, list[str]]]:
    """Find the videos and folders of frames ``NAME_0``, ``NAME_1`` ... of the clip ``NAME``, by their numbers.

    a.mp4 and a_1.mp4 may be two clips, among ``stems``: a control clip belongs to the clip of the longest name.
    """
    found: defaultdict[str, dict[int, list[str]]] = defaultdict(dict)
    for name in _list_names(folder):
        if not is_video_file(name) and not (folder / name).is_dir():
            continue
        stem = normalize_stem(name) if is_video_file(name) else unicodedata.normalize("NFC", name)
        match = _NUMBERED_STEM.fullmatch(stem)
        if match and match[1] in stems and stem not in stems:
            found[match[1]].setdefault(int(match[2]), []).append(name)
    return found


def _list_names(folder: Path) -> list[str]:
    return sorted(each for each in os.listdir(folder) if not each.startswith(".")) if folder.is_dir() else []


def match_layers(images: Iterable[str], has_caption: Callable[[str], bool]) -> dict[str, tuple[str, ...]]:
    """Match the images of a folder to their layers: NAME.png to NAME_0.png, NAME_1.png ... without captions.

    Return each picture with its layers in the order of their numbers; ``ValueError`` if two have the same.
    """
    by_stem = {normalize_stem(image): image for image in images}
    numbered: defaultdict[str, dict[int, str]] = defaultdict(dict)
    layers = set[str]()
    for image in images:
        match = _NUMBERED_STEM.fullmatch(normalize_stem(image))
        if match and match[1] in by_stem and not has_caption(image):
            first = numbered[by_stem[match[1]]].setdefault(int(match[2]), image)
            if first != image:
                raise ValueError(f"{first} and {image} are the same layer; remove one of them")
            layers.add(image)
    pictures = [image for image in images if image not in layers]
    return {image: tuple(numbered[image][number] for number in sorted(numbered[image])) for image in pictures}


@dataclass
class ControlScanResult:
    """The control images of all pictures, with problems and notes."""

    controls: dict[MaskKey, tuple[ControlImage, ...]] = field(default_factory=dict)
    problems: dict[MaskKey, str] = field(default_factory=dict)  # messages without the name of the picture
    settings: list[Problem] = field(default_factory=list)  # settings of subsets that control images do not allow
    unmatched: list[Problem] = field(default_factory=list)  # one for each subset with control images of no picture
    notes: list[str] = field(default_factory=list)


CONTROL_SIZE_STEP = 16
"""Sides of control images with sizes of their own are multiples of this, which every editing model supports."""


def scan_controls(
    datasets: Sequence[DatasetConfig],
    listed: Sequence[ListedImage],
    inspected: Mapping[ImageRef, InspectedImage],
    roots: ScanRoots,
    frame_rule: FrameRule | None = None,
) -> ControlScanResult:
    """Match and inspect the control images of all listed pictures."""
    result = ControlScanResult()
    by_subset: defaultdict[tuple[int, int], list[ListedImage]] = defaultdict(list)
    for item in listed:
        by_subset[item.dataset, item.subset].append(item)
    for (number, index), members in by_subset.items():
        dataset = datasets[number]
        subset = dataset.subsets[index]
        found = {item.image: item.controls for item in members if item.controls}
        if subset.control_key is not None:
            images = [item.image for item in members]
            found = _match_subset(result, subset, (number, index), images, are_clips=members[0].is_clip)
        if found or subset.control_from_image:
            result.settings += find_settings_that_controls_lack(dataset, subset)
        if found:
            clip_rule = frame_rule if members[0].is_clip else None
            key = (number, index)
            _inspect_subset(
                result, dataset, subset_key=key, found=found, inspected=inspected, roots=roots, clip_rule=clip_rule
            )
        if subset.control_from_image:
            _add_own_images(result, (number, index), subset.control_from_image, members, inspected)
    return result


def _add_own_images(
    result: ControlScanResult,
    subset_key: tuple[int, int],
    kind: str,
    members: Sequence[ListedImage],
    inspected: Mapping[ImageRef, InspectedImage],
) -> None:
    """Give each picture a control image that is made from it, behind those in files."""
    for item in members:
        image, key = inspected[item.image], (*subset_key, item.image)
        if image.problem is None:
            own = ControlImage(item.image, image.size, image.content_hash, kind)
            result.controls[key] = (*result.controls.get(key, ()), own)


def _match_subset(
    result: ControlScanResult,
    subset: SubsetConfig,
    subset_key: tuple[int, int],
    images: Sequence[ImageRef],
    *,
    are_clips: bool,
) -> dict[ImageRef, tuple[ImageRef, ...]]:
    image_dir, control_dir = subset.resolve_image_dir(), subset.resolve_control_dir()
    if image_dir is None or control_dir is None:
        raise AssertionError("a subset with a folder of control images has an image_dir too")
    matches = (match_control_clips if are_clips else match_controls)(images, image_dir, control_dir)
    result.problems |= {(*subset_key, image): reason for image, reason in matches.missing.items()}
    if matches.unmatched:
        names = format_first_names([path.name for path in matches.unmatched])
        result.unmatched.append(
            report_file(
                control_dir,
                f"{format_count(len(matches.unmatched), 'control image')} without an image of the same"
                f" name in {image_dir}: {names}",
                "remove them, or ignore them with --on_invalid_images skip",
            )
        )
    return matches.controls


def find_settings_that_controls_lack(dataset: DatasetConfig, subset: SubsetConfig) -> Iterable[Problem]:
    """Find settings of a subset that change its pictures and cannot change their control images alike."""
    for key, reason in _KEYS_THAT_CHANGE_THE_PICTURE.items():
        if getattr(subset, key):
            yield subset.report(key, reason, "remove one of the two")
    if subset.random_crop and dataset.has_own_control_size:
        key = "no_resize_control" if dataset.no_resize_control else "control_resolution"
        text = f"control images with {key} are not cropped like their picture"
        yield subset.report("random_crop", text, "remove one of the two", others=(key,))


def _inspect_subset(
    result: ControlScanResult,
    dataset: DatasetConfig,
    subset_key: tuple[int, int],
    found: Mapping[ImageRef, tuple[ImageRef, ...]],
    inspected: Mapping[ImageRef, InspectedImage],
    roots: ScanRoots,
    clip_rule: FrameRule | None,
) -> None:
    subset = dataset.subsets[subset_key[1]]
    by_folder: defaultdict[Path, dict[ImageRef, None]] = defaultdict(dict)
    for file in (file for files in found.values() for file in files):
        by_folder[resolve_links(file.folder)][file] = None
    cache_directory = subset.resolve_cache_directory()
    controls, notes = _inspect_files(by_folder, lambda root: cache_directory or roots.get_cache_dir(root), clip_rule)
    result.notes += notes
    noun, other_shape = ("image" if clip_rule is None else "clip"), []
    for image, files in found.items():
        defects = [
            f"its control {noun} {file} {problem}"
            for file in files
            if (problem := controls[file].problem or _describe_too_small(controls[file].size, dataset))
        ]
        shapes = [
            f"its control {noun} {file} is {controls[file].size[0]}x{controls[file].size[1]} pixels, the {noun}"
            f" {inspected[image].size[0]}x{inspected[image].size[1]}"
            for number, file in enumerate(files)
            if not (defects or inspected[image].problem or dataset.has_own_control_size)
            and not (clip_rule and clip_rule.get_control_side(number))
            and not (clip_rule is not None and is_reference_image(file))
            and not has_same_aspect_ratio(controls[file].size, inspected[image].size)
        ]
        if shapes and subset.random_crop:
            defects.append(f"{shapes[0]}: they cannot be cropped alike with random_crop")
        elif shapes:
            other_shape.append(image.name)
        if defects:
            result.problems[(*subset_key, image)] = "; ".join(defects)
        else:
            built = [
                _build_control(file, controls[file], subset, clip_rule, number) for number, file in enumerate(files)
            ]
            if all(control.is_reference for control in built):
                built.insert(0, ControlImage(image, inspected[image].size, GREY, GREY))
            result.controls[(*subset_key, image)] = tuple(sorted(built, key=lambda control: control.is_reference))
    if other_shape:
        advice = "; set control_resolution to keep their shape" if clip_rule is None else ""  # clips are of one size
        result.notes.append(
            f"{subset.source}: {format_count(len(other_shape), noun)} with control {noun}s of another shape, which"
            f" are cropped to it: {format_first_names(other_shape)}{advice}"
        )


def is_reference_image(file: ImageRef) -> bool:
    """Whether a file beside a clip is an image, and no control clip."""
    return is_image_file(file.name)


def _inspect_files(
    by_folder: Mapping[Path, Mapping[ImageRef, None]],
    get_cache_dir: Callable[[Path], Path | None],
    clip_rule: FrameRule | None,
) -> tuple[Mapping[ImageRef, InspectedImage], Sequence[str]]:
    """Inspect control images, or control clips and the reference images beside them."""

    def select(*, are_images: bool) -> dict[Path, dict[ImageRef, None]]:
        selected = {
            folder: {file: None for file in files if (clip_rule is None or is_reference_image(file)) == are_images}
            for folder, files in by_folder.items()
        }
        return {folder: files for folder, files in selected.items() if files}

    found, notes = dict[ImageRef, InspectedImage](), list[str]()
    if clips := select(are_images=False):
        scanned = scan_images(build_clip_inspector(), clips, get_cache_dir)
        found |= scanned.images
        notes += scanned.notes
    if images := select(are_images=True):
        scan = scan_images(build_image_inspector(), images, get_cache_dir)
        found |= scan.images
        notes += scan.notes
    return found, notes


def _build_control(
    file: ImageRef, control: InspectedImage, subset: SubsetConfig, clip_rule: FrameRule | None, number: int
) -> ControlImage:
    is_reference = clip_rule is not None and not isinstance(control, InspectedClip)
    found = ControlImage(
        file, control.size, control.content_hash, has_alpha=subset.multiple_target, is_reference=is_reference
    )
    if not isinstance(control, InspectedClip) or clip_rule is None:
        return found
    clip = replace(control.frames, conversion=subset.build_rate_conversion(clip_rule))
    return replace(found, clip=clip, square_side=clip_rule.get_control_side(number))


def _describe_too_small(size: tuple[int, int], dataset: DatasetConfig) -> str | None:
    step = dataset.bucket_reso_steps if dataset.file_format == "musubi-tuner" else CONTROL_SIZE_STEP
    if not dataset.no_resize_control or min(size) >= step:
        return None
    return f"is {size[0]}x{size[1]} pixels; with no_resize_control each side needs {step}"
