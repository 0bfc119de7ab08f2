"""What a RUN.toml says was measured on its cluster: nccl-tests sweeps and NCCL logs -> Rates."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.comm.measured import Rates
from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.table import read_table

_MEND = "name the output of nccl-tests, or a log of NCCL with NCCL_DEBUG_SUBSYS=TUNING"


def read_rates(path: str | Path, hardware: Hardware) -> Rates:
    """The measurements that [hardware] measured of the file names, none where it names none.

    Paths are relative to the file. A sweep of more ranks than the hardware has in a node ran on
    full nodes. Raises DataError for a file that holds no measurement.
    """
    table = read_table(path).table("hardware", None)
    names = () if table is None else table.texts("measured", ())
    if not names:
        return Rates()
    return _measured([Path(path).parent / name for name in names], hardware.gpus_per_node)


def _measured(places: list[Path], ranks_per_node: int) -> Rates:
    """The readers bring numpy along, so they are loaded only where something was measured."""
    from stepsplit.analyzer.model.comm.sweep import sweeps_of
    from stepsplit.analyzer.model.comm.table import tuner_tables
    from stepsplit.analyzer.readers.any_file import read_files
    from stepsplit.analyzer.readers.nccl.nouns import NcclLog
    from stepsplit.analyzer.readers.nccl.sweeps import Sweeps

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
