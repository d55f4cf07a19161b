"""Documents agree with the code: examples parse, flags and fields of messages exist, links lead somewhere."""

import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2
from pydantic import BaseModel
from source import ROOT
from typer.main import get_command

from drafter_service.settings import DrafterSettings
from orchestrator.settings import OrchestratorSettings
from outrider.cli.app import app
from outrider.cli.modules import benchmark_names, find_benchmark
from outrider.v1 import draft_source_pb2, generation_pb2, retrieval_pb2, verifier_pb2
from retrieval_service.settings import RetrievalSettings
from verifier_service.settings import VerifierSettings

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
PAGES = ROOT / "docs" / "figures"
ENVELOPE = {"name", "commit", "machine", "settings", "seconds"}
"""Fields of every benchmark's result."""
WITH_EXAMPLES = ("write-a-source.md", "grpc-api.md")
SETTINGS = {
    kind.role: kind for kind in (DrafterSettings, OrchestratorSettings, RetrievalSettings, VerifierSettings)
}
OURS = (generation_pb2, verifier_pb2, draft_source_pb2, retrieval_pb2)
OTHERS = {"grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest.DESCRIPTOR.full_name}


class Block(NamedTuple):
    """A piece of a document between fences."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks_of(path: Path) -> Iterator[Block]:
    opened, language, lines = 0, "", list[str]()
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.startswith("```"):
            if opened:
                yield Block(path.name, opened, language, "\n".join(lines) + "\n")
                opened, lines = 0, []
            else:
                opened, language = number, line[3:].strip()
        elif opened:
            lines.append(line)
    assert not opened, f"{path.name}:{opened}: the fence is not closed"


BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path)]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def commands(program: str) -> list[tuple[str, list[str]]]:
    """Calls of a program by their place: in blocks of shell commands or without a language, and in prose."""
    lines = [
        (str(block), line) for block in of("sh", "") for line in block.text.replace("\\\n", " ").splitlines()
    ]
    found = []
    for where, line in [*lines, *in_prose(program)]:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a picture
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words and words[0].rpartition("/")[2] == program:
            found.append((where, words[1:]))
    return found


def in_prose(program: str) -> Iterator[tuple[str, str]]:
    """Calls with flags in the running text, which may break across lines."""
    for path in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for place, span in enumerate(re.findall(rf"`((?:[A-Z_]+=\S+ )?{program}\s[^`]* --[^`]*)`", text)):
            yield f"{path.name}, call {place + 1} in prose", " ".join(span.split())


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {block.language for block in BLOCKS} <= {"", "sh", "python", "json", "yaml", "toml"}


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_parses_and_what_it_imports_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_longer_examples_are_parts_of_files_that_run(name: str) -> None:
    files = [path.read_text() for path in EXAMPLES]
    blocks = [block for block in of("python") if block.document == name]
    assert blocks
    assert [str(block) for block in blocks if not any(block.text in text for text in files)] == []


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_a_shell_reads_its_commands(block: Block) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=block.text.replace("…", ""), capture_output=True, text=True, timeout=10
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", of("json", "yaml", "toml"), ids=str)
def test_data_can_be_read(block: Block) -> None:
    {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}[block.language](block.text)


def flags_in(source: Path) -> set[str]:
    """Flags that a module adds to its parser."""
    return set(re.findall(r'"(--[a-z][a-z-]*)"', source.read_text()))


def flags_of_benchmark(program: Path) -> set[str]:
    """Flags that a benchmark adds, itself or by a function named add_… of another module of benchmarks."""
    flags = flags_in(program)
    for node in ast.walk(ast.parse(program.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if any(name.name.startswith("add_") for name in node.names):
            flags |= flags_in(ROOT.joinpath(*node.module.split(".")).with_suffix(".py"))
    return flags


def flags_of(words: list[str]) -> set[str]:
    """Flags of the command that these words call."""
    if words[0] == "bench":
        common = flags_in(ROOT / "benchmarks" / "shared" / "envelope.py")
        return common if words[1] == "NAME" else common | flags_of_benchmark(find_benchmark(words[1]))
    top = command = get_command(app)
    rest, flags = list(words), {"--help"}
    while named := [word for word in rest if word in getattr(command, "commands", {})]:
        flags |= own_flags(command)
        command, rest = command.commands[named[0]], rest[rest.index(named[0]) + 1 :]
    assert command is not top, f"there is no command {words[0]!r}"
    if command.context_settings.get("ignore_unknown_options"):  # a role's settings are
        flags |= {flag for role in SETTINGS.keys() & words for flag in flags_of_settings(SETTINGS[role])}
    return flags | own_flags(command)


def own_flags(command: Any) -> set[str]:
    """Flags of a command of the command line."""
    return {flag for parameter in command.params for flag in parameter.opts}


def flags_of_settings(kind: type[BaseModel]) -> set[str]:
    """Flags that a role's settings have."""
    return {f"--{name.replace('_', '-')}" for name in kind.model_fields}


@pytest.mark.parametrize(("where", "words"), commands("outrider"))
def test_commands_have_the_flags_that_are_shown(where: str, words: list[str]) -> None:
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert used <= flags_of(words), where


@pytest.mark.parametrize(("where", "words"), [*commands("python"), *commands("python3")])
def test_modules_that_are_run_are_there_and_have_the_flags(where: str, words: list[str]) -> None:
    if words[:1] != ["-m"] or words[1] in ("venv", "pip"):
        return
    spec = importlib.util.find_spec(words[1])
    assert spec is not None, f"{where}: there is no module {words[1]}"
    if spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{words[1]}.__main__")
    assert spec is not None, f"{where}: {words[1]} cannot be run"
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    roles = [kind for kind in SETTINGS.values() if kind.__module__.startswith(f"{words[1]}.")]
    flags = flags_of_settings(roles[0]) if roles else flags_in(Path(spec.origin or ""))
    assert used <= flags, where


@pytest.mark.parametrize(("where", "words"), commands("make"))
def test_make_has_the_targets_that_are_shown(where: str, words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in words if "=" not in word and not word.startswith("-")} <= targets, where


@pytest.mark.parametrize(("where", "words"), commands("grpcurl"))
def test_messages_for_grpcurl_are_messages_of_the_contract(where: str, words: list[str]) -> None:
    assert words[0] == "-plaintext"
    if words[-1] == "list" or "describe" in words:
        names = [word for word in words if word.startswith("outrider.")]
        assert all(name in services() for name in names), where
        return
    body, method = words[words.index("-d") + 1], words[-1]
    name = OTHERS.get(method) or services()[method.partition("/")[0]][method.partition("/")[2]]
    pool = descriptor_pool.Default()
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    json_format.Parse(body, message())


def services() -> dict[str, dict[str, str]]:
    """Methods of the contract's services, each with the name of its request message."""
    return {
        service.full_name: {method.name: method.input_type.full_name for method in service.methods}
        for module in OURS
        for service in module.DESCRIPTOR.services_by_name.values()
    }


def test_a_wrong_message_would_be_found() -> None:
    with pytest.raises(json_format.ParseError):
        json_format.Parse('{"start": {"txt": "x"}}', generation_pb2.GenerateRequest())


def anchor(heading: str) -> str:
    """Anchor of a heading, as renderers of Markdown make it."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        file, _, part = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (part and part not in anchors(target)):
            dead.append(link)
    assert dead == []


def pages_of(nav: list[str | dict[str, Any]]) -> list[str]:
    """Files of a site's navigation, of all its levels, in their order."""
    values = [value for entry in nav for value in ([entry] if isinstance(entry, str) else entry.values())]
    return [page for value in values for page in (pages_of(value) if isinstance(value, list) else [value])]


def test_the_sites_navigation_has_every_document_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = (path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(pages_of(nav)) == sorted(pages)


def test_the_index_knows_every_document() -> None:
    named = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    there = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert there - named == {"README.md"}


def test_every_benchmark_has_a_page_of_its_own() -> None:
    benchmarks = benchmark_names(ROOT / "benchmarks")
    assert [path.stem for path in sorted(PAGES.glob("*.md"))] == benchmarks
    wrong = [name for name in benchmarks if f"`{name}`" not in title_of(PAGES / f"{name}.md")]
    assert wrong == []


def title_of(page: Path) -> str:
    """The first line, with the name of a module where it has that of a command."""
    return page.read_text().partition("\n")[0].replace("-", "_")


def test_the_index_of_figures_links_every_benchmarks_page_once() -> None:
    links = re.findall(r"\]\(figures/([\w-]+)\.md\)", (ROOT / "docs" / "figures.md").read_text())
    assert sorted(links) == benchmark_names(ROOT / "benchmarks")


@pytest.mark.parametrize("schema", sorted(PAGES.glob("*.schema.json")), ids=lambda path: path.name)
def test_a_page_names_every_field_of_its_benchmark(schema: Path) -> None:
    fields = json.loads(schema.read_text())["properties"].keys() - ENVELOPE
    page = (PAGES / schema.name.replace(".schema.json", ".md")).read_text()
    assert fields - set(re.findall(r"`(\w+)[`.]", page)) == set()


def test_every_benchmark_names_its_own_page() -> None:
    named = {
        name: set(re.findall(r"docs/figures/(\w+)\.md", find_benchmark(name).read_text()))
        for name in benchmark_names(ROOT / "benchmarks")
    }
    assert {name: pages for name, pages in named.items() if pages != {name}} == {}
