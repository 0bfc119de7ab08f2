"""The value of a formula as a table prints it, and of a number by the digits that are printed."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

from stepsplit.analyzer.errors import DataError

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MEND = "write it with letters, numbers, + - * / and brackets"


def evaluate(formula: str, symbols: Mapping[str, float]) -> float:
    """The formula with these values for its letters. Raises DataError for anything but arithmetic.

    Only sums, products and max(...) are understood: a table is data and runs nothing.
    """
    try:
        return _value(ast.parse(formula, mode="eval").body, symbols)
    except (SyntaxError, KeyError, ZeroDivisionError) as error:
        raise DataError(f"formula {formula!r}", f"not arithmetic ({error})", _MEND) from None


def _value(node: ast.expr, symbols: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name):
            return float(symbols[name])
        case ast.BinOp(left=left, op=op, right=right):
            compute = _OPERATORS[type(op)]
            return compute(_value(left, symbols), _value(right, symbols))
        case ast.Call(func=ast.Name(id="max"), args=arguments):
            return max(_value(each, symbols) for each in arguments)
    raise KeyError(ast.dump(node)[:40])


def as_printed(value: float, printed: str) -> float:
    """The value with the digits that are printed, rounded or cut off, whichever comes closer.

    Tables do either: ZeRO's prints 4046.875 as 4046 and 0.46875 as 0.47.
    """
    scale = 10.0 ** decimals(printed)
    ways = (math.floor(value * scale + 1e-9) / scale, round(value * scale) / scale)
    return min(ways, key=lambda way: abs(way - float(printed)))


def decimals(printed: str) -> int:
    """Digits behind the point."""
    return len(printed.partition(".")[2])


def half_digit(printed: str) -> float:
    """What rounding to the printed digits leaves open on either side."""
    return 0.5 * 10.0 ** -decimals(printed)


def parameters(printed: str) -> float:
    """A count with the field's letters: "7.6B" -> 7.6e9, "0.5T" -> 5e11."""
    return float(printed[:-1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[printed[-1]]
