"""Settings: ``load_options(argv)`` turns flags and TOML into one frozen ``RunConfig``."""

from .load import Loaded, load_options
from .schema import RunConfig

__all__ = ["Loaded", "RunConfig", "load_options"]
