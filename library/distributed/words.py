"""Ranks and machines as they stand in messages."""

from collections.abc import Sequence

SHOWN_RANKS = 6


def ranks_in_words(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """``ranks 2, 3 (on gpu-b)``."""
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS]))
    shown += f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
    names = list(dict.fromkeys(hosts[rank] for rank in ranks)) if hosts else []
    where = f" (on {', '.join(names[:SHOWN_RANKS])}{', ...' if len(names) > SHOWN_RANKS else ''})" if names else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{where}"
