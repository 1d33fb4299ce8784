"""Makes small mistakes in rules. A mistake that no case notices shows that a case is missing."""

import re
from dataclasses import dataclass

# A number that decides: not part of a name, a duration, a quoted string or a clamp against 0 / 0.
NUMBER = re.compile(r"(?<![\w.\"])\d+(?:\.\d+)?(?![\w.\"%])")
COMPARISON = re.compile(r"(?<![=!<>~])(==|!=|>=|<=|>|<)(?![=~])")
WINDOW = re.compile(r"\[(\d+)([mh])\]")
GROUPING = re.compile(r"\b(by|on) \(([^)]*)\)")
MATCHER = re.compile(r"(\w+)(=~|!=|=)\"[^\"]*\"(, )?")
CLAUSE = re.compile(r"\n(?:unless|and) on [^\n]*")
GUARDS = (re.compile(r"clamp_min\("), re.compile(r">= 0$"))
OPPOSITE = {"==": ("!=",), "!=": ("==",), ">": (">=", "<"), "<": ("<=", ">"),
            ">=": ("<",), "<=": (">",)}
SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Mutant:
    what: str
    expr: str
    wait: str = ""


def replaced(text, match, new):
    return text[:match.start()] + new + text[match.end():]


def is_guard(expr, match):
    """Whether a number only prevents a division by zero, or the NaN of an empty quantile."""
    line_start = expr.rfind("\n", 0, match.start()) + 1
    line = expr[line_start:]
    line = line[:line.find("\n")] if "\n" in line else line
    inside = line[:match.end() - line_start]
    return (("clamp_min(" in line and match.end() - line_start == len(line) - 1)
            or inside.endswith(">= 0"))


def numbers_near(text):
    if "." in text:
        value = float(text)
        return f"{value * 0.95:.6g}", f"{value * 1.05:.6g}"
    return str(int(text) - 1), str(int(text) + 1)


def of_numbers(expr):
    quoted = [match.span() for match in re.finditer(r'"[^"]*"', expr)]
    for match in NUMBER.finditer(expr):
        inside = any(begin <= match.start() < end for begin, end in quoted)
        if inside or is_guard(expr, match):
            continue
        for new in numbers_near(match[0]):
            yield f"{match[0]} -> {new}", replaced(expr, match, new)


def of_comparisons(expr):
    for match in COMPARISON.finditer(expr):
        if "{" in expr[:match.start()].rpartition("}")[2]:  # a label matcher
            continue
        for new in OPPOSITE[match[1]]:
            yield f"{match[1]} -> {new}", replaced(expr, match, new)


def of_windows(expr):
    for match in WINDOW.finditer(expr):
        seconds = int(match[1]) * SECONDS[match[2]]
        for new in (seconds // 2, seconds * 2):
            yield f"{match[0]} -> [{new}s]", replaced(expr, match, f"[{new}s]")


def of_groupings(expr):
    for match in GROUPING.finditer(expr):
        labels = [label.strip() for label in match[2].split(",")]
        for label in labels:
            rest = ", ".join(one for one in labels if one != label)
            yield f"{match[1]} without {label}", replaced(expr, match, f"{match[1]} ({rest})")


def of_matchers(expr):
    for match in MATCHER.finditer(expr):
        if "{" in expr[:match.start()].rpartition("}")[2]:
            yield f"without {match[0]}", replaced(expr, match, "").replace("{}", "")


def of_clauses(expr):
    for match in CLAUSE.finditer(expr):
        yield f"without {match[0].strip()}", replaced(expr, match, "")


def of_waits(wait):
    seconds = int(wait[:-1]) * SECONDS[wait[-1]]
    if seconds == 0:
        return (300,)
    return (seconds // 120 * 60, seconds * 2)  # whole minutes: that is how often rules run


def of_expr(expr):
    """Every small mistake in an expression: (what, the expression with it)."""
    for make in (of_comparisons, of_numbers, of_windows, of_groupings, of_matchers, of_clauses):
        yield from make(expr)


def of_alert(alert):
    for what, expr in of_expr(alert.expr):
        yield Mutant(what, expr, alert.wait)
    for seconds in of_waits(alert.wait):
        yield Mutant(f"for {alert.wait} -> {seconds}s", alert.expr, f"{seconds}s")


def of_record(rule):
    for what, expr in of_expr(rule.expr):
        yield Mutant(what, expr)
