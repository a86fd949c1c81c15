"""The load of the graphics cards and of this computer, as it is now: use, memory, temperature and power.

Cards are read with ``nvidia-smi``, which comes with NVIDIA's driver, so the page itself holds no memory of a card.
"""

import csv
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

QUERY = (
    "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw,power.limit",
    "csv,noheader,nounits",
)
MIB = 2**20
KEPT_SECONDS = 1.5
"""The time for which a reading is kept, however many windows ask."""

ANSWER_SECONDS = 5.0
MAX_GAP_SECONDS = 60.0
"""The longest time between two readings that is counted as time at their power."""


@dataclass(frozen=True)
class CardLoad:
    """One reading of a card; None is what its driver does not tell."""

    index: int
    name: str
    use: float | None  # percent of the time in which something was computed
    memory_used: float | None  # bytes
    memory_total: float | None
    temperature: float | None  # degrees Celsius
    power: float | None  # watts
    power_limit: float | None


def parse_card_loads(output: str) -> list[CardLoad]:
    """Parse the answer of ``nvidia-smi --query-gpu``; lines that are no card, such as messages, are passed over."""
    cards = []
    for row in csv.reader(output.splitlines(), skipinitialspace=True):
        if len(row) != len(QUERY[0].split(",")) or not row[0].strip().isdecimal():
            continue
        use, used, total, temperature, power, limit = map(_parse_number, row[2:])
        cards.append(
            CardLoad(
                index=int(row[0]),
                name=row[1].strip(),
                use=use,
                memory_used=None if used is None else used * MIB,
                memory_total=None if total is None else total * MIB,
                temperature=temperature,
                power=power,
                power_limit=limit,
            )
        )
    return cards


def _parse_number(text: str) -> float | None:
    """Parse a value; None for ``[N/A]``, ``[Not Supported]``, ``[Unknown Error]`` and the like."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < 1e9 else None


def ask_nvidia_smi() -> str | None:
    """Return the answer of nvidia-smi; None without it, or if it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={QUERY[0]}", f"--format={QUERY[1]}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=ANSWER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


@dataclass
class LoadMonitor:
    """Reads the load when it is asked for, at most once in ``KEPT_SECONDS``."""

    ask: Callable[[], str | None] = ask_nvidia_smi
    clock: Callable[[], float] = time.monotonic
    _cards: Sequence[CardLoad] = ()
    _read_at: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read_cards(self) -> Sequence[CardLoad]:
        with self._lock:
            now = self.clock()
            if self._read_at is None or now - self._read_at >= KEPT_SECONDS:
                self._cards = parse_card_loads(self.ask() or "")
                self._read_at = now
            return self._cards

    def read_power(self) -> float | None:
        """Return the watts of all cards together; None if none of them tells its own."""
        powers = [card.power for card in self.read_cards() if card.power is not None]
        return sum(powers) if powers else None

    def export_json(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        host = {
            "use": psutil.cpu_percent(),
            "memory_used": memory.total - memory.available,
            "memory_total": memory.total,
        }
        return {"cards": [asdict(card) for card in self.read_cards()], "power": self.read_power(), "host": host}


@dataclass
class EnergyMeter:
    """Adds up the energy of a run from readings of the power, by the mean of two neighboring ones."""

    watt_hours: float = 0.0
    next_at: float = 0.0
    """The time of the next reading."""

    _last: tuple[float, float] | None = None

    @property
    def has_power(self) -> bool:
        """Whether the last reading told the power."""
        return self._last is not None

    def add(self, now: float, watts: float | None) -> None:
        """Take a reading; after a gap, such as of a computer that was asleep, counting begins again."""
        if watts is None:
            self._last = None
            return
        if self._last is not None and 0 < now - self._last[0] <= MAX_GAP_SECONDS:
            self.watt_hours += (now - self._last[0]) * (watts + self._last[1]) / 2 / 3600
        self._last = (now, watts)
