"""Files of a gang over SSH: a run folder that both ends have.

A start begins with what the driver's run folder holds, and while it goes on what the host writes is
brought home: a file that grows from where it has grown, any other by rename, a checkpoint when all
of it is here.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from muster.api.gangs.host_plan import Code
from muster.hosts.connection import Connection
from muster.hosts.far_files import HELD, SIGN, digest
from muster.run.folder import RunFolder

_PIECE, _SMALLEST_PIECE = 4 << 20, 1 << 16
#: So much of what is here already is compared, to see that a file has only grown.
_OVERLAP = 4096
#: What the driver writes itself.
_OWN = {
    "run.json", "run.lock", "run.pid", "events.jsonl", "identity.json", "devices.json",
    "spent.json", "ending.json", "requests", "cells", "trackers", "files",
}  # fmt: skip
#: What the first node goes on with.
_STATE = ("metrics.jsonl", "training_results.json", "memory.json", "monitor.csv", "plan.json", "tb")
_NUM_CHECKPOINTS = 2  # should the newest be damaged
#: What programs write into their working folder on a host comes home up to so much in all.
LIMIT_MADE_BYTES = 1 << 30
#: Of a program's files with such names only what they have grown by is brought.
_GROWING = re.compile(r".*(\.(log|txt|out|err|csv|tsv|jsonl)|\.tfevents\..*)", re.DOTALL)
#: A checkpoint takes so long until the user is told that others are saved meanwhile.
_LONG_S = 5.0
_STEP = re.compile(r"step-\d+", re.ASCII)

#: A file that has news: its place there, its size, and where it is here.
_Item = tuple[str, int, Path]


@dataclass
class Shared:
    """The run folder of the driver and that of a host, which is node ``number``: the first has the
    whole state.

    ``left``: so many bytes are still to come; ``awaited``: of what, by its place in the run folder.
    Another thread may read them. ``warn``: who is told what the user may want to change.
    """

    folder: RunFolder
    connection: Connection
    number: int
    code: Code = field(default_factory=lambda: Code(()))
    warn: Callable[[str], None] = lambda text: None
    left: int = 0
    awaited: tuple[str, ...] = ()
    _bases: dict[str, int] = field(default_factory=dict)
    _got: dict[str, int] = field(default_factory=dict)
    #: Of a program's own, which may also have changed before their ends.
    _grown: dict[str, Path] = field(default_factory=dict)
    #: Checkpoints that the host was sent, or has had since.
    _held: set[str] = field(default_factory=set)
    _piece: int = _SMALLEST_PIECE
    _step_took_s: float = 0.0
    #: Of the host's own files here.
    _sizes: dict[Path, int] = field(default_factory=dict)
    _num_bytes: int = 0
    _has_warned: bool = False

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def send(self) -> list[Path]:
        """Send what the host goes on with. Returns the files that a program has written there, and
        that are not sent because the user's code has them."""
        path, own = self.folder.path, self._own_files
        for source in _files(path / "cells"):
            self._put(source, f"run/{source.relative_to(path).as_posix()}")
        left_out = []
        for source in _files(own):
            place, size = _of_code(source.relative_to(own)), source.stat().st_size
            self._sizes[source] = size
            self._num_bytes += size
            if place in self.code.places:
                left_out.append(source)
            else:
                self._put(source, f"code/{place}")
                if _GROWING.fullmatch(source.name):
                    self._got[f"code/{place}"] = size
        if not self.is_first:
            return left_out
        for name in _STATE:
            for source in _files(path / name):
                self._put(source, f"run/{source.relative_to(path).as_posix()}")
        if self.folder.rank_log(0).exists():  # by which a program's numbers are marked
            self.connection.ask("put", f"run/logs/{self.folder.rank_log(0).name}", 0, 0)
        self._put_back()
        for source in self._checkpoints():
            self._put(source, f"run/{source.relative_to(path).as_posix()}")
            if _STEP.fullmatch(source.parent.name):
                self._held.add(source.parent.name)
        return left_out

    def bring(self) -> Iterator[None]:
        """Bring what is new, in pieces: between two of them something else may be asked.

        Raises ValueError where the host names a place that is none of its own.
        """
        news = self.connection.ask("changed", limit_s=120.0)
        growing: list[_Item] = []
        plain: list[_Item] = []
        late: list[_Item] = []
        made: list[_Item] = []
        steps: dict[str, list[_Item]] = {}
        for place, size in news["files"]:
            parts = _parts_of(place)
            if type(size) is not int or size < 0:
                raise ValueError(f"it says {size!r:.50} for the size of a file")
            is_of_step = len(parts) == 4 and parts[1] == "checkpoints" and _STEP.fullmatch(parts[2])
            if any(part.startswith(".") for part in parts[: 3 if is_of_step else None]):
                continue  # the far end names none, and here they have a meaning
            if parts[0] == "code":
                inner = parts[2:] if parts[1] == "0" else (f"root-{parts[1]}", *parts[2:])
                target = self._target("files", self._own_files.name, *inner)
                if self._has_room(place, size, target):
                    (growing if _GROWING.fullmatch(parts[-1]) else made).append(
                        (place, size, target)
                    )
            elif not self._is_wanted(parts[1:]):
                continue
            elif is_of_step:
                steps.setdefault(parts[2], []).append((place, size, Path(parts[3])))
            else:
                is_late = parts[1] == "checkpoints"
                is_log = place.endswith(".log") or ".tfevents." in parts[-1]
                grows = not is_late and (is_log or parts[1] == "metrics.jsonl")
                group = late if is_late else growing if grows else plain
                group.append((place, size, self._target(*parts[1:])))
        gone = [_parts_of(place) for place in news["gone"]]
        there = {str(name) for name in news["steps"] if _STEP.fullmatch(str(name))}
        self._expect(growing, plain, *steps.values(), late, made)
        for item in growing:
            yield from self._append(*item)
        for item in plain:
            yield from self._replace(*item)
        for parts in gone:  # checkpoints go as new ones come, and logs stay
            if parts[0] == "run" and self._is_wanted(parts[1:]) and len(parts) == 2:
                self._target(parts[1]).unlink(missing_ok=True)
        self._expect(*steps.values(), late, made)
        self._compare(there)
        for name in sorted(steps, key=_by_number, reverse=True):
            yield from self._bring_step(name, steps[name])
        if self.is_first:
            self._let_go(there)
        self._expect(late, made)
        for item in [*late, *made]:
            yield from self._replace(*item)
        self._expect()

    def check(self) -> Iterator[None]:
        """Bring those anew that have not only grown, once nothing is written there any more."""
        for place, target in self._grown.items():
            size = self._got[place]
            there = self.connection.ask("digest", place, size, limit_s=600.0)
            if there and there != digest(target, size):
                yield from self._replace(place, size, target)

    def _has_room(self, place: str, size: int, target: Path) -> bool:
        more = size - self._sizes.get(target, 0)
        if self._num_bytes + more <= LIMIT_MADE_BYTES:
            self._num_bytes += more
            self._sizes[target] = size
            return True
        if not self._has_warned:
            self._has_warned = True
            self.warn(
                f"{self._own_files} holds at most {LIMIT_MADE_BYTES >> 20} MiB of what programs "
                f"write into their working folder; what is more, such as {Path(place).name} with "
                f"{size >> 20} MiB, stays on the host and is removed at the end. Have the program "
                "write it to a place of the host's own."
            )
        return False

    def _compare(self, there: set[str]) -> None:
        """Tell whether the link is too slow for what is saved."""
        saved = sorted((int(name[5:]) for name in there), reverse=True)
        here = [int(p.name[5:]) for p in self.folder.checkpoints.glob("step-*")
                if _STEP.fullmatch(p.name)]  # fmt: skip
        if len(saved) < 2 or not here or self._step_took_s < _LONG_S:
            return
        behind = (saved[0] - max(here)) // (saved[0] - saved[1])
        if behind >= 3:
            self.warn(
                "checkpoints are saved faster than the link brings them: what is here may be "
                "several behind, and is what a lost host leaves; save less often "
                "(--checkpoint-interval)"
            )

    @property
    def _own_files(self) -> Path:
        return self.folder.files_of(self.connection.host.name)

    def _target(self, *parts: str) -> Path:
        """A place in the run folder. Raises ValueError where a link would lead out of it."""
        path = self.folder.path
        for part in parts:
            path = path / part
            if path.is_symlink():
                raise ValueError(
                    f"{path} is a symbolic link; what hosts write goes only into real files and "
                    "folders of the run folder (--run-dir names one that is where the room is)"
                )
        return path

    def _is_wanted(self, parts: Sequence[str]) -> bool:
        name = parts[0]
        if self.is_first:
            return name.lower() not in _OWN  # there are disks to which both are the same
        return name in ("logs", "memory.json") or name.startswith("monitor-")

    def _expect(self, *groups: Sequence[_Item]) -> None:
        items = [item for group in groups for item in group]
        self.left = sum(size - self._got.get(place, 0) for place, size, _ in items)
        names = ("/".join(_parts_of(place)[1:]) for place, _, _ in items)
        self.awaited = tuple(
            dict.fromkeys(re.sub(r"^(checkpoints/step-\d+)/.*", r"\1", name) for name in names)
        )

    def _put_back(self) -> None:
        """Restore the name of a checkpoint whose driver was killed while it was replaced."""
        for aside in self.folder.checkpoints.glob(".aside-*"):
            final = aside.with_name(aside.name.removeprefix(".aside-"))
            if not final.exists():
                os.replace(aside, final)

    def _checkpoints(self) -> Iterator[Path]:
        place = self.folder.checkpoints
        steps = sorted(place.glob("step-*"), key=lambda path: _by_number(path.name))
        wanted = steps[-_NUM_CHECKPOINTS:]
        with suppress(OSError, ValueError, LookupError, TypeError):
            import json

            best = json.loads((place / "best.json").read_bytes())["step"]
            wanted = [p for p in steps if p in wanted or int(p.name[5:]) == best]
        for step in wanted:
            yield from _files(step)
        for name in ("best.json", "latest.json"):
            yield from _files(place / name)

    def _put(self, source: Path, place: str) -> None:
        position = 0
        with source.open("rb") as file:
            while True:
                data = file.read(_PIECE)
                if data or not position:
                    self.connection.ask(
                        "put", place, position, len(data), after=data, limit_s=300.0
                    )
                if not data:
                    return
                position += len(data)

    def _fetch(self, name: str, place: str, position: int, size: int, extra: int = 0) -> bytes:
        """As much of it as the link carries in about a second: signals go between two pieces."""
        begun_s, wanted = time.monotonic(), min(size, self._piece)
        data = self.connection.fetch(name, place, position, wanted + extra)
        took_s = time.monotonic() - begun_s
        if took_s > 1.0:
            self._piece = max(self._piece // 2, _SMALLEST_PIECE)
        elif took_s < 0.25 and wanted == self._piece:
            self._piece = min(self._piece * 2, _PIECE)
        self.left -= max(0, len(data) - extra)
        return data

    def _beside(self, target: Path) -> Path:
        """Where a file is until it is whole; two hosts may bring one of the same name."""
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.with_name(f".{target.name}.{self.number}.arriving")

    def _replace(self, place: str, size: int, target: Path) -> Generator[None, None, bool]:
        """All of it gets its name at once, if it is now as it was when it was listed; else it is
        another by now, and comes with the next news. Returns whether it has."""
        beside = self._beside(target)
        count, first, is_same = 0, b"", True
        with beside.open("wb") as file:
            while is_same and (count < size or not first):
                told = self._fetch("read", place, count, size - count, SIGN.size)
                sign, data = told[: SIGN.size], told[SIGN.size :]
                first = first or sign
                is_same = len(sign) == SIGN.size and sign == first and SIGN.unpack(sign)[0] == size
                is_same = is_same and (bool(data) or count == size)
                file.write(data)
                count += len(data)
                yield
        if is_same and count == size:
            os.replace(beside, target)
            return True
        beside.unlink()
        return False

    def _append(self, place: str, size: int, target: Path) -> Iterator[None]:
        if place not in self._bases:
            # A log goes on behind what starts before have left; the numbers were sent there.
            is_log = place.startswith("run/logs/")
            self._bases[place] = target.stat().st_size if is_log and target.exists() else 0
        base, got = self._bases[place], self._got.get(place, 0)
        begin = max(0, min(got, size) - _OVERLAP)
        has_grown = bool(base) or self._has_only_grown(place, target, begin, got, size)
        if not has_grown and place.startswith("code/") and target.exists():
            if (yield from self._replace(place, size, target)):
                self._got[place] = size
            return
        if not has_grown:
            beside = self._beside(target)
            with beside.open("wb") as file:
                for data in self._pieces(place, 0, size):
                    file.write(data)
                    yield
            if beside.stat().st_size == size:  # else it was cut meanwhile
                os.replace(beside, target)
                self._got[place] = size
            else:
                beside.unlink()
            return
        if place.startswith("code/"):
            self._grown[place] = target
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as file:
            for data in self._pieces(place, got, size):
                file.write(data)
                got += len(data)
                self._got[place] = got
                yield

    def _pieces(self, place: str, position: int, size: int) -> Iterator[bytes]:
        while position < size and (data := self._fetch("get", place, position, size - position)):
            position += len(data)
            yield data

    def _has_only_grown(self, place: str, target: Path, begin: int, got: int, size: int) -> bool:
        """Whether the end of what is here is what it has there; a training cuts its numbers."""
        if got == 0 or got > size:
            return got == 0 and not target.exists()
        with suppress(OSError), target.open("rb") as file:
            file.seek(begin)
            here = file.read(_OVERLAP + 1)
            return here == self.connection.fetch("get", place, begin, got - begin)
        return False

    def _bring_step(self, name: str, files: Sequence[_Item]) -> Iterator[None]:
        """A checkpoint gets its name once all of it is here."""
        final = self._target("checkpoints", name)
        beside, aside = final.with_name(f".arriving-{name}"), final.with_name(f".aside-{name}")
        shutil.rmtree(beside, ignore_errors=True)
        begun_s, is_held = time.monotonic(), self.connection.ask("hold", name, limit_s=120.0)
        for place, size, inner in files:
            target = beside / inner
            yield from self._replace(f"{HELD}/{inner}" if is_held else place, size, target)
            if not target.exists():  # the host has let it go meanwhile
                shutil.rmtree(beside, ignore_errors=True)
                return
        if final.exists():
            os.replace(final, aside)
        os.replace(beside, final)
        shutil.rmtree(aside, ignore_errors=True)
        self._step_took_s = time.monotonic() - begun_s

    def _let_go(self, there: set[str]) -> None:
        """Remove the checkpoints that the host had and has removed, once its newest is here."""
        self._held |= there
        newest = max(there, key=_by_number, default="")
        if newest and (self.folder.checkpoints / newest).is_dir():
            for name in self._held - there:
                shutil.rmtree(self.folder.checkpoints / name, ignore_errors=True)
            self._held = there


def _parts_of(place: object) -> tuple[str, ...]:
    """Raises ValueError for what is no file below the folder of a start: a host is trusted with
    the run that it computes, and with nothing else of this machine."""
    parts = tuple(str(place).split("/"))
    is_code = parts[0] == "code" and len(parts) > 2 and parts[1].isdecimal()
    is_known = is_code or (parts[0] == "run" and len(parts) > 1)
    if not is_known or {"", ".", ".."} & set(parts) or "\0" in str(place):
        raise ValueError(f"it names {place!r:.200}, which is not a file of its part")
    return parts


def _of_code(inner: Path) -> str:
    """Where the code has what is ``inner`` in the files of a host."""
    parts = inner.parts
    is_other = len(parts) > 1 and re.fullmatch(r"root-\d+", parts[0])
    return "/".join((parts[0][5:], *parts[1:]) if is_other else ("0", *parts))


def _by_number(name: str) -> tuple[int, str]:
    return len(name), name


def _files(path: Path) -> Iterator[Path]:
    """The file, or all files below the folder; none where there is neither."""
    if path.is_file():
        yield path
    for parent, _, names in os.walk(path):
        yield from (Path(parent) / name for name in names if not name.endswith(".arriving"))
