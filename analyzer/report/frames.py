"""The rows of a report as pandas tables, with the same columns and types whatever is in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, inspect

if TYPE_CHECKING:
    import pandas as pd


class ReportFrames(Struct, frozen=True):
    """The rows of a report as tables.

    A table has a column for each field of the row, and of a record in it (`basis_kind`). Whole
    numbers are int64, or Int64 if some may be unknown; ratios float64; texts string; lists object.
    Times are ns from the report's t0, sizes bytes. docs/frames.md lists all columns.
    """

    def steps_frame(self) -> pd.DataFrame:
        """The split of each step of each rank; see StepRow."""
        return self._build_frame("steps")

    def step_kinds_frame(self) -> pd.DataFrame:
        """The kinds of the complete steps; see StepKindRow."""
        return self._build_frame("step_kinds")

    def exposed_frame(self) -> pd.DataFrame:
        """Exposed communication by step, axis and phase; see ExposedRow."""
        return self._build_frame("exposed")

    def groups_frame(self) -> pd.DataFrame:
        """The process groups; see GroupRow."""
        return self._build_frame("groups")

    def clocks_frame(self) -> pd.DataFrame:
        """The clock alignment of each rank; see ClockRow."""
        return self._build_frame("clocks")

    def collectives_frame(self) -> pd.DataFrame:
        """Calls by group, op and size; see CollectiveRow."""
        return self._build_frame("collectives")

    def step_calls_frame(self) -> pd.DataFrame:
        """Calls per step; see StepCallsRow."""
        return self._build_frame("step_calls")

    def blame_frame(self) -> pd.DataFrame:
        """Who caused how much waiting; see BlameRow."""
        return self._build_frame("blame")

    def idle_frame(self) -> pd.DataFrame:
        """Idle time by rank, cause and op; see IdleRow."""
        return self._build_frame("idle")

    def kernels_frame(self) -> pd.DataFrame:
        """Compute by rank and kernel family; see KernelFamily."""
        return self._build_frame("kernels")

    def kernel_table_frame(self) -> pd.DataFrame:
        """The kernels with the most time; see KernelRow."""
        return self._build_frame("kernel_table")

    def parts_frame(self) -> pd.DataFrame:
        """The mean step by part of the model; see PartRow."""
        return self._build_frame("parts")

    def slow_kernels_frame(self) -> pd.DataFrame:
        """Kernels that are slower on one rank; see SlowKernel."""
        return self._build_frame("slow_kernels")

    def contention_frame(self) -> pd.DataFrame:
        """Kernels slowed by communication; see ContentionRow."""
        return self._build_frame("contention")

    def overlap_frame(self) -> pd.DataFrame:
        """Overlapped communication by rank, axis and op; see Overlap."""
        return self._build_frame("overlap")

    def lateness_frame(self) -> pd.DataFrame:
        """How often each rank arrived last; see Lateness."""
        return self._build_frame("lateness")

    def critical_path_frame(self) -> pd.DataFrame:
        """The critical path of each step by rank and bucket; see PathPart."""
        return self._build_frame("critical_path")

    def path_steps_frame(self) -> pd.DataFrame:
        """The extent of each critical path; see PathStep."""
        return self._build_frame("path_steps")

    def path_kernels_frame(self) -> pd.DataFrame:
        """The kernels with most time on the critical paths; see PathKernel."""
        return self._build_frame("path_kernels")

    def step_times_frame(self) -> pd.DataFrame:
        """Durations of the steps by rank; see StepDurations."""
        return self._build_frame("step_times")

    def slow_steps_frame(self) -> pd.DataFrame:
        """Outlier steps; see SlowStep."""
        return self._build_frame("slow_steps")

    def coverage_frame(self) -> pd.DataFrame:
        """Which waits are measured; see Coverage."""
        return self._build_frame("coverage")

    def memory_frame(self) -> pd.DataFrame:
        """Memory of each rank, without rows if it was not recorded; see MemoryRow."""
        return self._build_frame("memory")

    def step_work_frame(self) -> pd.DataFrame:
        """What each rank processed in each step, without rows if not counted; see StepWorkRow."""
        return self._build_frame("step_work")

    def findings_frame(self) -> pd.DataFrame:
        """The findings with their basis; see Finding and Basis."""
        return self._build_frame("findings")

    def warnings_frame(self) -> pd.DataFrame:
        """The warnings; see WarningRow."""
        return self._build_frame("warnings")

    def _build_frame(self, name: str) -> pd.DataFrame:
        import pandas as pd

        rows: Sequence[Any] = getattr(self, name) or ()
        return pd.DataFrame(
            {
                column: pd.Series([get_value(row, column) for row in rows], dtype=dtype)
                for column, dtype in list_columns(find_row_type(type(self), name))
            }
        )


def find_row_type(report: type, name: str) -> type:
    """The type of the rows in a field of a report."""
    (field,) = (one for one in msgspec.structs.fields(report) if one.name == name)
    found = inspect.type_info(field.type)
    if isinstance(found, inspect.UnionType):
        found = next(one for one in found.types if not isinstance(one, inspect.NoneType))
    row: type = found.item_type.cls  # type: ignore[attr-defined]
    return row


def list_columns(row: type) -> Iterator[tuple[str, str]]:
    """The columns of a table of such rows with their dtypes; those of a record in a row are named
    after it: basis.kind is the column basis_kind."""
    for field in inspect.type_info(row).fields:  # type: ignore[attr-defined]
        kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        own = [one for one in kinds if not isinstance(one, inspect.NoneType)]
        is_optional = len(own) < len(kinds)
        if isinstance(own[0], inspect.StructType | inspect.DataclassType):
            for inner, dtype in list_columns(own[0].cls):
                optional = {"int64": "Int64", "bool": "boolean"} if is_optional else {}
                yield f"{field.name}_{inner}", optional.get(dtype, dtype)
        else:
            yield field.name, _choose_dtype(own, is_optional)


def _choose_dtype(kinds: Sequence[inspect.Type], is_optional: bool) -> str:
    if all(isinstance(one, inspect.IntType) for one in kinds):
        return "Int64" if is_optional else "int64"
    if all(isinstance(one, inspect.IntType | inspect.FloatType) for one in kinds):
        return "float64"
    if all(isinstance(one, inspect.BoolType) for one in kinds):
        return "boolean" if is_optional else "bool"
    if all(isinstance(one, inspect.StrType | inspect.LiteralType | inspect.EnumType)
           for one in kinds):  # fmt: skip
        return "string"
    return "object"


def get_value(row: object, column: str) -> Any:
    """The value of a column in a row; None of a record that the row lacks."""
    if hasattr(row, column):
        return getattr(row, column)
    name, _, inner = column.partition("_")
    record = getattr(row, name)
    return None if record is None else get_value(record, inner)
