"""A driver's place in a Ray cluster: one that runs already, or one that is started here.

The module ``ray`` comes in as a value: only ``executors/ray.py`` imports it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.base.errors import SetupError, UsageError, how_to_install
from muster.base.settings import kept_environment
from muster.base.shown_text import count, shown_mib
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.executors.ray_hosts import RayHosts
from muster.farm.executors.ray_lean import ENVIRONMENT, at_loopback, lean
from muster.farm.executors.ray_links import ADDRESS
from muster.farm.executors.ray_node import send_plainly
from muster.run.folder import RunFolder

_ANSWER_S = 5.0
#: What a start of Ray may take to come up, and to end once it is given up.
_COME_UP_S, _GIVE_UP_S = 10.0, 1.0
#: The beginning of every HTTP/2 connection, with an empty settings frame.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_SETTINGS_FRAME = 4
#: Nothing is reported to Ray's makers, and everybody is asked for a token.
_GUARD = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}


class RaySession:
    """A place in a cluster from the moment it ``is_ready`` until ``close``, which ends a cluster
    that was started here.

    ``is_ready`` raises SetupError where there is no cluster at the address, or it has too little.
    """

    def __init__(
        self, import_ray: Callable[[], Any], request: ClusterRequest, folder: RunFolder
    ) -> None:
        self._request = request
        self._folder: str | None = None
        self._hosts: RayHosts | None = None
        self._guard: dict[str, str] = {}
        self._is_ours = self._is_joined = self._is_ready = self._is_complete = False
        self._thread: threading.Thread | None = None  # in which Ray is started, or joined
        self._has_joined, self._is_over = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._is_noted = False  # the error, and it is raised with the next look
        self._is_closing = False  # so that a start which can still be given up is
        self._restore = contextlib.ExitStack()  # what is Ray's and was changed
        if request.hosts is not None:  # first, for importing Ray takes a second as well
            token = secrets.token_hex(32)
            self._guard = {**_GUARD, "RAY_AUTH_TOKEN": token}  # no file, that a killed one leaves
            self._hosts = RayHosts(request, token, folder)
        try:
            self.ray = import_ray()
            self._is_ours = not self.ray.is_initialized()  # or the program's that called us
            if not self._is_ours and request.hosts is not None:
                raise UsageError(
                    "This program is connected to Ray already, and --hosts starts another.",
                    hint="call ray.shutdown() first, or leave hosts out.",
                )
            self._restore.callback(_silence(self.ray))
            if self._is_ours:
                self._restore.callback(send_plainly(self.ray))
        except BaseException:
            self.close()
            raise

    def is_ready(self, timeout_s: float) -> bool:
        """Whether actors can be asked for; waits no longer than that for it. Of hosts one is
        enough: the others join meanwhile, and one that does not is told by a later call.
        """
        if self._is_ready:
            self._look_at_hosts()
            self._look_at_ours()
            return True
        if self._is_ours and not self._is_joined:
            if self._hosts is not None and not self._hosts.has_head(timeout_s):
                return False
            if not self._has_connected(timeout_s):
                return False
            self._is_joined = True
        if self._hosts is None:
            self._check_room()
        elif not self._hosts.has_room(timeout_s):
            return False
        self._is_ready = True
        return True

    def _look_at_hosts(self) -> None:
        if not self._is_complete and self._hosts is not None and self._hosts.is_up(0.0):
            self._check_room()

    def _look_at_ours(self) -> None:
        """SetupError where a process of the cluster on this machine has ended: no worker would ever
        get room again.
        """
        node = None if self._folder is None else self.ray._private.worker._global_node
        if node is not None and (dead := node.dead_processes()):
            names = ", ".join(name for name, _ in dead)
            raise SetupError(
                f"Ray on this machine has ended: its {names} is gone.",
                hint="what is finished is kept, and the same command goes on.",
            )

    def _check_room(self) -> None:
        check_room(_resources(self.ray), self._request, self._request.address)
        self._is_complete = True

    def news(self) -> Iterator[str]:
        """What has happened to hosts since the last call."""
        while self._hosts is not None and not self._hosts.news.empty():
            yield self._hosts.news.get()

    def close(self) -> None:
        self._is_closing = True
        if self._thread is not None:
            self._end_start()
        has_begun = self._has_joined.is_set() and self._error is None
        if has_begun:
            self.ray.shutdown()
        else:
            self._kill_started()
        self._restore.close()
        if self._hosts is not None:
            self._hosts.close()
        if self._guard and has_begun:
            _read_environment_again(self.ray)  # the next cluster has another token
        self._is_over.set()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end_start(self) -> None:
        """Have the thread come to an end that is starting Ray, or joining one."""
        if self._has_joined.wait(_GIVE_UP_S):
            return
        # Until there is a node, what is not there yet is not waited for: it may hang.
        has_node = self.ray._private.worker._global_node is not None
        if (has_node or self._folder is None) and self._has_joined.wait(_COME_UP_S):
            return
        # Nothing ends a start of Ray from outside but the end of what it waits for. Once there is a
        # node that is the last resort: Ray looks for a control store that is gone with the
        # interpreter's lock held, so that nothing else runs here, and ends this process a minute
        # later.
        self._kill_started()
        if self._hosts is not None:
            self._hosts.close()
        if self._request.address is None:  # else it is not ours to end
            self._has_joined.wait(_GIVE_UP_S)

    def _has_connected(self, timeout_s: float) -> bool:
        """In a thread, as Ctrl-C is to be heard meanwhile. Raises what went wrong."""

        def connect() -> None:
            try:
                self._connect()
            except BaseException as error:
                self._error = error
            self._has_joined.set()
            # The kernel ends what Ray has started with the thread that did it.
            self._is_over.wait()

        if self._thread is None:
            self._thread = threading.Thread(target=connect, name="ray-start", daemon=True)
            self._thread.start()
        has_joined = self._has_joined.wait(timeout_s)
        if self._error is not None:
            # Not at once: Ray waits half a minute for its control store with the interpreter's
            # lock, and a Ctrl-C of that time is to be heard before its error is.
            if self._is_noted:
                raise self._error
            self._is_noted = True
            return False
        return has_joined

    def _kill_started(self) -> None:
        """What has been started so far for a cluster on this machine."""
        if self._folder is None:
            return
        import psutil  # here: only systems that it knows can import it

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(self._folder in word for word in child.cmdline()):
                    child.kill()

    def _connect(self) -> None:
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        logging.getLogger("ray").setLevel(logging.ERROR)  # it has no handler of SIGTERM in a thread
        if self._request.address is not None:
            check_address(self._request.address)
            with kept_environment():
                self._join(self._request.address, settings)
            return
        check_can_authenticate(self.ray)
        if self._hosts is not None:
            near: Any = contextlib.nullcontext()
            if self._hosts.goes_through_ssh:
                settings["_node_ip_address"] = ADDRESS
                near = at_loopback(self.ray)
            with kept_environment(self._guard), near:
                _read_environment_again(self.ray)
                self._join(self._hosts.address, settings)
            return
        self._folder = tempfile.mkdtemp(prefix="muster-ray-", dir=_short_folder())
        self._guard = guarded_environment(Path(self._folder))
        settings |= {"address": "local", "include_dashboard": False}
        if sys.platform == "linux":
            # 127.0.0.1 would be replaced by the machine's outer address. Ray opens its own folder,
            # with its sockets and logs, to everybody (0777): it lies in one that is closed.
            inner = str(Path(self._folder or "") / "r")
            settings |= {"_node_ip_address": "127.0.0.2", "_temp_dir": inner}
        leanly = lean(self.ray, self._request.num_workers, is_given_up=lambda: self._is_closing)
        with kept_environment(self._guard), leanly:
            try:
                _read_environment_again(self.ray)
                self.ray.init(**settings)
            except Exception as error:
                raise SetupError(
                    f"Ray could not be started on this machine: {_one_line(error)}",
                    hint="start it yourself (ray start --head) and give --address HOST:PORT.",
                ) from error

    def _join(self, address: str, settings: Mapping[str, Any]) -> None:
        try:
            self.ray.init(address=address, **settings)
        except Exception as error:
            text = _one_line(error)
            hint = "this machine must be a node of the cluster: ray status says what it has."
            if "ersion mismatch" in text:
                hint = "use the same Python and the same Ray here and on all nodes."
            elif "uthenticat" in text:
                hint = "set RAY_AUTH_MODE=token here, and RAY_AUTH_TOKEN_PATH to its token's file."
            raise SetupError(f"Cannot join the Ray cluster at {address}: {text}", hint=hint) from (
                error
            )


# ---------------------------------------------------------------- who may use a cluster of ours


def check_can_authenticate(ray: Any) -> None:
    """SetupError for a Ray that would let every user of this machine run code as its owner."""
    if not hasattr(ray._raylet, "AuthenticationTokenLoader"):
        raise SetupError(
            f"Ray {ray.__version__} cannot ask for a token: whoever can log in to this machine "
            "could run code in a cluster that is started here.",
            hint=f"{how_to_install('ray')}, or give --address of a cluster that runs already.",
        )


def guarded_environment(folder: Path) -> dict[str, str]:
    """What a cluster is started with that asks everybody for a new token.

    The token is in a file in ``folder`` that only its owner can read; Ray hands the path to its
    nodes and workers. Ray's servers listen on all interfaces, so the token is what protects them.
    """
    path = folder / "auth_token"
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secrets.token_hex(32))
    # The user's own token would come before the path.
    return {**_GUARD, **ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_TOKEN": ""}


def _read_environment_again(ray: Any) -> None:
    """Ray reads the mode and the token once per process, which may have had another cluster.

    The mode comes first: without its token, a mode that asks for one ends the process.
    """
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


# ---------------------------------------------------------------- addresses


def check_address(address: str) -> None:
    """UsageError for what is no address, SetupError where no Ray answers; takes seconds at most.

    Ray itself would try for minutes.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise UsageError(
            f"--address {address} is not HOST:PORT.",
            hint="write it as `ray start --head` prints it (10.0.0.7:6379), or auto for the "
            "cluster of this machine. There is no ray:// here: run muster on a node.",
        )
    hint = "see that it runs (ray status) and that the port is that of its head, usually 6379."
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S) as connection:
            connection.settimeout(_ANSWER_S)
            connection.sendall(_HTTP2_HELLO)
            answer = connection.recv(9)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SetupError(f"No Ray cluster answers at {address}: {reason}.", hint=hint) from None
    if len(answer) < 4 or answer[3] != _SETTINGS_FRAME:
        raise SetupError(f"What answers at {address} is not Ray.", hint=hint)


