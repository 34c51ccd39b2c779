"""What every format answers: how to write some parts into one file. And which writer that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Protocol

from muster.pipeline.sinks.model import Part, SinkSpec
from muster.pipeline.sinks.parts import blocks


class Encoder(Protocol):
    """Made with all parts of an output, so that all of its files have the same columns."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about the columns."""

    def write(self, parts: Sequence[Part], file: IO[bytes]) -> None:
        """Write a whole file of these parts. SetupError when one of them is damaged."""


class Lines:
    """JSON lines: the bytes of the parts, one after the other."""

    notes: tuple[str, ...] = ()

    def write(self, parts: Sequence[Part], file: IO[bytes]) -> None:
        for part in parts:
            for block in blocks(part):
                file.write(block)


def encoder_for(spec: SinkSpec, parts: Sequence[Part]) -> Encoder:
    """Reads all parts where the format needs to know all columns."""
    if spec.format == "jsonl":
        return Lines()
    if spec.format == "csv":
        from muster.pipeline.sinks.delimited import CsvEncoder, columns_of

        return CsvEncoder(columns_of(parts))
    from muster.pipeline.sinks.columnar import ParquetEncoder
    from muster.pipeline.sinks.survey import survey

    declared = dict(spec.columns)
    num_rows = sum(part.num_rows for part in parts)
    return ParquetEncoder(survey(parts, declared), declared, dict(spec.metadata), num_rows)
