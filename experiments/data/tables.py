"""Tables of text: TSV and CSV with a line of names, and Parquet."""

import csv
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SEPARATORS = {".tsv": "\t", ".csv": ","}


def read_columns(path: Path, names: list[str]) -> list[list[Any]]:
    """The named columns of a .tsv, .csv or .parquet file.

    Raises:
      ValueError: another kind of file, one that cannot be read, or a column missing.
    """
    if path.suffix == ".parquet":
        return [list(parquet_column(path, name)) for name in names]
    if path.suffix not in _SEPARATORS:
        raise ValueError(
            "`data.source` must be a .tsv, .csv or .parquet file to classify, got "
            f"'{path}'."
        )
    separator = _SEPARATORS[path.suffix]
    try:
        with path.open(encoding="utf-8", newline="") as file:
            # In a TSV a quote is a character like any other.
            quoting = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
            rows = csv.DictReader(file, delimiter=separator, quoting=quoting)
            _check_columns(path, names, list(rows.fieldnames or []))
            columns = [[row[name] for name in names] for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(path, error) from None
    if any(value is None for row in columns for value in row):
        line = next(i for i, row in enumerate(columns) if None in row) + 2
        raise ValueError(
            f"`data.source` must have all columns in each line, got fewer in line "
            f"{line} of '{path}'."
        )
    return [list(column) for column in zip(*columns, strict=True)] or [
        [] for _ in names
    ]


def parquet_column(path: Path, name: str) -> Iterator[Any]:
    """The values of one column, some thousand rows in memory at a time.

    Raises:
      ValueError: pyarrow is missing, the file cannot be read, or lacks the column.
    """
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError(
            f"`data.source` needs the package pyarrow for '{path}', which is not "
            "installed: pip install 'sfpo_jax[parquet]'."
        ) from None
    try:
        file = parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise _unreadable(path, error) from None
    with file:
        _check_columns(path, [name], file.schema_arrow.names)
        for batch in file.iter_batches(4096, columns=[name]):
            yield from batch.column(0).to_pylist()


def _check_columns(path: Path, names: list[str], found: list[str]) -> None:
    for name in names:
        if name not in found:
            raise ValueError(
                f"`data.source` must have the column {name}, got "
                f"{', '.join(found) or 'none'} in '{path}': name it by "
                "`data.text_column` and `data.label_column`."
            )


def _unreadable(path: Path, error: Exception) -> ValueError:
    reason = " ".join(str(getattr(error, "strerror", None) or error).split())
    return ValueError(f"`data.source` cannot be read, got '{path}': {reason}.")