# ---------------------------------------------------------------- room


def room_for(nodes: Sequence[Mapping[str, float]], request: ClusterRequest) -> int:
    """How many of the workers fit on nodes with these resources if nothing else runs there."""
    wanted = {"CPU": float(request.cores_per_actor), **request.custom_resources}
    if request.gpus_per_worker:
        wanted["GPU"] = request.gpus_per_worker
    if request.memory_bytes:
        wanted["memory"] = float(request.memory_bytes)
    return sum(
        # A part of a GPU is one of a single GPU: two workers of 0.6 do not share one.
        min(_times(node.get(name, 0.0), amount) for name, amount in wanted.items())
        for node in nodes
    )


def _times(there: float, amount: float) -> int:
    if amount < 1 and there >= 1:
        return int(there) * int(1 / amount + 1e-6)
    return int(there / amount + 1e-6)


def check_room(
    nodes: Sequence[Mapping[str, float]], request: ClusterRequest, address: str | None
) -> None:
    """SetupError when the workers can never all run, with what there is."""
    room = room_for(nodes, request)
    if room >= request.num_workers:
        return
    each = needs(request)
    shown = ", ".join(_shown(node, request) for node in nodes[:8])
    more = f" and {len(nodes) - 8} more nodes" if len(nodes) > 8 else ""
    where = f"the Ray cluster at {address}" if address else "Ray on this machine"
    hint = f"ask for --workers {room}, or for less per worker."
    if room == 0:
        flags = ["--memory"] * bool(request.memory_bytes)
        flags += ["--cpus-per-worker", "--gpus-per-worker"]
        hint = f"ask for less with {', '.join(flags)} and --resource."
    raise SetupError(
        f"{request.num_workers} workers of {each} do not fit: {where} has room for {room} "
        f"({count(len(nodes), 'node')}: {shown or 'none'}{more}).",
        hint=hint,
    )


