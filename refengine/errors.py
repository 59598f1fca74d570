"""The one exception for bad input."""


class UserError(Exception):
    """A file, flag or name that cannot be used: one line that names it and what would do (exit status 2)."""
