"""Small Nsight Systems exports by hand, as nsys export --type sqlite writes them; times in ns."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

EPOCH_NS = 1_790_000_000_000_000_000
HARDWARE = 0x2A << 56 | 0x01 << 48
OLD, NEW = "2021.5", "2024.6"
"""2021.5: names of processes and environment as they were, no payloads, no textId.
2024.6 (schema 3.16): NVTX strings registered, payloads as binary data."""
COMMUNICATOR, SIZE, PEER = "NCCL communicator ID", "Message size [bytes]", "Peer rank"
RANKS, RANK = "No. of ranks", "Rank"
_DOMAIN = 3
_WIDE = (COMMUNICATOR, SIZE)
_PLACE = """start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER"""
_TABLES = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "TARGET_INFO_SYSTEM_ENV": "name TEXT NOT NULL, value TEXT NOT NULL",
    "TARGET_INFO_GPU": "id INTEGER NOT NULL, name TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_PLACE}, demangledName INTEGER NOT NULL, shortName INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_PLACE}, bytes INTEGER, copyKind INTEGER NOT NULL, "
    "srcKind INTEGER, dstKind INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_PLACE}, value INTEGER, bytes INTEGER, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, "
    "eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, "
    "nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, "
    "rangeId INTEGER, text TEXT, globalTid INTEGER, domainId INTEGER",
}
_NEW_TABLES = {
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_PLACE}, graphId INTEGER",
    "NVTX_EVENTS": _TABLES["NVTX_EVENTS"] + ", textId INTEGER, jsonText TEXT, binaryData TEXT",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": "domainId INTEGER NOT NULL, schemaId INTEGER NOT NULL, "
    "idx INTEGER NOT NULL, type INTEGER, name TEXT, offset INTEGER",
    "MPI_RANKS": "globalTid INTEGER NOT NULL, rank INTEGER NOT NULL",
}


@dataclass
class Export:
    """An export of that version. Every kernel gets a launch, at its start by default."""

    version: str = NEW
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    strings: dict[str, int] = field(default_factory=dict)
    schemas: dict[tuple[str, ...], int] = field(default_factory=dict)
    launches: int = 0

    def __post_init__(self) -> None:
        self.put("TARGET_INFO_SYSTEM_ENV", name="Hostname", value="node7")
        self.put("TARGET_INFO_GPU", id=0, name="NVIDIA H100 80GB HBM3")
        if self.version == NEW:
            self.put("TARGET_INFO_SESSION_START_TIME", utcEpochNs=EPOCH_NS)

    def put(self, table: str, **columns: Any) -> Self:
        self.rows.setdefault(table, []).append(columns)
        return self

    def kernel(
        self, name: str, start: int, end: int, *, launched: int | None = None, pid: int = 100,
        tid: int = 101, device: int = 0, stream: int = 7,
    ) -> Self:  # fmt: skip
        place = self._place(start, end, launched, pid, tid, device, stream)
        text = self._text(name)
        return self.put("CUPTI_ACTIVITY_KIND_KERNEL", **place, demangledName=text, shortName=text)

    def copy(self, kind: int, start: int, end: int, *, memory: tuple[int, int] = (2, 2)) -> Self:
        kinds = {"copyKind": kind, "srcKind": memory[0], "dstKind": memory[1]}
        place = self._place(start, end, None, 100, 101, 0, 9)
        return self.put("CUPTI_ACTIVITY_KIND_MEMCPY", **place, **kinds)

    def memset(self, start: int, end: int) -> Self:
        return self.put(
            "CUPTI_ACTIVITY_KIND_MEMSET", **self._place(start, end, None, 100, 101, 0, 7)
        )

    def graph(self, start: int, end: int) -> Self:
        place = self._place(start, end, None, 100, 101, 0, 7)
        return self.put("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", **place)

    def range(
        self, name: str, start: int, end: int | None, *, pid: int = 100, tid: int = 101,
        kind: int = 59, **payload: int,
    ) -> Self:  # fmt: skip
        """A range of NVTX; the keys of the payload are those of ADDED."""
        row: dict[str, Any] = {"start": start, "end": end, "eventType": kind, "domainId": _DOMAIN}
        row["globalTid"] = HARDWARE | pid << 24 | tid
        row |= {"text": name} if self.version == OLD else {"textId": self._text(name)}
        if payload:
            row["binaryData"] = self._packed({ADDED[key]: v for key, v in payload.items()})
        return self.put("NVTX_EVENTS", **row)

    def environment(self, text: str) -> Self:
        return self.put("TARGET_INFO_SYSTEM_ENV", name="DeviceEnvironment", value=text)

    def write(self, path: Path) -> Path:
        """Writes the file."""
        tables = _TABLES if self.version == OLD else _TABLES | _NEW_TABLES
        self.rows["StringIds"] = [{"id": i, "value": text} for text, i in self.strings.items()]
        connection = sqlite3.connect(path)
        for table, columns in tables.items():
            connection.execute(f"CREATE TABLE {table} ({columns})")
        for table, rows in self.rows.items():
            for row in rows:
                given = row if table != "CUPTI_ACTIVITY_KIND_RUNTIME" else row | _CALL
                marks = ", ".join("?" * len(given))
                query = f"INSERT INTO {table} ({', '.join(given)}) VALUES ({marks})"
                connection.execute(query, tuple(given.values()))
        connection.commit()
        connection.close()
        return path

    def _place(
        self, start: int, end: int, launched: int | None, pid: int, tid: int, device: int,
        stream: int,
    ) -> dict[str, Any]:  # fmt: skip
        self.launches += 1
        at = start if launched is None else launched
        call = {"start": at, "end": at + 1, "globalTid": HARDWARE | pid << 24 | tid}
        name = self._text("cudaLaunchKernel_v7000")
        self.put("CUPTI_ACTIVITY_KIND_RUNTIME", **call, correlationId=self.launches, nameId=name)
        place = {"start": start, "end": end, "deviceId": device, "contextId": 1, "streamId": stream}
        return place | {"correlationId": self.launches, "globalPid": HARDWARE | pid << 24}

    def _text(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def _packed(self, fields: Mapping[str, int]) -> bytes:
        """The header of nsys, then the numbers; the schema is listed when it is first used."""
        offset, body, known = 0, b"", tuple(fields) in self.schemas
        schema = self.schemas.setdefault(tuple(fields), 2**24 + len(self.schemas))
        for index, (name, value) in enumerate(fields.items()):
            wide = name in _WIDE
            if not known:
                entry = {"domainId": _DOMAIN, "schemaId": schema, "idx": index, "name": name}
                self.put("NVTX_PAYLOAD_SCHEMA_ENTRIES", **entry, offset=offset or None)
            body += struct.pack("<Q" if wide else "<i", value)
            offset += 8 if wide else 4
        return struct.pack("<QQQQ", _DOMAIN, schema, len(body), 32) + body


ADDED = {"comm": COMMUNICATOR, "size": SIZE, "peer": PEER, "ranks": RANKS, "rank": RANK}
_CALL = {"eventClass": 0, "returnValue": 0}
