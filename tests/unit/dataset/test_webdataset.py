"""Images in tar shards: grouped into samples as webdataset does it, read in place; every damage is reported."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_listings import (
    encode_image,
    find_missing,
    get_captions,
    list_subset,
    list_subsets,
    make_config,
    prepare_subsets,
    strip_folder,
    write_files,
)
from PIL import Image
from problem_lines import format_lines

from library.dataloader.prepare import prepare_data
from library.dataset.image_decoding import load_rgb_image
from library.dataset.image_ref import ByteRange
from library.dataset.webdataset import read_tar_index
from library.errors import ConfigError

PNG = [encode_image(number) for number in range(5)]


def pack_tar(path: Path, members: list[tuple[str, bytes | tarfile.TarInfo]], **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            if isinstance(content, bytes):
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)


def make_special_member(kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("file_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_an_image_and_its_caption_share_the_name_before_the_first_dot(tmp_path, file_format: int):
    long = "deep/" + "x" * 90 + "/0002"
    pack_tar(
        tmp_path / "a.tar",
        [
            ("./0001.png", PNG[0]),
            ("./0001.txt", "\ufeffone 猫\nsecond".encode()),
            ("0001.cls", b"3"),
            (f"{long}.PNG", PNG[1]),
            (f"{long}.TXT", b"two"),
            ("deep", make_special_member(tarfile.DIRTYPE)),
            ("猫 🐈.png", PNG[2]),
            ("._0001.png", b"left by macOS"),
            ("0003.v1.png", PNG[3]),
            ("0003.v1.txt", b"three"),
        ],
        format=file_format,
    )
    listing = list_subset(tmp_path, "webdataset = 'a.tar'\nclass_tokens = 'cls'")
    assert get_captions(listing) == {
        "0001.png": "one 猫",
        f"{long}.PNG": "two",
        "猫 🐈.png": "cls",
        "0003.v1.png": "three",
    }
    assert [item.image.read_bytes() for item in listing.images] == PNG[:4]
    assert all(isinstance(item.image.part, ByteRange) for item in listing.images)
    assert (format_lines(listing.problems), format_lines(listing.missing)) == ([], [])
    assert listing.notes == [
        "a.tar: members that are not used: 1 .cls",
        "a.tar: 1 caption with several lines: only the first line is used; set enable_wildcard = true to pick a random"
        " one each time",
        "a.tar: no caption for 1 of 4 images, using the caption 'cls': 猫 🐈.png",
    ]


def test_the_members_of_a_sample_need_not_be_adjacent(tmp_path):
    pack_tar(tmp_path / "a.tar", [("1.txt", b"one"), ("2.txt", b"two"), ("2.png", PNG[2]), ("1.png", PNG[1])])
    listing = list_subset(tmp_path, "webdataset = 'a.tar'")
    assert get_captions(listing) == {"1.png": "one", "2.png": "two"}
    assert [item.image.read_bytes() for item in listing.images] == PNG[1:3]


def test_captions_come_from_the_set_extension_or_txt_or_json(tmp_path):
    members = [
        ("1.png", PNG[1]),
        ("1.caption", b"cap"),
        ("1.txt", b"txt"),
        ("1.json", b'{"caption": "json", "url": "x"}'),
    ]
    cases = {
        "": (4, "cap"),
        "caption_extension = ['.json', '.txt']": (4, "json"),
        "caption_extension = '.txt'": (4, "txt"),
    }
    for keys, (count, expected) in cases.items():
        pack_tar(tmp_path / "a.tar", members[:count])
        assert get_captions(list_subset(tmp_path, f"webdataset = 'a.tar'\n{keys}")) == {"1.png": expected}
    pack_tar(tmp_path / "a.tar", [members[0], *members[2:]])
    assert get_captions(list_subset(tmp_path, "webdataset = 'a.tar'")) == {"1.png": "txt"}
    pack_tar(tmp_path / "a.tar", [members[0], members[3]])
    assert get_captions(list_subset(tmp_path, "webdataset = 'a.tar'")) == {"1.png": "json"}
    assert get_captions(list_subset(tmp_path, "webdataset = 'a.tar'\ncaption_column = 'url'")) == {"1.png": "x"}
    pack_tar(tmp_path / "a.tar", [members[0], ("1.json", b'{"a": 1, "b": 2}')])
    assert format_lines(list_subset(tmp_path, "webdataset = 'a.tar'").problems) == [
        f"{tmp_path}/set.toml:4: webdataset: {tmp_path}/a.tar: member '1.json': no column text, caption or"
        " prompt; columns are a, b; set caption_column = 'NAME'"
    ]
    pack_tar(tmp_path / "a.tar", members[:3])
    assert strip_folder(
        tmp_path, format_lines(list_subset(tmp_path, "webdataset = 'a.tar'\ncaption_column = 'url'").problems)
    ) == ["set.toml:5: caption_column: no effect: no captions were read from .json in a.tar"]


def test_only_the_default_caption_extension_has_fallbacks(tmp_path):
    pack_tar(tmp_path / "a.tar", [("1.png", PNG[1]), ("1.txt", b"one"), ("1.json", b"{}")])
    listing = list_subset(tmp_path, "webdataset = 'a.tar'\ncaption_extension = '.tags'")
    assert get_captions(listing) == {"1.png": ""}
    assert listing.notes[0] == "a.tar: members that are not used: 1 .txt, 1 .json"


def test_a_further_image_of_a_sample_is_not_trained(tmp_path):
    pack_tar(tmp_path / "a.tar", [("1.png", PNG[1]), ("1.seg.png", PNG[2]), ("1.txt", b"one")])
    listing = list_subset(tmp_path, "webdataset = 'a.tar'")
    assert get_captions(listing) == {"1.png": "one"}
    assert listing.notes == ["a.tar: members that are not used: 1 .seg.png"]


def test_shards_are_given_by_braces_glob_folder_or_list(tmp_path):
    for number in range(3):
        pack_tar(tmp_path / "s" / f"00{number}.tar", [(f"{number}.png", PNG[number])])
    for value in ("'s/{000..002}.tar'", "'s/*.tar'", "'s'", "['s/000.tar', 's/00{1,2}.tar']", f"'{tmp_path}/s'"):
        listing = list_subset(tmp_path, f"webdataset = {value}")
        assert list(get_captions(listing)) == ["0.png", "1.png", "2.png"]
        assert [item.image.key for item in listing.images] == ["000.tar/0.png", "001.tar/1.png", "002.tar/2.png"]
    assert find_missing(tmp_path, "webdataset = 's/{000..004}.tar'") == [
        "set.toml:4: webdataset: 2 files not found (also searched next to set.toml): s/003.tar, s/004.tar; s contains"
        " 000.tar, 001.tar, 002.tar"
    ]
    assert (
        "is a command; give the URL or path that it reads"
        in find_missing(tmp_path, "webdataset = 'pipe:cat s/000.tar'")[0]
    )


def test_the_same_name_in_two_shards_is_two_images(tmp_path):
    for number in range(2):
        pack_tar(tmp_path / f"{number}.tar", [("1.png", PNG[number]), ("1.txt", str(number).encode())])
    ready = prepare_subsets(tmp_path, "webdataset = ['0.tar', '1.tar']")
    assert [(sample.key, sample.caption) for sample in ready.manifest.samples] == [
        ("0.tar/1.png", "0"),
        ("1.tar/1.png", "1"),
    ]
    for number, sample in enumerate(ready.manifest.samples):
        assert (np.asarray(load_rgb_image(sample.image)) == np.asarray(Image.open(io.BytesIO(PNG[number])))).all()


def test_problems_with_members_are_reported_and_can_be_skipped(tmp_path):
    pack_tar(
        tmp_path / "a.tar",
        [
            ("good.png", PNG[0]),
            ("../out.png", PNG[1]),
            ("/etc/out.png", PNG[1]),
            ("a/../../out.png", PNG[1]),
            ("C:\\out.png", PNG[1]),
            ("..\\out.png", PNG[1]),
            ("soft.png", make_special_member(tarfile.SYMTYPE, "/etc/passwd")),
            ("hard.png", make_special_member(tarfile.LNKTYPE, "good.png")),
            ("pipe.png", make_special_member(tarfile.FIFOTYPE)),
            ("two.png", PNG[1]),
            ("two.jpg", PNG[1]),
            ("twice.png", PNG[1]),
            ("twice.png", PNG[2]),
            ("empty.png", b""),
            ("bad.png", b"bad"),
            ("latin.png", PNG[3]),
            ("latin.txt", b"\xe9"),
            ("blank.png", PNG[3]),
            ("blank.txt", b" \n"),
            ("wide.png", PNG[3]),
            ("wide.txt", "a".encode("utf-16")),
        ],
    )
    with pytest.raises(ConfigError) as caught:
        prepare_data(make_config(tmp_path, "webdataset = 'a.tar'"), 8)
    assert strip_folder(tmp_path, format_lines(caught.value.problems)) == [
        "a.tar: member '../out.png' has a path outside the archive; pack it again with relative paths",
        "a.tar: member '/etc/out.png' has a path outside the archive; pack it again with relative paths",
        "a.tar: member 'a/../../out.png' has a path outside the archive; pack it again with relative paths",
        "a.tar: member 'C:\\\\out.png' has a path outside the archive; pack it again with relative paths",
        "a.tar: member '..\\\\out.png' has a path outside the archive; pack it again with relative paths",
        "a.tar: member 'soft.png' is a link to '/etc/passwd'; pack it again with --dereference --hard-dereference",
        "a.tar: member 'hard.png' is a link to 'good.png'; pack it again with --dereference --hard-dereference",
        "a.tar: member 'pipe.png' is not a regular file; remove it",
        "a.tar: duplicate member 'twice.png'; rename it",
        "a.tar: several images with the key 'two': .png, .jpg; rename them to differ before the first dot",
        "a.tar:empty.png: is empty; copy it again, or delete it",
        "a.tar:bad.png: is not an image that Pillow can read; convert it to PNG or JPEG, or delete it",
        "a.tar: member 'latin.txt': is not UTF-8 (byte 0); save the file as UTF-8",
        "a.tar: member 'blank.txt': is empty; write a caption, or remove it if the image has none",
        "a.tar: member 'wide.txt': is UTF-16 or UTF-32; save the file as UTF-8",
        "15 of 17 images cannot be used; fix or remove them, or skip them with --on_invalid_images skip",
    ]
    ready = prepare_subsets(tmp_path, "webdataset = 'a.tar'", on_invalid_images="skip")
    assert [sample.key for sample in ready.manifest.samples] == ["a.tar/good.png", "a.tar/twice.png"]
    assert ready.manifest.samples[1].image.read_bytes() == PNG[1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            gzip.compress(b"x" * 600, mtime=0),
            "is compressed (gzip), but images are read in place from plain tar files: gunzip a.tar",
        ),
        (b"\xfd7zXZ\x00rest", "is compressed (xz)"),
        (b"(\xb5/\xfdrest", "is compressed (zstd)"),
        (b"BZh91AY", "is compressed (bzip2)"),
        (b"", "is empty"),
        (b"no tar file" * 99, "is not a tar file: "),
        (b"\0" * 10240, None),
    ],
    ids=["gzip", "xz", "zstd", "bzip2", "empty", "text", "no members"],
)
def test_a_file_that_is_not_a_plain_tar_file_is_reported(tmp_path, content: bytes, expected: str | None):
    write_files(tmp_path, {"a.tar": content})
    listing = list_subset(tmp_path, "webdataset = 'a.tar'")
    actual = strip_folder(tmp_path, format_lines(listing.missing))
    assert [line.startswith(f"a.tar: {expected}") for line in actual] == ([] if expected is None else [True]), actual
    assert bool(listing.problems) == (expected is None)  # empty, but a tar file


def test_compressed_shards_in_a_folder_are_reported(tmp_path):
    pack_tar(tmp_path / "s" / "0.tar", [("1.png", PNG[0])])
    write_files(tmp_path, {"s/1.tar.gz": gzip.compress(b"x")})
    assert strip_folder(tmp_path, format_lines(list_subset(tmp_path, "webdataset = 's'").missing)) == [
        "s/1.tar.gz: is compressed (gzip), but images are read in place from plain tar files: gunzip 1.tar.gz"
    ]


def pack_images() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number, content in enumerate(PNG):
            info = tarfile.TarInfo(f"{number}.png")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


ARCHIVE = pack_images()
DATA_END = len(ARCHIVE.rstrip(b"\0"))


@settings(deadline=None, max_examples=60)
@given(st.integers(min_value=1, max_value=DATA_END))
def test_a_shard_truncated_anywhere_is_reported_and_keeps_its_complete_members(tmp_path_factory, length: int):
    path = tmp_path_factory.getbasetemp() / "cut.tar"
    path.write_bytes(ARCHIVE[:length])
    index = read_tar_index(path)
    assert len(index.problems) == 1 and format_lines(index.problems)[0].startswith(f"{path}: ")
    for member in index.members:
        assert ARCHIVE[member.offset : member.offset + member.length] == PNG[int(member.name[0])]
        assert member.offset + member.length <= length
    ends = [member.offset + member.length for member in write_and_index(path, ARCHIVE).members]
    assert len(index.members) == sum(end <= length for end in ends)


def write_and_index(path: Path, content: bytes):
    path.write_bytes(content)
    index = read_tar_index(path)
    assert format_lines(index.problems) == [] and len(index.members) == len(PNG)
    return index


def test_a_shard_truncated_in_an_image_reports_the_image(tmp_path):
    second = write_and_index(tmp_path / "a.tar", ARCHIVE).members[1]
    for length, expected in {
        second.offset + 10: f"truncated in 1.png, {second.length - 10} bytes missing; the rest is lost",
        second.offset - 500: "truncated after 0.png; the rest is lost",
        second.offset - 512: None,
    }.items():
        (tmp_path / "a.tar").write_bytes(ARCHIVE[:length])
        line = f"a.tar: is {expected}" if expected else "a.tar: has no end mark after 0.png; it may be truncated"
        assert strip_folder(tmp_path, format_lines(read_tar_index(tmp_path / "a.tar").problems)) == [line]


def test_a_damaged_header_is_reported(tmp_path):
    content = bytearray(ARCHIVE)
    second = write_and_index(tmp_path / "a.tar", ARCHIVE).members[1]
    content[second.offset - 512 + 148] ^= 0x55  # in its checksum
    (tmp_path / "a.tar").write_bytes(content)
    index = read_tar_index(tmp_path / "a.tar")
    assert [member.name for member in index.members] == ["0.png"]
    assert strip_folder(tmp_path, format_lines(index.problems)) == [
        f"a.tar: is damaged after 0.png, at byte {second.offset - 512}; the rest is lost"
    ]


def test_shards_without_images_report_what_they_contain(tmp_path):
    pack_tar(tmp_path / "a.tar", [("1.npy", b"1"), ("2.npy", b"2"), ("1.cls", b"1")])
    assert strip_folder(tmp_path, format_lines(list_subset(tmp_path, "webdataset = 'a.tar'").problems)) == [
        "set.toml:4: webdataset: no images in 1 file (2 .npy, 1 .cls); image extensions are .png .jpg .jpeg .webp .bmp"
        " .avif .jxl"
    ]


def test_folders_and_shards_can_be_combined_in_a_dataset(tmp_path):
    pack_tar(tmp_path / "a.tar", [("1.png", PNG[0])])
    write_files(tmp_path, {"b/1.png": PNG[1]})
    ready = prepare_subsets(tmp_path, "webdataset = 'a.tar'\nnum_repeats = 2", "image_dir = 'b'\nis_reg = true")
    assert [(sample.key, sample.repeats) for sample in ready.manifest.samples] == [("a.tar/1.png", 2), ("b/1.png", 2)]
    actual = list_subsets(tmp_path, "webdataset = 'a.tar'", "webdataset = 'a.tar'")
    assert strip_folder(tmp_path, format_lines(actual[1].problems)) == [
        "set.toml:6: webdataset: 1 image also in set.toml:4: a.tar:1.png; list each file once"
    ]


def test_control_images_are_members_of_their_sample(tmp_path):
    members = [("1.png", PNG[0]), ("1.control.png", PNG[1]), ("1.txt", b"one"), ("1.control_1.PNG", PNG[2])]
    pack_tar(tmp_path / "a.tar", [*members, ("2.jpg", PNG[3]), ("2.control_0.png", PNG[4])])
    listing = list_subset(tmp_path, "webdataset = 'a.tar'\nclass_tokens = 'cls'")
    assert get_captions(listing) == {"1.png": "one", "2.jpg": "cls"} and format_lines(listing.missing) == []
    assert [[each.read_bytes() for each in item.controls] for item in listing.images] == [[PNG[1], PNG[2]], [PNG[4]]]
    pack_tar(tmp_path / "b.tar", [*members, ("1.control_0.png", PNG[3])])
    (problem,) = format_lines(list_subset(tmp_path, "webdataset = 'b.tar'").missing)
    assert "key '1': members .control.png and .control_0.png are the same control image" in problem
