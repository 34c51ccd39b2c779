"""A run on one page: its figures, its table, how it was set up, what it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.api.recipe import Recipe
from muster.api.report.about import environment_blocks, setting_blocks, time_facts
from muster.api.report.content import Block, Page, Table, Text, section
from muster.api.report.figures import drawn
from muster.api.report.html import to_html
from muster.api.report.map import MapMaker, map_content
from muster.api.report.sweep import Content, SweepMaker, pictures_of, sweep_content
from muster.api.report.training import script_content, training_content
from muster.api.runs import Run
from muster.api.start.code_watch import changes_of_code
from muster.base.atomic_files import write_atomic
from muster.base.clock import iso_utc
from muster.base.errors import MusterError, SetupError
from muster.base.shown_text import command_line, secrets_of
from muster.run.folder import RunFolder

#: Monitor samples below which a picture of them says nothing.
_FEWEST_SAMPLES = 4


def make_report(run: Run, recipe: Recipe, config: Any) -> list[Path]:
    """Write ``table.csv``, ``table.json``, the figures and the page; returns their paths.

    This works for an unfinished run as well: cells without a result are empty, never 0. Raises
    SetupError where files cannot be read or written.
    """
    return write_report(run, SweepMaker(recipe, config), draws_monitor=False)


def write_report(
    run: Run,
    maker: SweepMaker | MapMaker | None = None,
    out: Path | None = None,
    *,
    draws_monitor: bool = True,
) -> list[Path]:
    """Make the page of any run, with its table and figures; returns their paths, the page last.

    Args:
        run: only looked at; one that is under way is reported as far as it has got.
        maker: the recipe that a sweep or a map was made from. Without it a sweep is shown as
            means over its seeds, and a map with what its run folder holds.
        out: a folder for everything that is made; without it, it goes into the run's folder and
            the page is ``report/index.html`` there.
        draws_monitor: also draw what the devices did, which takes longer than all the rest.

    Raises SetupError where files cannot be read or written. Without matplotlib the page says that
    its figures are missing.
    """
    place = run.folder if out is None else RunFolder(out)
    page = run.folder.report_html if out is None else out / "index.html"
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        content = _content(run, maker, place)
        measured, hosts, files = _monitored(run.folder, place, draws=draws_monitor)
        made = _page(run, content, measured, hosts)
        stored = run.stored
        secrets = secrets_of(stored.argv, stored.spec, stored.options)
        write_atomic(page, to_html(made, _made_by(), secrets))
    except OSError as error:
        raise SetupError(
            f"Cannot make the report at {page}: {error.strerror or error} "
            f"({error.filename or page.parent}).",
            hint="make room or choose another place with --out DIR; the run itself is untouched.",
        ) from error
    return [*content.files, *files, page]


def _content(run: Run, maker: SweepMaker | MapMaker | None, place: RunFolder) -> Content:
    if run.stored.is_gang:
        return _gang_content(run, place)
    if run.stored.is_map:
        return map_content(run, maker if isinstance(maker, MapMaker) else None, place)
    return sweep_content(run, maker if isinstance(maker, SweepMaker) else None, place)


def _gang_content(run: Run, place: RunFolder) -> Content:
    """Raises SetupError where a record holds something else than a training writes."""
    try:
        return script_content(run, place) if run.stored.is_program else training_content(run, place)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SetupError(
            f"Cannot make the report: a record in {run.path} is damaged "
            f"({type(error).__name__}: {error}).",
            hint="see training_results.json, metrics.jsonl and events.jsonl there.",
        ) from error


def _page(
    run: Run, content: Content, measured: Sequence[Block], hosts: Mapping[str, Sequence[str]]
) -> Page:
    stored = run.stored
    no_figures = [Text("There are no figures.")]
    no_results = [Text("There are no results yet.")]
    notes = [Text(note) for note in changes_of_code(run.folder)]
    return Page(
        title=run.folder.path.resolve().name,
        lead=content.lead,
        command=command_line(stored.argv),
        state=content.state,
        health=content.health,
        sections=(
            *section("What failed", content.failures),
            *section("Figures", content.figures or no_figures),
            *section("Results", [*notes, *([b for b in content.results if b] or no_results)]),
            *section("Configuration", setting_blocks(content.settings)),
            *section("Environment", environment_blocks(stored, hosts)),
            *section(
                "Time and devices",
                [time_facts(run.folder), *content.effort, *measured],
            ),
        ),
    )


def _monitored(
    folder: RunFolder, place: RunFolder, *, draws: bool
) -> tuple[list[Block], dict[str, list[str]], list[Path]]:
    """Blocks with what the monitor saw, the GPUs of each machine, and the picture that was made."""
    from muster.monitor.figure import draw
    from muster.monitor.files import Summary, read_rows
    from muster.monitor.sample import HOST

    rows = []
    for log in folder.monitor_logs():
        try:
            rows += list(read_rows(log))
        except MusterError as error:
            return [Text(str(error))], {}, []
    if not rows:
        return [Text("There are no samples of the devices: nothing was recorded.")], {}, []
    rows.sort(key=lambda row: row.time_utc)
    devices = Summary(rows).devices()
    hosts: dict[str, list[str]] = {}
    for device in devices:
        gpus = hosts.setdefault(device.host, [])
        if device.device != HOST:
            gpus.append(device.name or device.device)
    names = (
        "machine", "device", "samples", "utilisation (%)", "highest (%)", "peak memory (MiB)",
        "of (MiB)", "power (W)", "energy (Wh)", "hottest (°C)", "throttled (%)", "samples lost",
    )  # fmt: skip
    cells = tuple(
        (
            d.host, d.device, d.num_samples, d.mean_utilisation_percent, d.max_utilisation_percent,
            d.max_memory_used_mib, d.memory_total_mib, d.mean_power_w, d.energy_wh,
            d.max_temperature_c, d.throttled_percent, d.num_lost,
        )
        for d in devices
    )  # fmt: skip
    blocks: list[Block] = [Table("Devices, as sampled while it ran", names, cells)]
    if not draws or len({row.time_utc for row in rows}) < _FEWEST_SAMPLES:
        return blocks, hosts, []

    def picture() -> list[Path]:
        draw(place.monitor_png, rows, f"{folder.name} on {', '.join(sorted(hosts))}")
        return [place.monitor_png]

    made, remarks = drawn(picture)
    alt = "Utilisation, memory, power and traffic of each device over time"
    return [*blocks, *pictures_of(made, folder.name, alt), *remarks], hosts, made


def _made_by() -> str:
    from muster import __version__
    from muster.base.clock import SystemClock

    return f"Made by muster {__version__} on {iso_utc(SystemClock().wall_s())}."
