"""What was measured on a RUN.toml's cluster: nccl-tests sweeps, NCCL logs, own runs -> Rates."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.comm.measured import Rates
from stepsplit.analyzer.model.comm.sweep import Sweep
from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.hardware_file import hardware_file
from stepsplit.analyzer.model.spec.table import Table, read_table

_MEND = "name the output of nccl-tests, or a log of NCCL with NCCL_DEBUG_SUBSYS=TUNING"
_TRANSFER = ("op", "ranks", "ranks_per_node", "sizes_bytes", "times_ns")


def read_rates(path: str | Path, hardware: Hardware) -> Rates:
    """The measurements that [hardware] of the file names, as rates_of. Raises DataError."""
    return rates_of(read_table(path), hardware)


def rates_of(run: Table, hardware: Hardware) -> Rates:
    """The measurements that [hardware] measured, transfers and file of a RUN.toml name.

    Paths are relative to the RUN.toml. A sweep of more ranks than the hardware has in a node ran on
    full nodes. Of one op and ranks, measured counts before the file. Raises DataError for a file
    that holds no measurement.
    """
    table = run.table("hardware", None)
    if table is None:
        return Rates()
    names = table.texts("measured", ())
    places = [Path(table.where).parent / name for name in names]
    found = _measured(places, hardware.gpus_per_node) if places else Rates()
    file = hardware_file(table)
    own = (*_transfers(table), *(() if file is None else _transfers(file)))
    return Rates((*found.sweeps, *own), found.tables)


def _transfers(table: Table) -> tuple[Sweep, ...]:
    """The sweeps that a calibration took from recorded runs."""
    return tuple(_transfer(each) for each in table.tables("transfers"))


def _transfer(table: Table) -> Sweep:
    table.knows(*_TRANSFER)
    table.needs(*_TRANSFER)
    try:
        return Sweep(
            op=table.text("op", ""),
            ranks=table.count("ranks", 1),
            ranks_per_node=table.count("ranks_per_node", 1),
            sizes_bytes=table.counts("sizes_bytes", ()),
            times_ns=table.counts("times_ns", ()),
            swept=False,
        )
    except UsageError as error:
        raise table.error("times_ns", str(error), "calibrate again") from None


def _measured(places: list[Path], ranks_per_node: int) -> Rates:
    """The readers bring numpy along, so they are loaded only where something was measured."""
    from stepsplit.analyzer.model.comm.sweep import sweeps_of
    from stepsplit.analyzer.model.comm.table import tuner_tables
    from stepsplit.analyzer.readers.nccl.nccl_tests import Sweeps
    from stepsplit.analyzer.readers.nccl.records import NcclLog
    from stepsplit.analyzer.readers.registry import read_files

    found = Rates()
    for place in places:
        read = [each.content for each in read_files(place)]
        sweeps = [sweep for one in read if isinstance(one, Sweeps) for sweep in one.sweeps]
        tables = [table for one in read if isinstance(one, NcclLog) for table in tuner_tables(one)]
        known = sweeps_of(sweeps, ranks_per_node)
        if not known and not tables:
            raise DataError(place, "holds no sweep and no table of times", _MEND)
        found = Rates((*found.sweeps, *known), (*found.tables, *tables))
    return found
