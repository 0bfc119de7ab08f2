"""The terminal's list of formulas: each with the run's numbers, and what rules of thumb say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.model.formulas import Explained, Folk, RuleOfThumb, Symbol, Unit, Verdict

_INDENT = (0, 0, 0, 2)
_VERDICTS: dict[Verdict, str] = {
    "right": "holds",
    "wrong": "does not hold",
    "half": "holds only in part",
    "unit": "holds in another unit",
}


def listing(explained: Sequence[Explained], heard: Sequence[Folk] = ()) -> RenderableType:
    """One formula after the other, then what else is heard about them, for any width."""
    heading = Text("WHY: the formulas, with this run's numbers", style="bold")
    parts: list[RenderableType] = [Text(), heading]
    for one in explained:
        parts += [Text(), *_entry(one)]
    if heard:
        parts += [Text(), Text("ALSO HEARD ABOUT THESE FORMULAS, and what holds", style="bold")]
        parts += [_heard(folk) for folk in heard]
    return Group(*parts)


def _entry(one: Explained) -> list[RenderableType]:
    heading = Text(f"{one.what} = {_shown(one.value, one.unit)}", style="bold")
    lines: list[RenderableType] = [Text(f"{one.formula.id}: {one.formula.text}")]
    lines += [Text(one.note)] if one.note else []
    lines += [_symbols(one.symbols), Text(one.formula.citation, style="bright_black")]
    lines += [_rule(each, one.unit) for each in one.folk]
    return [heading, *(Padding(line, _INDENT, expand=False) for line in lines)]


def _symbols(symbols: Sequence[Symbol]) -> Table:
    """Name, value and meaning, one symbol a line."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for symbol in symbols:
        value = _shown(symbol.value, symbol.unit)
        table.add_row(Text(f"{symbol.name} = {value}"), Text(symbol.meaning))
    return table


def _rule(rule: RuleOfThumb, unit: Unit) -> Text:
    value = _shown(rule.value, unit)
    return Text(f'rule of thumb: "{rule.rule}" would say {value}: {rule.why}', style="yellow")


def _heard(folk: Folk) -> Text:
    text = Text(f'"{folk.rule}" {_VERDICTS[folk.verdict]}: {folk.reference}')
    return text.append(f" ({folk.citation})", style="bright_black")


def _shown(value: float, unit: Unit) -> str:
    return _IN_UNITS[unit](value)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3g}"


def _time(ns: float) -> str:
    return units.milliseconds(ns) if ns >= 1e6 else units.microseconds(ns)


_IN_UNITS: dict[Unit, Callable[[float], str]] = {
    "": _plain,
    "bytes": units.size,
    "bytes_per_s": units.gigabytes_per_second,
    "flops": units.flops,
    "flops_per_s": lambda rate: f"{units.flops(rate)}/s",
    "memory_bytes": units.gibibytes,
    "ns": _time,
    "parameters": units.count,
    "ratio": units.percent,
}
