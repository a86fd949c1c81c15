"""Configuration: ``parse_config(argv)`` parses flags and the run TOML into a frozen ``RunConfig``."""

from .parser import ParsedConfig, parse_config
from .schema import RunConfig

__all__ = ["ParsedConfig", "RunConfig", "parse_config"]
