"""A page that describes the API, made from its OpenAPI document: nothing else is loaded. Pure."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Document = Mapping[str, Any]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; } h2, code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; vertical-align: top; }
th, td { padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid #8886; }
"""


def reference_page(document: Document) -> str:
    """The page, as HTML that runs no script.

    Args:
        document: the OpenAPI document of the API.
    """
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>OpenAI clients take this server's address and /v1 as their base URL. "
        'The same as data: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(_operations(document))}</body></html>"
    )


def _operations(document: Document) -> Iterator[str]:
    schemas = document.get("components", {}).get("schemas", {})
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<h2>{method.upper()} {escape(path)}</h2>"
            yield f"<p>{escape(operation.get('description', ''))}</p>"
            body = operation.get("requestBody")
            if body is not None:
                reference = body["content"]["application/json"]["schema"]["$ref"]
                yield from _fields(schemas[_name(reference)], schemas)


def _fields(schema: Document, schemas: Document) -> Iterator[str]:
    """A table of an object's fields; a field that is an object is followed by its own fields."""
    yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
    for name, field in _rows(schema, schemas, ""):
        text = escape(" ".join(field.get("description", "").split()))
        yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td><td>{text}</td></tr>"
    yield "</table>"


def _rows(schema: Document, schemas: Document, prefix: str) -> Iterator[tuple[str, Document]]:
    """The dotted name and the schema of each field."""
    for name, field in schema.get("properties", {}).items():
        yield prefix + name, field
        for reference in _references(field):
            yield from _rows(schemas[reference], schemas, f"{prefix}{name}.")


def _references(field: Document) -> list[str]:
    """Names of the objects that a field may be, or be a list of."""
    found = [_name(field["$ref"])] if "$ref" in field else []
    items = [field["items"]] if "items" in field else []
    for part in (*field.get("anyOf", ()), *field.get("oneOf", ()), *items):
        found += _references(part)
    return found


def _type(field: Document) -> str:
    """A field's type in a reader's words; null, which every field takes, is left out."""
    if "$ref" in field:
        return "object"
    parts = [*field.get("anyOf", ()), *field.get("oneOf", ())]
    if parts:
        types = dict.fromkeys(_type(part) for part in parts if part.get("type") != "null")
        return " or ".join(types) or "null"
    if "const" in field:
        return repr(field["const"]).replace("'", '"')
    if "enum" in field:
        return " or ".join(f'"{value}"' for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}" if field.get("items") else "empty list"
    return str(field.get("type", "any"))


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]
