"""Ranks and machines as they stand in messages."""

from collections.abc import Sequence

MAX_RANKS_SHOWN = 6


def format_ranks(ranks: Sequence[int], hostnames: Sequence[str] = ()) -> str:
    """``ranks 2, 3 (on gpu-b)``."""
    shown = ", ".join(map(str, ranks[:MAX_RANKS_SHOWN]))
    shown += f" and {len(ranks) - MAX_RANKS_SHOWN} more" if len(ranks) > MAX_RANKS_SHOWN else ""
    names = list(dict.fromkeys(hostnames[rank] for rank in ranks)) if hostnames else []
    where = f" (on {', '.join(names[:MAX_RANKS_SHOWN])}{', ...' if len(names) > MAX_RANKS_SHOWN else ''})" if names else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{where}"
