"""Pages are within their length limits, their links have targets, and the files they name exist."""

import re

import pytest
from code_metrics import ROOT

from library.models.families import FAMILIES

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_LINES = {"README.md": 150, "architecture.md": 240}
PACKAGES = "|".join(path.name for path in sorted((ROOT / "library").iterdir()) if path.is_dir() and path.name[0] != "_")


def find_headings(text: str) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    lines = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).splitlines()
    titles = [line.lstrip("#").strip() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", MAX_LINES)
def test_pages_are_within_their_length_limits(name):
    (path,) = [path for path in PAGES if path.name == name]

    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES[name]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_have_existing_targets(path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file) if file else path
        if not linked.exists() or (anchor and anchor not in find_headings(linked.read_text(encoding="utf-8"))):
            broken.append(target)

    assert broken == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_named_in_pages_exist(path):
    text = path.read_text(encoding="utf-8")
    named = {name for name in re.findall(r"[\w./]+\.(?:py|json|toml|md|txt)\b", text) if "/" in name}
    named = {
        name
        for name in named
        if re.match(rf"(library|tests|benchmarks|scripts|dataset_configs|docs|{PACKAGES})/", name)
    }
    missing = [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "library"))]

    assert sorted(name for name in missing if "NAME" not in name) == []


def test_the_readme_counts_the_families():
    counts = re.findall(r"\[(\d+) models\]\(docs/models\.md\)", (ROOT / "README.md").read_text(encoding="utf-8"))

    assert counts == [str(len(FAMILIES.entries))]


def test_every_page_is_linked_from_the_readme():
    linked = set(re.findall(r"docs/(\w+\.md)", (ROOT / "README.md").read_text(encoding="utf-8")))

    assert {path.name for path in PAGES if path.parent.name == "docs"} == linked
