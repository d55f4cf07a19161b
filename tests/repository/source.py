"""The repository's own files, for tests about them."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "speculative",
    "outrider",
    "verifier_service",
    "drafter_service",
    "retrieval_service",
    "orchestrator",
    "training",
)
NOT_OURS = {".git", "__pycache__", "build", "dist"}
# "package.module:name", as tables of implementations have it.
ENTRY = re.compile(r"[a-z_][\w.]*\.[\w.]*:\w+")


@cache
def project() -> dict[str, Any]:
    """The contents of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def files(root: Path = ROOT) -> Iterator[Path]:
    """Every file of the repository that no tool generates."""
    for path in sorted(root.iterdir()):
        made = (
            path.name in NOT_OURS
            or path.name.startswith(".venv")
            or path.name.endswith(("_cache", ".egg-info"))
        )
        if made or path.name == ".hypothesis":
            continue
        if path.is_dir():
            yield from files(path)
        else:
            yield path


def modules(generated: bool = False) -> Iterator[tuple[str, Path]]:
    """Dotted name and path of every module of the packages, with or without generated modules."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if generated or not name.startswith("outrider.v1"):
                yield name, path


def imports(name: str, text: str) -> set[str]:
    """Modules that a module imports: at its top, in functions, for types alone, or by a table of strings."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(name.split(".")[: -node.level]) + "." if node.level else ""
            module = f"{start}{node.module or ''}".rstrip(".")
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            found |= {text for argument in node.args if (text := _text(argument))}
        elif ENTRY.fullmatch(_text(node)):
            found.add(_text(node).partition(":")[0])
    return found


def _text(node: ast.AST) -> str:
    """A literal string; empty for any other node."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
