"""What a kernel's author or user sees from the machine."""


class KernelError(Exception):
    """A kernel was refused or stopped: one line naming kernel, file, line, and, where it ran, thread and index."""


class SetupError(KernelError):
    """Not the kernel but the installation is at fault: one line naming what to install or use instead."""
