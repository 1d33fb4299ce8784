"""Reads what config.proto says about each field of the daemon's configuration.

A unit test keeps the defaults and limits in those comments equal to the code's.
"""

import json
import re
from dataclasses import dataclass

FIELD = re.compile(r"  (?:optional|repeated) (\w+) (\w+) = \d+;")
UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass
class Field:
    name: str  # snake_case, as in the file
    kind: str  # string, bool, uint32, uint64, TenantConfig
    text: str  # the comment without its default
    default: object

    @property
    def value_name(self):
        return value_name(self.name)

    @property
    def is_size(self):
        return self.name.endswith("_bytes")

    @property
    def limits(self):
        """(least, most) if the comment says "from A to B"."""
        match = re.search(r"from (\d+)(?: ([KMGT]iB))? to (\d+)(?: ([KMGT]iB))?", self.text)
        if match is None:
            return None
        return tuple(int(number) * dict(UNITS).get(unit, 1)
                     for number, unit in ((match[1], match[2]), (match[3], match[4])))


def value_name(name):
    """The name in the chart's values: pool_bytes is poolBytes."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def with_value_names(text):
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda match: value_name(match[0]), text)


def format_size(number):
    """The shortest exact form: 67108864 is 64MiB, 0 is 0."""
    for unit, factor in UNITS:
        if number > 0 and number % factor == 0:
            return f"{number // factor}{unit}"
    return str(number)


def read(file):
    """The fields of DaemonConfig, in the file's order."""
    fields, comment = [], []
    lines = iter(file.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line == "message DaemonConfig {":
            break
    for line in lines:
        if line == "}":
            break
        match = FIELD.fullmatch(line)
        if match:
            text, _, default = " ".join(comment).rpartition(" Default: ")
            fields.append(Field(match[2], match[1], text, json.loads(default)))
            comment = []
        elif line.strip().startswith("//"):
            comment.append(line.strip().removeprefix("//").strip())
        else:
            comment = []
    return fields
