"""Types of values as JSON Schema, draft 7: what Helm 3 and Helm 4 both read."""

SIZE = "^(0|[1-9][0-9]{0,8}(KiB|MiB|GiB|TiB))$"
NAME = "[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?"


def text(pattern=None):
    if pattern is None:
        return {"type": "string"}
    return {"type": "string", "pattern": f"^({pattern})$"}


def name(empty=False):
    """A name of a Kubernetes object."""
    return text(f"({NAME})?" if empty else NAME)


def secret_key():
    return text("[-._a-zA-Z0-9]{1,253}")


def size():
    """Bytes, with a unit so that nobody mistakes MB for MiB."""
    return {"type": "string", "pattern": SIZE}


def device():
    # cuda:all passes, and the templates refuse it with an explanation.
    uuid = "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
    return text(f"cpu|cuda:([0-9]{{1,3}}|all)|(GPU|MIG|CPU)-{uuid}")


def quantity(empty=False):
    """An amount of CPU as Kubernetes writes it."""
    return text("([0-9]+(\\.[0-9]+)?|[0-9]+m)" + ("?" if empty else ""))


def integer(least, most):
    return {"type": "integer", "minimum": least, "maximum": most}


def boolean():
    return {"type": "boolean"}


def choice(*names):
    return {"type": "string", "enum": list(names)}


def switch():
    return {"enum": [True, False, "auto"]}


def count_or_percent():
    return {"type": ["integer", "string"], "minimum": 1, "pattern": "^(100|[1-9][0-9]?)%$"}


def text_map():
    return {"type": "object", "additionalProperties": {"type": "string"}}


def fragment():
    """A part of a Kubernetes object; the cluster checks it."""
    return {"type": "object"}


def fragments():
    return list_of(fragment())


def list_of(item):
    return {"type": "array", "items": item}


def record(required=(), **properties):
    """An object that may have these keys and no others."""
    schema = {"type": "object", "additionalProperties": False, "properties": properties}
    if required:
        schema["required"] = list(required)
    return schema


def is_worth_naming(schema):
    """Whether a reader of values.yaml cannot guess the type from the default."""
    return "enum" in schema or schema.get("pattern") == SIZE


def describe(schema):
    """The type in a word or two, for the table."""
    if schema.get("pattern") == SIZE:
        return "size"
    if "enum" in schema:
        return ", ".join(str(one).lower() if isinstance(one, bool) else str(one)
                         for one in schema["enum"])
    kind = schema["type"]
    if isinstance(kind, list):
        return "number or percentage"
    if kind == "integer" and "minimum" in schema:
        return f"{schema['minimum']} to {schema['maximum']}"
    return {"string": "text", "array": "list", "object": "map",
            "boolean": "true, false"}[kind]
