"""Pictures in tar shards: grouped as webdataset does it, read where they lie, and nothing wrong passed over."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listings import captions, listed, listings, missing, picture, prepared, shortened, write
from listings import settings as settings_for
from PIL import Image

from library.data.images import upright
from library.data.origin import Part
from library.data.prepare import prepare
from library.data.sources.tar import read_archive
from library.errors import ConfigError

PNG = [picture(number) for number in range(5)]


def pack(path: Path, members: list[tuple[str, bytes | tarfile.TarInfo]], **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            if isinstance(content, bytes):
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)


def special(kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_picture_and_its_caption_share_what_stands_before_the_first_dot(tmp_path, form: int):
    long = "deep/" + "x" * 90 + "/0002"
    pack(tmp_path / "a.tar", [
        ("./0001.png", PNG[0]), ("./0001.txt", "\ufeffone 猫\nsecond".encode()), ("0001.cls", b"3"),
        (f"{long}.PNG", PNG[1]), (f"{long}.TXT", b"two"), ("deep", special(tarfile.DIRTYPE)),
        ("猫 🐈.png", PNG[2]), ("._0001.png", b"left by macOS"), ("0003.v1.png", PNG[3]), ("0003.v1.txt", b"three"),
    ], format=form)  # fmt: skip
    listing = listed(tmp_path, "webdataset = 'a.tar'\nclass_tokens = 'cls'")
    assert captions(listing) == {"0001.png": "one 猫", f"{long}.PNG": "two", "猫 🐈.png": "cls", "0003.v1.png": "three"}
    assert [item.image.read_bytes() for item in listing.found] == PNG[:4]
    assert all(isinstance(item.image.part, Part) for item in listing.found)
    assert (listing.problems, listing.absent) == ([], [])
    assert listing.notes == [
        "a.tar: also holds what is not used: 1 .cls",
        "a.tar: 1 captions have several lines, of which the first is used; enable_wildcard takes one of them each time",
        "a.tar: 1 of 4 pictures have no caption, 'cls' is their caption: 猫 🐈.png",
    ]


def test_members_need_not_stand_together(tmp_path):
    pack(tmp_path / "a.tar", [("1.txt", b"one"), ("2.txt", b"two"), ("2.png", PNG[2]), ("1.png", PNG[1])])
    listing = listed(tmp_path, "webdataset = 'a.tar'")
    assert captions(listing) == {"1.png": "one", "2.png": "two"}
    assert [item.image.read_bytes() for item in listing.found] == PNG[1:3]


def test_captions_come_from_the_wanted_ending_or_txt_or_json(tmp_path):
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
        pack(tmp_path / "a.tar", members[:count])
        assert captions(listed(tmp_path, f"webdataset = 'a.tar'\n{keys}")) == {"1.png": expected}
    pack(tmp_path / "a.tar", [members[0], *members[2:]])
    assert captions(listed(tmp_path, "webdataset = 'a.tar'")) == {"1.png": "txt"}
    pack(tmp_path / "a.tar", [members[0], members[3]])
    assert captions(listed(tmp_path, "webdataset = 'a.tar'")) == {"1.png": "json"}
    assert captions(listed(tmp_path, "webdataset = 'a.tar'\ncaption_column = 'url'")) == {"1.png": "x"}
    pack(tmp_path / "a.tar", [members[0], ("1.json", b'{"a": 1, "b": 2}')])
    assert listed(tmp_path, "webdataset = 'a.tar'").problems == [
        f"{tmp_path}/set.toml:4: webdataset: {tmp_path}/a.tar: member '1.json': no column is called text, caption,"
        " prompt; there are a, b; say which holds captions: caption_column = 'NAME'"
    ]
    pack(tmp_path / "a.tar", members[:3])
    assert shortened(tmp_path, listed(tmp_path, "webdataset = 'a.tar'\ncaption_column = 'url'").problems) == [
        "set.toml:5: caption_column: no caption was read from .json in a.tar"
    ]


def test_another_ending_than_caption_is_not_replaced(tmp_path):
    pack(tmp_path / "a.tar", [("1.png", PNG[1]), ("1.txt", b"one"), ("1.json", b"{}")])
    listing = listed(tmp_path, "webdataset = 'a.tar'\ncaption_extension = '.tags'")
    assert captions(listing) == {"1.png": ""}
    assert listing.notes[0] == "a.tar: also holds what is not used: 1 .txt, 1 .json"


def test_a_picture_of_another_kind_beside_it_is_not_trained(tmp_path):
    pack(tmp_path / "a.tar", [("1.png", PNG[1]), ("1.seg.png", PNG[2]), ("1.txt", b"one")])
    listing = listed(tmp_path, "webdataset = 'a.tar'")
    assert captions(listing) == {"1.png": "one"}
    assert listing.notes == ["a.tar: also holds what is not used: 1 .seg.png"]


def test_shards_are_named_by_braces_pattern_folder_or_list(tmp_path):
    for number in range(3):
        pack(tmp_path / "s" / f"00{number}.tar", [(f"{number}.png", PNG[number])])
    for value in ("'s/{000..002}.tar'", "'s/*.tar'", "'s'", "['s/000.tar', 's/00{1,2}.tar']", f"'{tmp_path}/s'"):
        listing = listed(tmp_path, f"webdataset = {value}")
        assert list(captions(listing)) == ["0.png", "1.png", "2.png"]
        assert [item.image.key for item in listing.found] == ["000.tar/0.png", "001.tar/1.png", "002.tar/2.png"]
    assert missing(tmp_path, "webdataset = 's/{000..004}.tar'") == [
        "set.toml:4: webdataset: 2 files are not there (also looked beside set.toml): s/003.tar, s/004.tar; s has"
        " 000.tar, 001.tar, 002.tar"
    ]
    assert "is an address" in missing(tmp_path, "webdataset = 'pipe:cat s/000.tar'")[0]


def test_the_same_name_in_two_shards_is_two_pictures(tmp_path):
    for number in range(2):
        pack(tmp_path / f"{number}.tar", [("1.png", PNG[number]), ("1.txt", str(number).encode())])
    ready = prepared(tmp_path, "webdataset = ['0.tar', '1.tar']")
    assert [(sample.key, sample.caption) for sample in ready.manifest.samples] == [
        ("0.tar/1.png", "0"),
        ("1.tar/1.png", "1"),
    ]
    for number, sample in enumerate(ready.manifest.samples):
        assert (np.asarray(upright(sample.image)) == np.asarray(Image.open(io.BytesIO(PNG[number])))).all()


def test_what_is_wrong_with_members_is_named_and_can_be_skipped(tmp_path):
    pack(tmp_path / "a.tar", [
        ("good.png", PNG[0]), ("../out.png", PNG[1]), ("/etc/out.png", PNG[1]), ("a/../../out.png", PNG[1]),
        ("C:\\out.png", PNG[1]), ("..\\out.png", PNG[1]),
        ("soft.png", special(tarfile.SYMTYPE, "/etc/passwd")), ("hard.png", special(tarfile.LNKTYPE, "good.png")),
        ("pipe.png", special(tarfile.FIFOTYPE)), ("two.png", PNG[1]), ("two.jpg", PNG[1]), ("twice.png", PNG[1]),
        ("twice.png", PNG[2]), ("empty.png", b""), ("bad.png", b"bad"), ("latin.png", PNG[3]), ("latin.txt", b"\xe9"),
        ("blank.png", PNG[3]), ("blank.txt", b" \n"), ("wide.png", PNG[3]), ("wide.txt", "a".encode("utf-16")),
    ])  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        prepare(settings_for(tmp_path, "webdataset = 'a.tar'"), 8)
    assert shortened(tmp_path, caught.value.problems) == [
        "a.tar: member '../out.png' points outside of it; pack it again with plain names",
        "a.tar: member '/etc/out.png' points outside of it; pack it again with plain names",
        "a.tar: member 'a/../../out.png' points outside of it; pack it again with plain names",
        "a.tar: member 'C:\\\\out.png' points outside of it; pack it again with plain names",
        "a.tar: member '..\\\\out.png' points outside of it; pack it again with plain names",
        "a.tar: member 'soft.png' is a link to '/etc/passwd'; pack it again with --dereference --hard-dereference",
        "a.tar: member 'hard.png' is a link to 'good.png'; pack it again with --dereference --hard-dereference",
        "a.tar: member 'pipe.png' is no plain file; take it out",
        "a.tar: member 'twice.png' stands twice in it; give it a name of its own",
        "a.tar: 'two' has several pictures: .png, .jpg; what stands before the first dot of a name tells pictures"
        " apart",
        "a.tar:empty.png: is empty; copy it again, or delete it",
        "a.tar:bad.png: is no picture that Pillow can read; convert it to PNG or JPEG, or delete it",
        "a.tar: member 'latin.txt' not UTF-8 at byte 0; save the file as UTF-8",
        "a.tar: member 'blank.txt' is empty; write a caption, or leave it out if the picture has none",
        "a.tar: member 'wide.txt' is UTF-16 or UTF-32; save the file as UTF-8",
        "15 of 17 pictures cannot be used; mend or remove them, or leave them out with --on_bad_data skip",
    ]
    ready = prepared(tmp_path, "webdataset = 'a.tar'", on_bad_data="skip")
    assert [sample.key for sample in ready.manifest.samples] == ["a.tar/good.png", "a.tar/twice.png"]
    assert ready.manifest.samples[1].image.read_bytes() == PNG[1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (gzip.compress(b"x" * 600, mtime=0), "is compressed (gzip); pictures are read in place, which needs a plain tar"
         " file: gunzip a.tar"),
        (b"\xfd7zXZ\x00rest", "is compressed (xz)"),
        (b"(\xb5/\xfdrest", "is compressed (zstd)"),
        (b"BZh91AY", "is compressed (bzip2)"),
        (b"", "is empty"),
        (b"no tar file" * 99, "is no tar file: "),
        (b"\0" * 10240, None),
    ],
    ids=["gzip", "xz", "zstd", "bzip2", "empty", "text", "no members"],
)  # fmt: skip
def test_a_file_that_is_no_plain_tar_file_is_named(tmp_path, content: bytes, expected: str | None):
    write(tmp_path, {"a.tar": content})
    listing = listed(tmp_path, "webdataset = 'a.tar'")
    found = shortened(tmp_path, listing.absent)
    assert [line.startswith(f"a.tar: {expected}") for line in found] == ([] if expected is None else [True]), found
    assert bool(listing.problems) == (expected is None)  # empty, but a tar file


def test_compressed_shards_in_a_folder_are_not_passed_over(tmp_path):
    pack(tmp_path / "s" / "0.tar", [("1.png", PNG[0])])
    write(tmp_path, {"s/1.tar.gz": gzip.compress(b"x")})
    assert shortened(tmp_path, listed(tmp_path, "webdataset = 's'").absent) == [
        "s/1.tar.gz: is compressed (gzip); pictures are read in place, which needs a plain tar file: gunzip 1.tar.gz"
    ]


def whole() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number, content in enumerate(PNG):
            info = tarfile.TarInfo(f"{number}.png")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


WHOLE = whole()
DATA_END = len(WHOLE.rstrip(b"\0"))


@settings(deadline=None, max_examples=60)
@given(st.integers(min_value=1, max_value=DATA_END))
def test_a_shard_that_is_cut_off_anywhere_is_named_and_what_is_whole_is_kept(tmp_path_factory, length: int):
    path = tmp_path_factory.getbasetemp() / "cut.tar"
    path.write_bytes(WHOLE[:length])
    archive = read_archive(path)
    assert len(archive.problems) == 1 and archive.problems[0].startswith(f"{path}: ")
    for member in archive.members:
        assert WHOLE[member.offset : member.offset + member.size] == PNG[int(member.name[0])]
        assert member.offset + member.size <= length
    ends = [member.offset + member.size for member in read_archive_of(path, WHOLE).members]
    assert len(archive.members) == sum(end <= length for end in ends)


def read_archive_of(path: Path, content: bytes):
    path.write_bytes(content)
    archive = read_archive(path)
    assert archive.problems == [] and len(archive.members) == len(PNG)
    return archive


def test_a_shard_that_is_cut_off_in_a_picture_names_it(tmp_path):
    second = read_archive_of(tmp_path / "a.tar", WHOLE).members[1]
    for length, expected in {
        second.offset + 10: f"cut off in 1.png, {second.size - 10} bytes of it are missing; what follows is lost",
        second.offset - 500: "cut off behind 0.png; what follows is lost",
        second.offset - 512: None,
    }.items():
        (tmp_path / "a.tar").write_bytes(WHOLE[:length])
        line = f"a.tar: is {expected}" if expected else "a.tar: has no end mark behind 0.png; it may be cut off there"
        assert shortened(tmp_path, read_archive(tmp_path / "a.tar").problems) == [line]


def test_a_damaged_header_is_named(tmp_path):
    content = bytearray(WHOLE)
    second = read_archive_of(tmp_path / "a.tar", WHOLE).members[1]
    content[second.offset - 512 + 148] ^= 0x55  # in its checksum
    (tmp_path / "a.tar").write_bytes(content)
    archive = read_archive(tmp_path / "a.tar")
    assert [member.name for member in archive.members] == ["0.png"]
    assert shortened(tmp_path, archive.problems) == [
        f"a.tar: is damaged behind 0.png, at byte {second.offset - 512}; what follows is lost"
    ]


def test_shards_without_pictures_say_what_they_hold(tmp_path):
    pack(tmp_path / "a.tar", [("1.npy", b"1"), ("2.npy", b"2"), ("1.cls", b"1")])
    assert shortened(tmp_path, listed(tmp_path, "webdataset = 'a.tar'").problems) == [
        "set.toml:4: webdataset: no pictures in 1 files, which hold 2 .npy, 1 .cls; pictures end in .png .jpg .jpeg"
        " .webp .bmp .avif .jxl"
    ]


def test_folders_and_shards_go_together_in_a_dataset(tmp_path):
    pack(tmp_path / "a.tar", [("1.png", PNG[0])])
    write(tmp_path, {"b/1.png": PNG[1]})
    ready = prepared(tmp_path, "webdataset = 'a.tar'\nnum_repeats = 2", "image_dir = 'b'\nis_reg = true")
    assert [(sample.key, sample.repeats) for sample in ready.manifest.samples] == [("a.tar/1.png", 2), ("b/1.png", 2)]
    found = listings(tmp_path, "webdataset = 'a.tar'", "webdataset = 'a.tar'")
    assert shortened(tmp_path, found[1].problems) == [
        "set.toml:6: webdataset: 1 pictures are in set.toml:4, too: a.tar:1.png; name files once"
    ]
