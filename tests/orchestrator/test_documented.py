"""docs/orchestrator.md names every file of the orchestrator."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_is_named_once_in_the_table() -> None:
    table = (ROOT / "docs" / "orchestrator.md").read_text().partition("## Files")[2].partition("\n## ")[0]
    folder = ROOT / "orchestrator"
    files = [str(path.relative_to(folder)) for path in folder.rglob("*.py")]
    named = [name for name in files if not name.endswith("__init__.py") or name == "store/__init__.py"]
    assert len(named) > 40
    assert {name: table.count(f"`{name}`") for name in named} == dict.fromkeys(named, 1)
