"""Write the table of noise levels into docs/models.md: ``python -m scripts.noise_table``."""

from collections.abc import Iterator
from dataclasses import dataclass

from library.config.schema_objective import NoiseConfig
from library.diffusion.timestep_shift import TimestepShift
from library.models.detect import detect_model, get_config_reader
from library.models.facts import FamilyFacts
from library.models.families import FAMILY_FACTS
from library.models.family_noise_levels import PROGRAMS, NoiseLevels

from .model_table import END, PAGE

START = "<!-- noise levels: python -m scripts.noise_table -->\n"
SIDES = (512, 1024, 1536)
HEADER = (
    "| model | trainer | `timestep_sampling` | shift | % below sigma 0.5 | % below 0.25 | why, or from where |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Row:
    """The noise levels of a family in one program, at each of ``SIDES``."""

    program: str
    sampling: str
    shifts: tuple[float, ...]
    shares: tuple[tuple[float, ...], tuple[float, ...]]
    """The shares below sigma 0.5 and 0.25."""
    reason: str

    def format_cells(self) -> str:
        cells = [self.program, self.sampling, _join([f"{shift:.2f}" for shift in self.shifts])]
        cells += [_join([f"{100 * share:.1f}" for share in shares]) for shares in self.shares]
        return " | ".join([*cells, self.reason])


def iter_rows(name: str, facts: FamilyFacts) -> Iterator[Row]:
    """Iterate over the rows of a family: ours first."""
    model, noise = detect_model(f"random:{name}"), facts.training_noise
    tokens = [noise.count_tokens(side, side, model.size_multiple) for side in SIDES]
    read = get_config_reader(model)
    ours = noise.build_distribution(NoiseConfig(), read)
    shares = [tuple(ours.compute_share_below(level, count) for count in tokens) for level in (0.5, 0.25)]
    shifts = tuple(map(ours.compute_factor, tokens))
    yield Row("**ours**", f"`{ours.sampling}`", shifts, (shares[0], shares[1]), noise.reason)
    for program in PROGRAMS:
        if program in noise.other_trainers:
            yield _build_row(program, noise.other_trainers[program], noise.read_pipeline_shift(read), tokens)


def _build_row(program: str, levels: NoiseLevels, pipeline_shift: TimestepShift, tokens: list[int]) -> Row:
    distribution = levels.build_distribution(pipeline_shift)
    shares = [tuple(levels.compute_share_below(sigma, pipeline_shift, n) for n in tokens) for sigma in (0.5, 0.25)]
    is_special = levels.shares is not None
    sampling = "" if is_special else f"`{distribution.sampling}`"
    shifts = (1.0,) * len(tokens) if is_special else tuple(map(distribution.compute_factor, tokens))
    return Row(program, sampling, shifts, (shares[0], shares[1]), levels.origin)


def format_table() -> str:
    """Format the table; families with equal rows share them."""
    families: dict[tuple[Row, ...], list[str]] = {}
    for name, facts in FAMILY_FACTS.items():
        if detect_model(f"random:{name}").prediction_type == "flow":
            families.setdefault(tuple(iter_rows(name, facts)), []).append(facts.title)
    lines = [
        f"| {', '.join(titles) if number == 0 else ''} | {row.format_cells()} |"
        for rows, titles in families.items()
        for number, row in enumerate(rows)
    ]
    return "\n".join([HEADER, *lines])


def insert_table(page: str) -> str:
    """Replace what is between the two marks."""
    before, _, rest = page.partition(START)
    return f"{before}{START}{format_table()}\n{END}{rest.partition(END)[2]}"


def _join(values: list[str]) -> str:
    return values[0] if len({*values}) == 1 else " / ".join(values)


if __name__ == "__main__":
    PAGE.write_text(insert_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
