"""What goes along with the work of a run of any kind: trackers, samples of its devices, notices to
people, and the limits at which it pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from muster.api.limits import limited
from muster.api.notify import Cause, Notifier, check_places, notifying
from muster.api.options import GangOptions, SweepOptions
from muster.api.trackers.guard import tracking
from muster.api.trackers.tracker import check_installed
from muster.base.settings import Settings
from muster.base.signals import Requests
from muster.monitor.recorder import record_run
from muster.run.folder import RunFolder
from muster.run.session import Session

Options = SweepOptions | GangOptions


def check_services(options: Options) -> None:
    """UsageError for what could not do its work here; a dry run asks as well."""
    options.check_price()
    check_places(options.notify)
    check_installed(options.log_to)


def told_in_queue(
    folder: RunFolder, options: Options, warn: Callable[[str], None]
) -> AbstractContextManager[Notifier]:
    """A context in which a run waits for its devices: its end there is one that nobody sees."""
    return notifying(folder, options.notify if options.wait_s else (), warn)


@dataclass(kw_only=True)
class Services:
    """See `run_services`. ``is_urgent``: trackers get little time at the end, as the run goes on
    elsewhere or has to be gone soon."""

    folder: RunFolder
    options: Options
    session: Session
    requests: Requests
    warn: Callable[[str], None]
    notifier: Notifier
    node: int
    is_urgent: bool = False

    def tell(self, cause: Cause, text: str, exit_code: int | None = None) -> None:
        """Send a notice to those whom ``--notify`` names."""
        self.notifier.tell(cause, text, exit_code)

    def limited(self, num_devices: Callable[[], float]) -> AbstractContextManager[None]:
        """A context for the work alone, in which the run pauses at a limit; see `limits.limited`.
        The first node keeps it for all."""
        if self.node:
            return nullcontext()

        def say(line: str) -> None:
            self.tell("budget", line)
            self.warn(line)

        return limited(self.folder, self.options, self.session, self.requests, num_devices, say)


@contextmanager
def run_services(
    folder: RunFolder,
    options: Options,
    session: Session,
    requests: Requests,
    settings: Settings,
    uuids: Callable[[], Collection[str]],
    warn: Callable[[str], None],
    *,
    node: int = 0,
) -> Iterator[Services]:
    """A context of a start of a run, whose folder the caller holds.

    ``uuids``: the GPUs that it has at the moment. ``node``: of a run on several nodes, each samples
    its own devices, and the first does the rest.
    """
    with ExitStack() as stack:
        stack.enter_context(
            tracking(
                folder, () if node else options.log_to, warn,
                is_urgent=lambda: bool(requests.reason) or services.is_urgent,
            )
        )  # fmt: skip
        stack.enter_context(
            record_run(folder, uuids, options.monitor_interval_s, settings, warn, node_rank=node)
        )
        notifier = stack.enter_context(notifying(folder, () if node else options.notify, warn))
        services = Services(
            folder=folder, options=options, session=session, requests=requests, warn=warn,
            notifier=notifier, node=node,
        )  # fmt: skip
        yield services
