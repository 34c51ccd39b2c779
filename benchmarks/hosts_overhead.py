"""Hosts over SSH beside GNU parallel, a loop of ssh, Ray started by hand, and torchrunx.

    python benchmarks/hosts_overhead.py                 # 3 rounds, about 8 minutes
    python benchmarks/hosts_overhead.py --quick

Three hosts with a worker each are real sshd's on loopback addresses of this machine, so that all of
them share its cores: a start costs here what it costs on three machines together. ``first`` is the
time from the command to the begin of the first task, ``whole`` the tasks a second from the command
to its end, ``steady`` from the first result to the last. Functions are empty; commands print the
time. Muster keeps every result on the disk before it counts; the others keep what they print. A
gang is three ranks, one on each host, that add a number up once; ``first`` is the time until one
has the sum. torchrunx (pip install torchrunx) needs a folder that all hosts see, as they do here,
and takes hosts on loopback for this machine: it starts its ranks without SSH.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from measuring import alternate, goal, machine, skip, summary, table, write_json

HOSTS = ("a", "b", "c")
ONE_HOST = "functions: muster --hosts, one host"
TARGET = "def work(i: int):\n    return {'i': i}\n"
NOW = ("date", "+%s.%N")
#: A rank, of which the first tells when it has the sum.
GANG = """
import sys, time

def rank():
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    number = torch.ones(1)
    dist.all_reduce(number)
    assert number.item() == 3
    return time.time()

if __name__ == "__main__":
    print("sum", rank())
"""
TORCHRUNX = """
import sys
import torchrunx
from gang import rank

