"""Asking in a terminal, with questionary; without one there are flags and defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from muster.base.errors import UsageError
from muster.cli.launcher.questions import Question

#: What is wrong with a typed answer, in a sentence; None: nothing.
Check = Callable[[str], str | None]


class Asker(Protocol):
    is_terminal: bool

    def ask(self, question: Question, check: Check) -> str:
        """The answer as text; KeyboardInterrupt when the user has had enough."""

    def confirm(self, text: str) -> bool: ...


class Flags:
    """Nobody to ask: defaults stand in, and a question that needs an answer names its flag."""

    is_terminal = False

    def ask(self, question: Question, check: Check) -> str:
        if question.default is None:
            raise UsageError(
                f"--{question.name} is missing, and this is no terminal to ask in.",
                hint=question.text,
            )
        return question.default

    def confirm(self, text: str) -> bool:
        raise UsageError(
            f"{text} This is no terminal to ask in.", hint="add --yes to run it or --print to not."
        )


class Terminal:
    """Arrow keys to choose; an empty answer is the default, which is shown."""

    is_terminal = True

    def __init__(self) -> None:
        import questionary

        self._library: Any = questionary

    def ask(self, question: Question, check: Check) -> str:
        answer = self._prompt(question, check).unsafe_ask()
        return ",".join(answer) if isinstance(answer, list) else str(answer)

    def confirm(self, text: str) -> bool:
        return bool(self._library.confirm(text, default=True).unsafe_ask())

    def _prompt(self, question: Question, check: Check) -> Any:
        ask, text = self._library, f"{question.name}: {question.text}"
        titles = question.choices.items()
        if question.form == "one":
            choices = [ask.Choice(title, value) for value, title in titles]
            return ask.select(text, choices, default=question.default)
        if question.form == "many":
            marked = (question.default or "").split(",")
            choices = [ask.Choice(title, value, checked=value in marked) for value, title in titles]
            return ask.checkbox(text, choices, validate=lambda picked: bool(picked) or "mark one")
        # It is shown and not typed in place: whoever types would write behind it.
        if question.default is not None:
            text += f" (enter for {question.default or 'the default'})"
        prompt = ask.path if question.form == "path" else ask.text
        # Reading the command at every key would import a task again and again.
        return prompt(
            text, validate=lambda typed: check(typed) or True, validate_while_typing=False
        )


def make_asker() -> Asker:
    return Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Flags()
