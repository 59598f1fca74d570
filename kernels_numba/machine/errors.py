"""The one error that a kernel's author or user sees from the machine."""


class KernelError(Exception):
    """A kernel was refused or stopped: one line naming kernel, file, line, and, where it ran, thread and index."""
