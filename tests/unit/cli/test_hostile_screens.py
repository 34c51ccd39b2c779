"""Hostile texts on every screen: no exception, nothing for the terminal to obey."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console
from tests.hostile_texts import HOSTILE, Terminal, orders_in

from muster.cli import output
from muster.cli.screens import render
from muster.farm.view import RunView, WorkerLine


def view(text: str) -> RunView:
    workers = tuple(WorkerLine(text, state, text, 1.0, 2.0, text, 3) for state in ("running", text))
    return RunView(
        name=text,
        total=3,
        num_done=1,
        num_failed=1,
        num_cancelled=0,
        num_running=1,
        num_retried=0,
        elapsed_s=1.0,
        rate=None,
        eta=None,
        phase="running",
        workers=workers,
        notes=((text, text),),
    )


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_the_live_picture_of_a_sweep(text: str) -> None:
    stream = io.StringIO()
    # Not markup=False: the picture itself must not depend on who draws it.
    Console(file=stream, width=140, height=30).print(render(view(text), 30))
    assert not orders_in(stream.getvalue())
    assert stream.getvalue().count("\n") < 40


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_every_way_of_printing_on_a_terminal(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, error = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    monkeypatch.setenv("TERM", "dumb")  # rich's own orders are not what is looked for
    output.say(text)
    output.remark(text)
    output.complain(text)
    output.say_json({text: [text]})
    output.table(["name", text[:20]], [[text, "1"], ["a", text]])
    with output.LiveScreen() as screen:
        screen.show(view(text))
        screen.line(text)
    with output.LivePicture() as picture:
        picture.show(render(view(text), 30))
    bar = output.make_bar()
    bar.start()
    bar.line(text)
    bar.show(1, 2, text)
    bar.stop()
    assert not orders_in(out.getvalue())
    assert not orders_in(error.getvalue())


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_every_way_of_printing_into_a_pipe(
    text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output.say(text)
    output.table(["name"], [[text]])
    with output.PlainScreen() as screen:
        screen.show(view(text))
        screen.line(text)
    capfd.readouterr()
    output.say_json({"text": text})
    assert json.loads(capfd.readouterr().out) == {"text": text}
    # An encoding that knows nothing of it.
    ascii_stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_stream)
    output.say(text)
