"""Asking in a terminal, with questionary; without one there are flags and defaults."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from muster.base.errors import UsageError
from muster.cli.launcher.questions import Question


class Asker(Protocol):
    is_terminal: bool

    def ask(self, question: Question) -> str:
        """The answer as text; KeyboardInterrupt when the user has had enough."""

    def confirm(self, text: str) -> bool: ...


class Flags:
    """Nobody to ask: defaults stand in, and a question without one names its flag."""

    is_terminal = False

    def ask(self, question: Question) -> str:
        if question.default:
            return question.default
        if question.name == "args":
            return ""
        flag = f"--{question.name.replace('_', '-')}"
        raise UsageError(
            f"{question.text} This is no terminal to ask in.", hint=f"give {flag}: {question.help}"
        )

    def confirm(self, text: str) -> bool:
        raise UsageError(
            f"{text} This is no terminal to ask in.", hint="add --yes to run it or --print to not."
        )


class Terminal:
    """Arrow keys, defaults in place, help below each question."""

    is_terminal = True

    def __init__(self) -> None:
        import questionary

        self._library: Any = questionary

    def ask(self, question: Question) -> str:
        prompt = getattr(self, f"_{question.form}")(question)
        answer = prompt.unsafe_ask()
        text = ",".join(answer) if isinstance(answer, list) else str(answer).strip()
        return text or question.default

    def confirm(self, text: str) -> bool:
        return bool(self._library.confirm(text, default=True).unsafe_ask())

    def _one(self, question: Question) -> Any:
        choices = [
            self._library.Choice(choice.title, value=choice.value, description=choice.help or None)
            for choice in question.choices
        ]
        return self._library.select(
            question.text, choices, default=question.default, instruction=f"({question.help})"
        )

    def _many(self, question: Question) -> Any:
        marked = question.default.split(",")
        choices = [
            self._library.Choice(choice.title, value=choice.value, checked=choice.value in marked)
            for choice in question.choices
        ]
        return self._library.checkbox(
            question.text,
            choices,
            instruction=f"({question.help})",
            validate=lambda values: question.check(",".join(values)) or True,
        )

    def _text(self, question: Question) -> Any:
        return self._library.text(
            question.text,
            instruction=f"({_with_default(question)}) ",
            validate=lambda text: question.check(text.strip() or question.default) or True,
        )

    def _path(self, question: Question) -> Any:
        return self._library.path(
            f"{question.text} ({_with_default(question)})",
            validate=lambda text: question.check(text.strip() or question.default) or True,
        )


def _with_default(question: Question) -> str:
    """The default is shown and not typed in place: whoever types would write behind it."""
    if not question.default:
        return question.help
    return f"{question.help}; enter for {question.default}"


def make_asker() -> Asker:
    return Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Flags()
