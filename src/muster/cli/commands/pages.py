"""``muster report RUN``: a run of any kind on one page, also while it is unfinished; and ``muster
web``: look at runs in a browser.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from muster.api.experiments.experiment import find_experiment, run_in
from muster.api.look.listing import find_run, places_of
from muster.api.recipe import MapRecipe, Recipe
from muster.base.codec import decode
from muster.base.errors import MusterError, UsageError
from muster.base.flags import Flag
from muster.base.shown_text import count
from muster.cli import output
from muster.cli.flags import LookFlags
from muster.cli.parse import parse
from muster.cli.recipes import is_recipe, sweep_recipe

if TYPE_CHECKING:
    from muster.api.report.map import MapMaker
    from muster.api.report.sweep import SweepMaker
    from muster.run.record import RunRecord
    from muster.web.serve import Listening

_PAGE = """Make one HTML page of a run: figures, table, configuration, environment, what it took.

The page holds its pictures and loads nothing, so it can be sent as one file. Figures are also
written as PNG and PDF, the table as CSV and JSON. RUN is of any kind (sweep, map, train, run) and
may be unfinished or failed.

Examples:
  muster report runs/ssm
  muster report digits --out ~/shared/digits
  muster report runs/ssm --json
"""


@dataclass(frozen=True, kw_only=True)
class _Report(LookFlags):
    """Where the page goes."""

    out: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Write everything into this folder (DIR/index.html) and leave the run's as it is."""


def report(argv: list[str]) -> int:
    flags = parse(_Report, argv, "report", _PAGE)
    if flags.out is not None and flags.out.exists() and not flags.out.is_dir():
        raise UsageError(f"--out {flags.out} is a file.", hint="name a folder for the page.")
    from muster.api.report.make import write_report

    if (experiment := find_experiment(flags.run)) is not None:
        made = []
        for phase in experiment.status():
            run = run_in(experiment.phase(phase.name))
            out = None if flags.out is None else flags.out / phase.name
            if run is not None and phase.state not in ("not begun", "refused", "damaged"):
                made += write_report(run, _maker_of(run.stored), out)
    else:
        run = find_run(flags.run)
        made = write_report(run, _maker_of(run.stored), flags.out)
    if flags.json:
        output.say_json([str(path) for path in made])
    else:
        for path in made:
            output.say(f"made: {path}")
    return 0


def _maker_of(stored: RunRecord) -> SweepMaker | MapMaker | None:
    """The recipe behind a run; None where there is none, or where it is not of this muster."""
    if stored.is_map:
        with suppress(MusterError, SystemExit):
            return _map_maker(stored)
        return None
    name = stored.spec.get("recipe")
    if not stored.is_gang and isinstance(name, str) and is_recipe(name, Recipe):
        from muster.api.report.sweep import SweepMaker

        recipe = sweep_recipe(name)
        assert recipe is not None
        return SweepMaker(recipe, decode(recipe.config, stored.spec["config"], ignore_unknown=True))
    return None


def _map_maker(stored: RunRecord) -> MapMaker | None:
    """A map keeps its command line only; what it means now is asked of that.

    Of a recipe alone: a ``file.py:stage`` would be imported, and a report only looks.
    """
    from muster.api.report.map import MapMaker
    from muster.cli.map_flags import flags_of_map, pipeline_in, read_map

    name, _ = pipeline_in(stored.argv[2:])
    if not is_recipe(name, MapRecipe):
        return None
    parsed = read_map(flags_of_map(stored.argv[2:]))
    if parsed.recipe is None or parsed.job is None:
        return None
    return MapMaker(parsed.recipe, parsed.config, parsed.job.output)


@dataclass(frozen=True, kw_only=True)
class _Web:
    """What is shown, and where."""

    roots: Annotated[tuple[Path, ...], Flag(is_positional=True, metavar="[ROOT…]")] = ()
    """Folders that hold runs, or run folders; ./runs where none is named."""
    port: Annotated[int, Flag(metavar="N")] = 0
    """Listen at this port, for this machine alone; 0: a free one."""
    socket: Annotated[Path | None, Flag(metavar="PATH")] = None
    """Listen at this socket file, which only you may use, instead of a port."""
    allow_actions: bool = False
    """Also let the pages cancel and retry runs."""
    open: bool = False
    """Open the browser of this machine."""
    export: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Write the pages into this folder instead, to be opened without a server."""
    i_know_this_is_public: Annotated[str | None, Flag(metavar="HOST")] = None
    """Listen at this address of the machine, which others can reach, without encryption."""


_WEB = """Show runs in a browser: live, read-only, for nobody but you.

Examples:
  muster web
  muster web runs /scratch/runs --port 8765
  muster web --socket ~/.muster.sock
  muster web runs --export pages
"""


def web(argv: list[str]) -> int:
    flags = parse(_Web, argv, "web", _WEB)
    roots = tuple(map(_place, flags.roots)) or (Path("runs"),)
    if flags.socket is not None and (flags.port or flags.i_know_this_is_public or flags.open):
        raise UsageError("--socket takes the place of a port.", hint="leave the other option out.")
    if not 0 <= flags.port < 2**16:
        raise UsageError(f"--port {flags.port} is not a port.", hint="0 to 65535; 0: a free one.")
    if flags.export is not None:
        return _export(roots, flags, flags.export)
    from muster.web.serve import WebOptions, open_browser, serve

    at = None if flags.socket is None else flags.socket.expanduser()  # --socket=~/x: no shell does
    options = WebOptions(
        roots=roots,
        port=flags.port,
        socket=at,
        public_host=flags.i_know_this_is_public,
        allows_actions=flags.allow_actions,
    )

    def listening(found: Listening) -> None:
        for line in _lines(found, options.roots, at):
            output.say(line)
        if flags.open:
            open_browser(found)

    serve(options, listening=listening, tell=output.remark)
    return 0


def _place(root: Path) -> Path:
    """A folder, or the run or experiment below ``runs`` that is called so, as elsewhere."""
    for place in places_of(str(root)):
        if place.is_dir():
            return place
    raise UsageError(
        f"{root} is not a folder, and no run below runs is called so.",
        hint="name a run or a folder of runs, or leave it out.",
    )


def _export(roots: Sequence[Path], flags: _Web, target: Path) -> int:
    about_a_server = (flags.socket, flags.port, flags.i_know_this_is_public, flags.allow_actions,
                      flags.open)  # fmt: skip
    if any(about_a_server):
        raise UsageError(
            "--export starts no server.", hint="leave out the options of a server, such as --port."
        )
    from muster.web.export import export

    made = export(roots, target)
    output.say(f"{count(made.num_runs, 'run')}: open {target / 'index.html'}")
    if made.num_left_out:
        output.remark(
            f"{count(made.num_left_out, 'task')} of large runs are not in the copy; `muster export "
            "RUN --to results.csv` writes all of them."
        )
    return 0


def _lines(found: Listening, roots: Sequence[Path], at: Path | None) -> list[str]:
    host = socket.gethostname()
    shown = ", ".join(map(str, roots))
    if found.address is None:
        place = at.absolute() if at else ""
        return [
            f"Showing {shown} at {place}. From your own machine:",
            f"  ssh -L 8765:{place} {host}",
            f"  http://localhost:8765/#{found.token}",
            "Ctrl-C ends it; the runs go on.",
        ]
    return [
        f"Showing {shown}:",
        f"  {found.address}",
        f"From another machine: ssh -L {found.port}:127.0.0.1:{found.port} {host}",
        "Ctrl-C ends it; the runs go on.",
    ]
