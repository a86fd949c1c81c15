"""A covering array of strength two: rows of values, one of each factor, in which every allowed pair of values occurs.

Rows are built one at a time and greedily; a row that is refused teaches which of its values cannot be combined.
Everything is deterministic, so that the rows of a slice are the same in every process.

Sets of settings are integers with one bit for each setting, since a greedy choice asks millions of times what they have
in common.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

Row = tuple[int, ...]
"""The index of the value of each factor; 0 is its default."""
Setting = tuple[int, int]
"""The index of a factor, and of one of its values."""
Pair = frozenset[Setting]
MAX_TRIED_VALUES = 8
"""Two settings that are refused are tried with every value of the factors that have no more values than these."""
ATTEMPTS = 12
"""Orders of the factors in which a row is built; the one that covers most is used."""


@dataclass
class CoveringArray:
    """Generates the rows, and knows which pairs are covered, refused, or not reached."""

    sizes: Sequence[int]
    """The number of values of each factor."""
    find_problem: Callable[[Row], str]
    """Says why a row is refused; empty if it is allowed."""
    refused: dict[frozenset[Setting], str] = field(default_factory=dict)
    """The fewest settings that are refused together, with the defaults of the other factors, and why."""
    rows: list[Row] = field(default_factory=list)
    unreached: set[frozenset[Setting]] = field(default_factory=set)
    """Pairs that are refused in no other way than together with a third setting, wherever they were tried."""

    def __post_init__(self) -> None:
        factors = range(len(self.sizes))
        self.pairs = {
            frozenset(((one, first), (other, second)))
            for one, other in itertools.combinations(factors, 2)
            for first in range(self.sizes[one])
            for second in range(self.sizes[other])
        }
        self.uncovered = set(self.pairs)
        starts = [sum(self.sizes[:factor]) for factor in factors]
        self._bits = [[1 << starts[factor] + value for value in range(self.sizes[factor])] for factor in factors]
        self._refused_bits: set[int] = set()
        self._partners = [[0] * size for size in self.sizes]
        """The settings with which each setting is in an uncovered pair."""
        for one, other in self.uncovered:
            self._partners[one[0]][one[1]] |= self._encode([other])
            self._partners[other[0]][other[1]] |= self._encode([one])

    def iter_rows(self) -> Iterator[Row]:
        """Yield rows until every pair is covered, refused or unreached."""
        while self.uncovered:
            row = self._build_row()
            if row is None:
                continue
            if problem := self.find_problem(row):
                self._learn_refusal(row, problem)
                continue
            yield self._add_row(row)
        for settings in [settings for settings in self.refused if len(settings) == 2]:
            if (row := self._find_other_context(settings)) is not None:
                del self.refused[settings]
                self._refused_bits.remove(self._encode(settings))
                yield self._add_row(row)

    @property
    def refused_pairs(self) -> set[frozenset[Setting]]:
        """The pairs that contain settings which are refused together."""
        few = [settings for settings in self.refused if len(settings) <= 2]
        return {pair for pair in self.pairs if any(settings <= pair for settings in few)}

    def _encode(self, settings: Iterable[Setting]) -> int:
        return sum(self._bits[factor][value] for factor, value in settings)

    def _count_open_pairs(self, setting: Setting) -> int:
        return self._partners[setting[0]][setting[1]].bit_count()

    def _add_row(self, row: Row) -> Row:
        """Note a row and what it covers, which may be a pair that was given up before."""
        pairs = [frozenset(pair) for pair in itertools.combinations(enumerate(row), 2)]
        self.rows.append(row)
        self.unreached.difference_update(pairs)
        self._close(iter(pairs))
        return row

    def _close(self, pairs: "Iterator[frozenset[Setting]]") -> None:
        for pair in pairs:
            if pair in self.uncovered:
                self.uncovered.remove(pair)
                for setting in pair:
                    self._partners[setting[0]][setting[1]] &= ~self._encode(pair - {setting})

    def _build_row(self) -> Row | None:
        """Build the row that covers most, around one uncovered pair; ``None`` if that pair cannot be covered."""
        seed = min(self.uncovered, key=lambda pair: (-sum(map(self._count_open_pairs, pair)), sorted(pair)))
        draw, candidates = random.Random(len(self.rows)), []
        for _ in range(ATTEMPTS):
            order = [factor for factor in range(len(self.sizes)) if factor not in dict(seed)]
            draw.shuffle(order)
            if (candidate := self._complete(dict(seed), order)) is not None:
                candidates.append(candidate)
        if not candidates:
            self.unreached.add(seed)
            self._close(iter([seed]))
            return None
        return max(candidates, key=self._count_new_pairs)

    def _complete(self, chosen: dict[int, int], order: Sequence[int]) -> Row | None:
        """Choose values for these factors, each the one that covers most together with those before."""
        if not self._is_allowed(chosen.items()):
            return None
        for factor in order:
            values = [
                value
                for value in range(self.sizes[factor])
                if self._is_allowed((*chosen.items(), (factor, value)), (factor, value))
            ]
            if not values:
                return None
            before = self._encode(chosen.items())
            gains = {value: (self._partners[factor][value] & before).bit_count() for value in values}
            chosen[factor] = max(
                values, key=lambda value: (gains[value], self._partners[factor][value].bit_count(), -value)
            )
        row = tuple(chosen[factor] for factor in range(len(self.sizes)))
        # What nothing is gained by stays at its default, which costs least to run.
        return self._reset_idle_values(row)

    def _reset_idle_values(self, row: Row) -> Row:
        for factor, value in enumerate(row):
            plain = (*row[:factor], 0, *row[factor + 1 :])
            is_idle = not self._partners[factor][value] & self._encode(enumerate(row))
            if is_idle and value and self._is_allowed(enumerate(plain)):
                row = plain
        return row

    def _is_allowed(
        self,
        settings: "Iterable[Setting]",
        new: Setting | None = None,
        apart_from: frozenset[Setting] = frozenset(),
    ) -> bool:
        """Whether no known refusal is contained in these settings; ``new`` is the one that was added last."""
        given, last = self._encode(settings), self._encode([new] if new else [])
        excepted = self._encode(apart_from)
        return not any(each & given == each and last & each == last and each != excepted for each in self._refused_bits)

    def _count_new_pairs(self, row: Row) -> int:
        given = self._encode(enumerate(row))
        return sum((self._partners[factor][value] & given).bit_count() for factor, value in enumerate(row)) // 2

    def _learn_refusal(self, row: Row, problem: str) -> None:
        """Find the fewest settings of a refused row that are refused, and close the pairs that contain them."""
        row, problem = self._reset_harmless_values(row, problem)
        settings = {(factor, value) for factor, value in enumerate(row) if value}
        if not settings:
            raise AssertionError(f"the default of every factor is refused: {problem}")
        # A default may be part of the refusal: then another value of that factor is allowed with the settings.
        if len(settings) == 1:
            settings |= {(factor, 0) for factor in range(len(row)) if not row[factor] and self._is_needed(row, factor)}
        self.refused[frozenset(settings)] = problem
        self._refused_bits.add(self._encode(settings))
        self._close(iter([pair for pair in self.uncovered if settings <= pair]))
        if len(settings) == 1:
            (setting,) = settings
            self._close(iter([pair for pair in self.uncovered if setting in pair]))

    def _reset_harmless_values(self, row: Row, problem: str) -> tuple[Row, str]:
        """Reset every value without which the row is refused as well, many of them at once."""
        size = len(row)
        while size:
            first = 0
            while first < len(row):
                part = range(first, min(first + size, len(row)))
                plain = tuple(0 if factor in part else value for factor, value in enumerate(row))
                # A default may be refused for a reason of its own, which says nothing about this row.
                if plain != row and self._is_allowed(enumerate(plain)) and (other := self.find_problem(plain)):
                    row, problem = plain, other
                first += size
            size //= 2
        return row, problem

    def _find_other_context(self, settings: frozenset[Setting]) -> Row | None:
        """Find a row in which two settings are allowed that are refused together with defaults."""
        seen: set[Setting] = set()
        for row in list(self.rows):
            changed = tuple(dict(settings).get(factor, value) for factor, value in enumerate(row))
            new = {setting for setting in enumerate(changed) if self.sizes[setting[0]] <= MAX_TRIED_VALUES} - seen
            if new and self._is_allowed(enumerate(changed), apart_from=settings):
                seen |= new
                if not self.find_problem(changed):
                    return changed
        return None

    def _is_needed(self, row: Row, factor: int) -> bool:
        """Whether some other value of a factor makes a refused row allowed."""
        others = ((*row[:factor], value, *row[factor + 1 :]) for value in range(1, self.sizes[factor]))
        return any(not self.find_problem(other) for other in others)
