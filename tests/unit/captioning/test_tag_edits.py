"""Tags: what each edit does to a caption, through the tool and its files."""

import pytest

from library.captioning.tag_edits import TagEdit, count_tags
from library.tools.tags import run_tags


@pytest.mark.parametrize(
    ("edit", "before", "after"),
    [
        (TagEdit(), " a ,b,  c ", " a ,b,  c "),  # untouched, with its spaces
        (TagEdit(replace={"a": "x, y"}), "a,b", "x, y, b"),
        (TagEdit(replace={"a": ""}), "a, b, a", "b"),
        (TagEdit(remove=["b*", "c"]), "a, bc, b, c, cc", "a, cc"),
        (TagEdit(remove=["[x]"]), "x, a", "a"),  # a set of characters, as in file patterns
        (TagEdit(prepend=["t", "c"]), "a, c, b", "t, c, a, b"),
        (TagEdit(append=["b", "z"]), "a, b", "a, b, z"),
        (TagEdit(deduplicate=True), "a, b, a, B", "a, b, B"),
        (TagEdit(sort="alphabet", keep_tokens=1), "z, c, B, a", "z, a, B, c"),
        (TagEdit(append=["t"]), "", "t"[:0]),  # an empty file has no line to edit
        (TagEdit(append=["t"]), "a, b\nc", "a, b, t\nc, t"),  # lines are alternatives
        (TagEdit(replace={"a": "b"}, separator=";"), "a;c", "b; c"),
        (TagEdit(replace={"a": "b"}, remove=["b"], append=["a"]), "a, c", "c, a"),  # in the order of the fields
    ],
)
def test_an_edit_changes_what_it_says(edit, before, after):
    assert edit.apply(before) == after
    assert edit.apply(after) == after or edit.replace  # a second time changes nothing


def test_tags_are_counted_once_per_caption_and_sorted_by_frequency():
    captions = ["b, a, a", "a, c", "c, a\nc"]
    counts = count_tags(captions)
    assert counts == {"a": 3, "c": 2, "b": 1}
    assert TagEdit(sort="frequency").apply("b, c, a", counts) == "a, c, b"


@pytest.fixture
def folder(tmp_path):
    for name, text in {"1": "cat, a  b", "2": "dog", "3": None, "sub/4": "cat"}.items():
        path = tmp_path / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"not read by edits")
        if text is not None:
            path.with_suffix(".txt").write_text(text + "\n")
    return tmp_path


def run(*words):
    lines, generator = [], run_tags([str(word) for word in words])
    while True:
        try:
            lines.append(next(generator))
        except StopIteration as stop:
            return lines, stop.value


def test_counts(folder):
    assert run("count", folder) == (
        ["      1  a  b", "      1  cat", "      1  dog", "3 tags in 2 captions of 3 images"],
        0,
    )
    assert run("count", folder, "--recursive", "--min_count", 2)[0] == [
        "      2  cat",
        "3 tags in 3 captions of 4 images",
    ]


def test_a_dry_run_prints_the_difference_and_writes_nothing(folder):
    edit = "edit", folder, "--replace", "cat=kitten, fur", "--append", "photo"
    before = {path: path.read_bytes() for path in folder.rglob("*.txt")}
    lines, code = run(*edit, "--dry_run")
    assert lines == [
        f"{folder}/1.txt:",
        "  - cat, a  b",
        "  + kitten, fur, a  b, photo",
        f"{folder}/2.txt:",
        "  - dog",
        "  + dog, photo",
        "2 of 2 captions would change; nothing was written",
    ]
    assert code == 0 and before == {path: path.read_bytes() for path in folder.rglob("*.txt")}
    assert run(*edit) == (["2 of 2 captions changed"], 0)
    assert (folder / "1.txt").read_text() == "kitten, fur, a  b, photo\n"
    assert not (folder / "3.txt").exists()  # an image without a caption gets none
    assert run("edit", folder, "--append", "photo") == (["0 of 2 captions changed"], 0)


def test_all_mistakes_are_reported_at_once(folder, tmp_path):
    from library.errors import UserError

    (folder / "bad.png").write_bytes(b"")
    (folder / "bad.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "2.jpg").write_bytes(b"")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError) as error:
        run("edit", folder, folder / "subb", empty, "--append", "x")
    assert str(error.value).splitlines() == [
        f"{folder}/bad.txt: is UTF-16 or UTF-32; save the file as UTF-8",
        f"{folder}/subb: no such folder; did you mean sub?",
        f"{empty}: no images (.png .jpg .jpeg .webp .bmp .avif .jxl)",
        f"{folder}/2.txt: is the caption file of 2.jpg and 2.png; rename one of them",
    ]
    with pytest.raises(UserError) as error:
        run("edti", "--replace", "x", "--sort", "size", "--keep", 1)
    text = str(error.value)
    for part in (
        "unknown command 'edti'; did you mean edit?",
        "no folder given",
        "'x': expected \"old=new\"",
        "--sort",
    ):
        assert part in text
    with pytest.raises(UserError, match="nothing to do"):
        run("edit", folder)
