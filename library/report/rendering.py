"""Templates, style and charts that the report of a run and the web page share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..log import format_duration

if TYPE_CHECKING:
    from jinja2 import Environment

STATIC_DIR = Path(__file__).parent / "static"
STYLES = ("uplot.min.css", "shared.css")
SCRIPTS = ("uplot.min.js", "charts.js")
"""The scripts of the report and of every page with charts, in the order in which they are loaded.

uPlot 1.6.32 is vendored; its license is beside it.
"""


def build_environment(*packages: str, change_source: Callable[[str], str] | None = None) -> "Environment":
    """Build the templates of this package, and of ``packages`` above it; everything is escaped.

    ``change_source`` changes the source of each template as it is read, such as into another language.
    """
    from jinja2 import ChoiceLoader, Environment, FunctionLoader, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in (*packages, "library.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    if change_source is not None:
        files, change = environment.loader, change_source

        def load_changed(name: str) -> tuple[str, str | None, Callable[[], bool] | None]:
            assert files is not None
            source, path, is_fresh = files.get_source(environment, name)
            return change(source), path, is_fresh

        environment.loader = FunctionLoader(load_changed)
    environment.filters["number"] = format_number
    environment.filters["duration"] = format_duration
    environment.filters["bytes"] = format_size
    return environment


def format_number(value: float | None) -> str:
    """Format with four digits; a dash for nothing."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def format_size(num_bytes: float) -> str:
    """Format the size of a file."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def read_assets() -> dict[str, str]:
    """Read the style sheets and scripts, for a page that must stand alone."""
    styles, scripts = (
        "\n".join((STATIC_DIR / name).read_text("utf-8") for name in names) for names in (STYLES, SCRIPTS)
    )
    return {"styles": styles, "scripts": scripts}
