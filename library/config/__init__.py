"""Settings: ``load_options(argv)`` turns flags and TOML into one frozen ``RunConfig``."""

from .parser import ParsedConfig, parse_config
from .schema import RunConfig

__all__ = ["ParsedConfig", "RunConfig", "parse_config"]
