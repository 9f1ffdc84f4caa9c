"""CSV, Parquet and Arrow files as streams of columns (pyarrow)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ortrain._extras import required
from ortrain.data._common import listed
from ortrain.errors import InvalidArgumentError

__all__ = ["MISSING", "SUFFIXES", "TableFile", "is_number"]

_CSV = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_PARQUET = (".parquet", ".pq")
_ARROW = (".arrow", ".feather", ".ipc")
SUFFIXES = (*_CSV, *_PARQUET, *_ARROW)

MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "#N/A")
"""Texts that are no number and mean a missing value in a CSV file."""

# Rows that are decoded at once from Parquet.
_BLOCK_ROWS = 65536
_DELIMITERS = ",;\t"


class TableFile:
    """Columns of a file, read as blocks of rows. The cells of a CSV file are texts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrow = required("pyarrow", "pyarrow", "train", "a table")
        self.is_csv = path.name.lower().endswith(_CSV)
        try:
            self._schema = None if self.is_csv else self._opened().schema
            self.names: list[str] = self._csv_names() if self._schema is None else list(self._schema.names)
        except InvalidArgumentError:
            raise
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise self._unreadable(error) from error
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise InvalidArgumentError(f"{path} has two columns with the name {twice[0]!r}")

    def blocks(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the columns of a block of rows as arrays of pyarrow."""
        try:
            for batch in self._batches(list(columns)):
                if batch.num_rows:
                    yield {name: batch.column(name) for name in columns}
        except InvalidArgumentError:
            raise
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise self._unreadable(error) from error

    def kind_of(self, name: str) -> str:
        """Return ``number``, ``integer``, ``text`` or ``unknown`` for the type of a column; CSV has texts only."""
        if self._schema is None:
            return "text"
        kind = self._schema.field(name).type
        types = self._arrow.types
        if types.is_dictionary(kind):
            kind = kind.value_type
        if types.is_string(kind) or types.is_large_string(kind):
            return "text"
        if types.is_boolean(kind) or types.is_integer(kind):
            return "integer"
        return "number" if types.is_floating(kind) or types.is_decimal(kind) else f"{kind}"

    def _unreadable(self, error: Exception) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self.path} cannot be read as a table: {' '.join(str(error).split())}")

    def _opened(self) -> Any:
        """Open a Parquet or Arrow file."""
        if self.path.name.lower().endswith(_PARQUET):
            parquet = required("pyarrow.parquet", "pyarrow", "train", "a table").ParquetFile(self.path)
            return _Parquet(parquet)
        ipc = required("pyarrow.ipc", "pyarrow", "train", "a table")
        source = self._arrow.memory_map(str(self.path))
        try:
            return _ArrowBlocks(ipc.open_file(source))
        except self._arrow.ArrowInvalid:
            source.seek(0)
            return _ArrowStream(ipc.open_stream(source))

    def _batches(self, columns: list[str]) -> Iterator[Any]:
        if not self.is_csv:
            yield from self._opened().batches(columns)
            return
        csv = required("pyarrow.csv", "pyarrow", "train", "a table")
        reader = self._csv_reader(
            csv.ConvertOptions(
                include_columns=columns,
                column_types={name: self._arrow.string() for name in columns},
                strings_can_be_null=False,
            )
        )
        yield from reader

    def _csv_reader(self, convert: Any) -> Any:
        csv = required("pyarrow.csv", "pyarrow", "train", "a table")
        parse = csv.ParseOptions(delimiter=self._delimiter(), newlines_in_values=True)
        return csv.open_csv(self.path, parse_options=parse, convert_options=convert)

    def _csv_names(self) -> list[str]:
        if self.path.stat().st_size == 0:
            raise InvalidArgumentError(f"{self.path} is empty; expected a first line with the names of the columns")
        csv = required("pyarrow.csv", "pyarrow", "train", "a table")
        names = list(self._csv_reader(csv.ConvertOptions()).schema.names)
        if all(is_number(name) for name in names):
            raise InvalidArgumentError(
                f"{self.path}: the first line must have the names of the columns, got {listed(names)}"
            )
        return names

    def _delimiter(self) -> str:
        """Return the delimiter that the first line has most of."""
        with self._arrow.input_stream(str(self.path)) as stream:
            line = bytes(stream.read(_BLOCK_ROWS)).partition(b"\n")[0].decode("utf-8", "replace")
        return max(_DELIMITERS, key=line.count)


class _Parquet:
    def __init__(self, file: Any) -> None:
        self._file = file
        self.schema = file.schema_arrow

    def batches(self, columns: list[str]) -> Iterator[Any]:
        yield from self._file.iter_batches(batch_size=_BLOCK_ROWS, columns=columns)


class _ArrowBlocks:
    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.schema = reader.schema

    def batches(self, columns: list[str]) -> Iterator[Any]:
        for index in range(self._reader.num_record_batches):
            yield self._reader.get_batch(index).select(columns)


class _ArrowStream:
    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.schema = reader.schema

    def batches(self, columns: list[str]) -> Iterator[Any]:
        for batch in self._reader:
            yield batch.select(columns)


def is_number(text: str) -> bool:
    """Return true for the text of a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
