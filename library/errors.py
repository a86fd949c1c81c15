"""The errors a user can cause; the command line shows them as plain lines, without a traceback."""

from collections.abc import Iterable


class UserError(Exception):
    """Something outside our code has to change; the message says what, where, and how."""

    is_told = False
    """Whether another process tells it, so that the user does not read it once for each process."""


class ConfigError(UserError):
    """The settings are wrong: one line for each problem, all of them together."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))
