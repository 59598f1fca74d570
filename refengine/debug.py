"""Whether ``--debug`` was given: failures show tracebacks, and the pool's books are checked after every pass."""

on = False
