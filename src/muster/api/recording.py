"""What is written down of a run while it runs: samples of its devices, its begin and its end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from muster.base.clock import SystemClock
from muster.base.errors import EXIT_INTERRUPTED, EXIT_SOME_FAILED, MusterError
from muster.base.journal import Journal
from muster.base.settings import Settings
from muster.devices.nvml_usage import usage_source
from muster.monitor.recorder import Recorder
from muster.monitor.sampler import Sampler
from muster.monitor.sinks import open_sink
from muster.run.folder import RunFolder


def record_run(
    folder: RunFolder,
    uuids: Collection[str],
    interval_s: float,
    settings: Settings,
    say: Callable[[str], None],
    *,
    node_rank: int = 0,
) -> AbstractContextManager[object]:
    """A context that samples the host and the GPUs ``uuids`` into the run's folder.

    ``interval_s`` 0: nothing is recorded. What goes wrong is said once and ends the recording only.
    """
    if interval_s == 0:
        return nullcontext()
    clock = SystemClock()
    return Recorder(
        lambda: Sampler(usage_source(settings, tuple(uuids)), clock),
        lambda: open_sink(folder.monitor_csv(node_rank)),
        interval_s,
        clock,
        say,
    )


@contextmanager
def journalled(folder: RunFolder, num_ranks: int) -> Iterator[Callable[[int], None]]:
    """Write down the begin and the end of a training in this process; call the result with the
    exit code. An exception is an end as well.
    """
    code = EXIT_SOME_FAILED
    journal = Journal(folder.events, SystemClock())

    def note(exit_code: int) -> None:
        nonlocal code
        code = exit_code

    try:
        journal.write("start", ranks=[f"rank {rank}" for rank in range(num_ranks)], node=0)
        yield note
    except MusterError as error:
        code = error.exit_code
        raise
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        raise
    finally:
        journal.write("end", node=0, exit_code=code)
        journal.close()