def _shown(node: Mapping[str, float], request: ClusterRequest) -> str:
    has = f"{node.get('CPU', 0.0):g} cores and {node.get('GPU', 0.0):g} GPUs"
    if not request.memory_bytes:
        return has
    return f"{has} and {shown_mib(node.get('memory', 0.0) / 2**20)} of memory"


def needs(request: ClusterRequest) -> str:
    """What each worker gets, in words."""
    cores = count(request.cores_per_actor, "core")
    gpus = request.gpus_per_worker
    parts = [cores]
    if gpus:
        parts.append(f"{gpus:g} GPU{'s' if gpus > 1 else ''}")
    if request.memory_bytes:
        parts.append(f"{shown_mib(request.memory_bytes / 2**20)} of memory")
    parts += [f"{amount:g} {name}" for name, amount in request.custom_resources.items()]
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else cores


def _resources(ray: Any) -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


# ---------------------------------------------------------------- manners


def _short_folder() -> str:
    """For temporary files; Ray makes sockets there, whose names have at most 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(usual) < 28 else "/tmp"


def _silence(ray: Any) -> Callable[[], None]:
    """Keep Ray from printing deaths of workers on our screen; the returned call undoes it.

    There is no setting for it: ``log_to_driver`` is for what the workers print.
    """
    module = ray._private.worker
    printing = getattr(module, "print_to_stdstream", None)
    if printing is None:  # another version of Ray: what it prints is a blemish, not an error
        return lambda: None
    module.print_to_stdstream = lambda *words, **settings: None

    def restore() -> None:
        module.print_to_stdstream = printing

    return restore


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
