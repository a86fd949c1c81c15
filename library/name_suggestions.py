"""Suggestions for misspelled names: ``did you mean network_dim?``."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggest_name(name: str, known_names: Iterable[str], prefix: str = "", cutoff: float = 0.7) -> str:
    """Return ``"; did you mean network_dim?"``, or an empty string if no known name is close."""
    by_lower_case = {known.lower(): known for known in known_names}
    near = get_close_matches(name.lower(), by_lower_case, n=1, cutoff=cutoff)
    return f"; did you mean {prefix}{by_lower_case[near[0]]}?" if near else ""
