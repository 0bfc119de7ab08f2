"""Nsight Systems exports of `nsys export --type parquetdir`: a folder with a file per table.

The tables and columns are those of the SQLite export, by Nsight Systems' documentation of both, so
that they become a database which the reader of that export takes.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.compression import (
    FREE_BYTES,
    compute_max_unpacked_bytes,
    make_bomb_error,
)
from stepsplit.collectors.safe_io.regular_file import describe_special, leads_outside

STRINGS_FILE = "StringIds.parquet"
"""The table that every export has, by which such a folder is recognized."""

_EXPORT_AGAIN = "export the report with nsys export --type sqlite"

# Not those of the operating system's calls and of stacks, which can be far larger and are not read.
_TABLES = (
    "StringIds",
    "CUPTI_ACTIVITY_KIND_DRIVER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "MPI_RANKS",
    "NVTX_EVENTS",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES",
    "TARGET_INFO_GPU",
    "TARGET_INFO_SESSION_START_TIME",
    "TARGET_INFO_SYSTEM_ENV",
)

_BATCH_ROWS = 1 << 16
"""Read at a time; chosen, not measured."""

_PART_BYTES = 8 << 20
"""Of the texts of a batch that are in memory at a time."""


def copy_tables_to_sqlite(folder: Path, where: str, target: Path) -> None:
    """Writes the tables of the export in the folder to a new SQLite database.

    Raises DataError, which names the export as where, if a table is damaged.
    """
    with closing(sqlite3.connect(target)) as database:
        # A copy that is read once and deleted.
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        for table in _TABLES:
            path = folder / f"{table}.parquet"
            if not path.exists():
                continue
            if problem := describe_special(path):
                raise DataError(where, f"{path.name}: {problem}", _EXPORT_AGAIN)
            if leads_outside(path, folder):
                raise DataError(where, f"{path.name}: a link out of the folder", _EXPORT_AGAIN)
            try:
                _copy_table(path, where, table, database)
            except (OSError, ValueError, OverflowError, pa.ArrowException, sqlite3.Error) as error:
                problem = " ".join(str(error).split())[:100]
                raise DataError(
                    where, f"{path.name}: a damaged table ({problem})", _EXPORT_AGAIN
                ) from None
        database.commit()


def _copy_table(path: Path, where: str, table: str, database: sqlite3.Connection) -> None:
    texts = [field.name for field in pq.read_schema(path) if _is_text(field.type)]
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        fields = [
            field
            for field in file.schema_arrow
            if field.name.isidentifier() and (_is_text(field.type) or _is_number(field.type))
        ]
        if not fields:
            return
        most_bytes = compute_max_unpacked_bytes(path.stat().st_size)
        # A run of equal numbers takes no space in Parquet, but it does in the copy.
        copied_bytes = file.metadata.num_rows * len(fields) * 8
        groups = [file.metadata.row_group(one) for one in range(file.metadata.num_row_groups)]
        if max(copied_bytes, sum(one.total_byte_size for one in groups)) > most_bytes:
            raise make_bomb_error(where)
        names = [field.name for field in fields]
        # Quoted, as "end" is a word of SQL. Without types: each value is kept as it is.
        columns = ", ".join(f'"{name}"' for name in names)
        database.execute(f"CREATE TABLE {table} ({columns})")
        insert = f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})"
        for batch in file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
            # So does a text that many rows share: each is in the file, and in the batch, once.
            batch_bytes = sum(map(_count_text_bytes, batch.columns))
            copied_bytes += batch_bytes
            if copied_bytes > most_bytes or batch_bytes > FREE_BYTES:
                raise make_bomb_error(where)
            rows = max(1, batch.num_rows * _PART_BYTES // max(batch_bytes, 1))
            for first in range(0, batch.num_rows, rows):
                values = map(_list_values, batch.slice(first, rows).columns)
                database.executemany(insert, zip(*values, strict=True))


def _count_text_bytes(column: pa.Array) -> int:
    """The bytes of all rows of a column of texts; 0 for one of numbers."""
    if not pa.types.is_dictionary(column.type):
        return 0
    lengths = pc.binary_length(column.dictionary.cast(pa.large_binary()))
    return pc.sum(lengths.take(column.indices)).as_py() or 0


def _list_values(column: pa.Array) -> list[Any]:
    """The values of a column as SQLite has them."""
    if _is_text(column.type):
        # As bytes: what is stored as text need not be UTF-8, such as NCCL's payloads.
        column = column.cast(pa.large_binary())
    elif pa.types.is_temporal(column.type):
        # In their own unit, as in SQLite.
        column = column.cast(pa.int64())
    values: list[Any] = column.to_pylist()
    if pa.types.is_uint64(column.type):
        # SQLite has no larger numbers; those are handles and hashes, which are not read.
        return [None if one is not None and one >= 1 << 63 else one for one in values]
    return values


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
        )
    )


def _is_number(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_integer,
            pa.types.is_floating,
            pa.types.is_boolean,
            pa.types.is_timestamp,
            pa.types.is_duration,
        )
    )
