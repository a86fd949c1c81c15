"""Write the table of models into docs/models.md: ``python -m scripts.model_table``."""

from pathlib import Path

from library.tools.models import format_markdown, list_models

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
START, END = "models --markdown -->\n", "<!-- end -->"


def insert_table(page: str) -> str:
    """Replace what is between the two marks."""
    before, _, rest = page.partition(START)
    return f"{before}{START}{format_markdown(list_models())}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(insert_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