hosts, config = sys.argv[1].split(","), sys.argv[2]
launcher = torchrunx.Launcher(
    hostnames=hosts, workers_per_host=1, ssh_config_file=config, backend="gloo"
)
print("sum", launcher.run(rank).rank(0))
"""


class Contest:
    """Each contender returns tasks a second from its command to its end, and leaves the rest in
    ``first`` and ``steady``.
    """

    def __init__(self, hosts: Any, folder: Path, counts: tuple[int, int]) -> None:
        self.hosts, self.folder = hosts, folder
        self.functions, self.commands = counts
        self.first: dict[str, list[float]] = {}
        self.steady: dict[str, list[float]] = {}

    def _note(self, name: str, count: int, begin: float, times: list[float]) -> float:
        """``times``: Unix times at which tasks began."""
        self.first.setdefault(name, []).append(min(times) - begin)
        long_s = max(times) - min(times)
        self.steady.setdefault(name, []).append((len(times) - 1) / max(long_s, 1e-3))
        return count / (time.time() - begin)

    def _sweep(self, name: str, count: int, *what: str, on: Sequence[str] = HOSTS) -> float:
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        (self.folder / "work.py").write_text(TARGET)
        listed = self.folder / "list.csv"
        listed.write_text("i\n" + "".join(f"{i}\n" for i in range(count)))
        hosts = ",".join(f"{host}:cpu" for host in on)
        words = ["sweep", "--list", str(listed), f"--hosts={hosts}", "--run-dir", str(run)]
        begin = time.time()
        self._call([sys.executable, "-m", "muster", *words, *what])
        database = sqlite3.connect(run / "ledger.sqlite")
        times = [row[0] for row in database.execute("SELECT started_s FROM attempts")]
        database.close()
        assert len(times) == count
        return self._note(name, count, begin, times)

    def _call(self, words: list[str]) -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.hosts.environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def functions_of_muster(self) -> float:
        return self._sweep("functions: muster --hosts", self.functions, "work.py:work")

    def functions_on_one_host(self) -> float:
        return self._sweep(ONE_HOST, self.functions, "work.py:work", on=HOSTS[:1])

    def commands_of_muster(self) -> float:
        return self._sweep("commands: muster --hosts", self.commands, "--", "date", "+{i}")

    def parallel(self) -> float:
        begin = time.time()
        logins = ",".join(f"1/{host}" for host in HOSTS)
        numbers = [str(i) for i in range(self.commands)]
        words = ["parallel", "--will-cite", "-n0", "--ssh", self.hosts.ssh, "-S", logins, *NOW]
        said = self._call([*words, ":::", *numbers])
        times = [float(line) for line in said.split()]
        return self._note("commands: GNU parallel --sshlogin", self.commands, begin, times)

    def loop(self) -> float:
        """A loop for each host, and the three of them at once."""
        begin = time.time()
        each = self.commands // len(HOSTS)
        line = "for i in $(seq {n}); do {ssh} {host} date +%s.%N </dev/null; done"
        loops = [
            subprocess.Popen(
                ["sh", "-c", line.format(n=each, ssh=self.hosts.ssh, host=host)],
                stdout=subprocess.PIPE, text=True,
            )
            for host in HOSTS
        ]  # fmt: skip
        times = [float(word) for one in loops for word in one.communicate()[0].split()]
        return self._note("commands: a loop of ssh", len(times), begin, times)

    def ray(self) -> float:
        """Started as its manual says, with a task for each call."""
        begin, count = time.time(), self.functions // 4
        program = self.folder / "plain_ray.py"
        program.write_text(
            "import sys, time\nimport ray\n"
            "ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')\n"
            "@ray.remote(num_cpus=1)\ndef work(i):\n    return time.time()\n"
            "end = time.time() + 120\n"
            f"while ray.cluster_resources().get('CPU', 0) < {len(HOSTS)} and time.time() < end:\n"
            "    time.sleep(0.02)\n"
            f"times = ray.get([work.remote(i) for i in range({count})])\n"
            "open('times', 'w').write(' '.join(map(str, times)))\n"
        )
        with self._started() as address:
            self._call([sys.executable, str(program), address])  # Ray prints what it likes to
            times = [float(word) for word in (self.folder / "times").read_text().split()]
            rate = self._note("functions: Ray by hand", count, begin, times)
        return rate

    def gang_of_muster(self) -> float:
        run = self.folder / "gang"
        shutil.rmtree(run, ignore_errors=True)
        hosts = ",".join(f"{host}:cpu:1" for host in HOSTS)
        return self._gang(
            "a gang: muster run --hosts", "-m", "muster", "run", "--hosts", hosts,
            "--run-dir", str(run), "gang.py",
        )  # fmt: skip

    def torchrunx(self) -> float:
        (self.folder / "with_torchrunx.py").write_text(TORCHRUNX)
        # It looks names up itself, and starts what is on loopback without SSH.
        hosts = ",".join(self.hosts.addresses[host] for host in HOSTS)
        config = self.hosts.folder / "config"
        return self._gang("a gang: torchrunx", "with_torchrunx.py", hosts, str(config))

    def _gang(self, name: str, *words: str) -> float:
        (self.folder / "gang.py").write_text(GANG)
        begin = time.time()
        said = self._call([sys.executable, *words])
        return self._note(name, 1, begin, [float(said.split("sum ")[1].split()[0])])

    @contextlib.contextmanager
    def _started(self) -> Iterator[str]:
        ip = "127.0.0.2"
        with socket.create_server((ip, 0)) as server:
            port = server.getsockname()[1]
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        # Its fixed ports are for one node on each machine.
        start += [f"--{name}-port=0" for name in ("min-worker", "max-worker")]
        start += ["--dashboard-agent-listen-port=0"]
        scratch = tempfile.mkdtemp(prefix="ray-by-hand-", dir="/tmp")
        head = [
            *start, "--head", f"--port={port}", f"--node-ip-address={ip}", "--num-cpus=0",
            "--include-dashboard=false", f"--temp-dir={scratch}",
        ]  # fmt: skip
        running = [_quiet(head)]
        try:
            _wait_for(ip, port)
            for host in HOSTS:
                address = self.hosts.addresses[host]
                words = [*start, f"--address={ip}:{port}", f"--node-ip-address={address}"]
                remote = " ".join(["RAY_AUTH_MODE=disabled", *words, "--num-cpus=1"])
                running.append(_quiet([*self.hosts.ssh.split(), host, remote]))
            yield f"{ip}:{port}"
        finally:
            # The far ones first: without their ssh nobody would know them.
            for far in [far for host in HOSTS for far in self.hosts.processes(host)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    far.kill()
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            shutil.rmtree(scratch, ignore_errors=True)

    def contenders(self) -> dict[str, Callable[[], float]]:
        found = {
            "functions: muster --hosts": self.functions_of_muster,
            ONE_HOST: self.functions_on_one_host,
            "functions: Ray by hand": self.ray,
            "commands: muster --hosts": self.commands_of_muster,
            "commands: GNU parallel --sshlogin": self.parallel,
            "commands: a loop of ssh": self.loop,
            "a gang: muster run --hosts": self.gang_of_muster,
            "a gang: torchrunx": self.torchrunx,
        }
        if "--quick" in sys.argv[1:]:
            del found["functions: Ray by hand"]  # it may wait two minutes for a node
        if find_spec("torchrunx") is None:
            print("torchrunx is not installed: not measured", file=sys.stderr)
            del found["a gang: torchrunx"]
        if not _is_gnu_parallel():
            print("GNU parallel is not installed: not measured", file=sys.stderr)
            del found["commands: GNU parallel --sshlogin"]
        return found


def _is_gnu_parallel() -> bool:
    """moreutils has another program of that name."""
    path = shutil.which("parallel")
    if path is None:
        return False
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return "GNU parallel" in done.stdout


def _quiet(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def _wait_for(ip: str, port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection((ip, port), timeout=5).close()
            return
        time.sleep(0.02)


def main() -> None:
    from tests.ssh_hosts import ssh_servers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", type=int, default=20_000, help="empty functions of muster")
    parser.add_argument("--commands", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="contenders whose name has one of these in it"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.functions, args.commands, args.repeats = 400, 9, 1
    if shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        skip("An SSH server is not installed")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"  # of what is started by hand
    about = machine("ray")
    rows, record = [], {}
    with ssh_servers() as hosts, tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        contest = Contest(hosts, Path(name), (args.functions, args.commands))
        contenders = {
            name: run for name, run in contest.contenders().items()
            if any(part in name for part in args.only)
        }  # fmt: skip
        whole = alternate(contenders, args.repeats)
    for kind, values in whole.items():
        first, steady = summary(contest.first[kind]), summary(contest.steady[kind])
        all_in = summary(values)
        record[kind] = {"first_s": first, "steady": steady, "whole": all_in}
        rows.append(
            [
                kind, f"{first['median']:.1f} s", f"[{first['low']:.1f}–{first['high']:.1f}]",
                f"{steady['median']:,.0f}" if steady["median"] else "",
                f"[{steady['low']:,.0f}–{steady['high']:,.0f}]" if steady["median"] else "",
                f"{all_in['median']:,.2f}",
            ]
        )  # fmt: skip
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}, {about['versions']}")
    table(["", "first task", "range", "steady/s", "range", "whole/s"], rows)
    for name in (ONE_HOST, "functions: muster --hosts"):
        if name in record:
            first = record[name]["first_s"]["median"]
            where = "one warm host" if name == ONE_HOST else "three hosts that share these cores"
            goal(f"first task on {where}", "< 3 s", f"{first:.1f} s", first < 3)
    ours = record.get("functions: muster --hosts")
    if ours is not None:
        rate = ours["steady"]["median"]
        goal("empty functions a second over 3 hosts", "≥ 5,000", f"{rate:,.0f}", rate >= 5_000)
    write_json(args.json, {"machine": about, "figures": record})


if __name__ == "__main__":
    main()
