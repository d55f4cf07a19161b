"""Every file: no traces of one machine, nothing in a wrong place, nothing too long to read."""

import ast
import hashlib
import re
from collections import Counter
from itertools import pairwise

import pytest
from source import ROOT, files, modules

TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".proto", ".json", ".yaml", ".yml", ".cfg", ".pyi", ""}
# Written in pieces, so that this file may pass as well.
FORBIDDEN = {
    "a path of one machine": re.compile("|".join(f"/{name}/" for name in ("root", "home", "work", "farm"))),
    "a registry's host": re.compile(
        "|".join(("py" + r"pi\.org", "python" + r"hosted\.org", "download" + r"\.pytorch"))
    ),
    "work left for later": re.compile(r"\b(TO" + "DO|FIX" + r"ME|X" + r"XX)\b"),
}
LONGEST_FUNCTION = 60
LONGEST_MODULE = 450
LARGEST_FOLDER = 18
# The pure core is flat: each file is one idea that documents name.
LARGER_FOLDERS = {"speculative"}


def texts() -> list[tuple[str, str]]:
    return [
        (str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in files()
        if path.suffix in TEXT and path.stat().st_size < 300_000 and "data" not in path.parts
    ]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_mentions(what: str) -> None:
    found = {
        name: match.group()
        for name, text in texts()
        if name != "LICENSE" and (match := FORBIDDEN[what].search(text))
    }
    assert not found


def test_the_search_would_find_them() -> None:
    assert FORBIDDEN["a path of one machine"].search("cd /" + "root/x")
    assert FORBIDDEN["a registry's host"].search("https://py" + "pi.org/simple")
    assert "README.md" in dict(texts())
    assert "Makefile" in dict(texts())


def test_the_licence_is_apache_2_whole() -> None:
    words = (ROOT / "LICENSE").read_text().split()
    assert words[:4] == ["Apache", "License", "Version", "2.0,"]
    assert hashlib.sha256(" ".join(words).encode()).hexdigest() == (
        "0ffddef9e48f8a09aed5caf2d44f7ba1c1be2d9b8e0a6f693b1635b2d5566645"
    )


def test_proto_holds_no_python() -> None:
    """An importable `proto` would shadow a library of that name."""
    assert [path for path in (ROOT / "proto").rglob("*") if path.suffix in {".py", ".pyi"}] == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_folders_that_are_no_packages_hold_no_init(folder: str) -> None:
    assert list((ROOT / folder).rglob("__init__.py")) == []


def test_every_field_of_the_contract_is_commented() -> None:
    field = re.compile(r"\s+(repeated |optional )?[\w.<>, ]+ \w+ = \d+;")
    bare = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted((ROOT / "proto").rglob("*.proto"))
        for number, (before, line) in enumerate(pairwise(path.read_text().splitlines()), start=2)
        if field.fullmatch(line) and not before.strip().startswith("//")
    ]
    assert bare == []


def test_functions_are_short_enough_to_read() -> None:
    """Lines count from the first statement on: a long signature is a list of names."""
    long = [
        f"{name}.{node.name}: {length} lines"
        for name, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and (length := node.end_lineno - node.body[0].lineno + 1) > LONGEST_FUNCTION
    ]
    assert long == []


def test_modules_are_short_enough_to_read() -> None:
    counts = {name: len(path.read_text().splitlines()) for name, path in modules()}
    assert {name: count for name, count in counts.items() if count > LONGEST_MODULE} == {}


def test_every_module_says_what_it_does() -> None:
    silent = [
        name
        for name, path in modules()
        if (text := path.read_text()).strip() and ast.get_docstring(ast.parse(text)) is None
    ]
    assert silent == []


def test_no_code_catches_parts_of_groups() -> None:
    """Up to Python 3.11.3, which Debian 12 has, what an `except*` block raises comes out in a group."""
    catching = [
        str(path.relative_to(ROOT))
        for path in files()
        if path.suffix == ".py"
        and any(isinstance(node, ast.TryStar) for node in ast.walk(ast.parse(path.read_text())))
    ]
    assert catching == []


def test_folders_are_small_enough_to_look_through() -> None:
    counts = Counter(str(path.parent.relative_to(ROOT)) for _, path in modules())
    assert {folder for folder, count in counts.items() if count > LARGEST_FOLDER} <= LARGER_FOLDERS


def test_a_public_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for name, path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {}
