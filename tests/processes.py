"""What tests ask about processes that may end while they ask."""

import psutil


def is_gone(pid: int) -> bool:
    """True for a process that has ended, whether or not its parent has collected it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command_line(process: psutil.Process) -> str:
    """The words a process was started with; empty for one that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also raised, as a subclass, for a zombie
        return ""
