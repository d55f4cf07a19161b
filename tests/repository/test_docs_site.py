"""The site that `make docs` builds is whole, can be searched, and loads nothing from another host."""

import importlib.util
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from source import ROOT

ELSEWHERE = re.compile(r"(?:[a-z]+:)?//")
IN_STYLES = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""")


class Loaded(HTMLParser):
    """Collects the addresses that a browser loads by itself; the addresses of links are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        names = ("src", "srcset", "data", "poster") + (("href",) if tag == "link" else ())
        if given.get("rel") != "canonical":
            self.addresses += [value for name in names if (value := given.get(name))]


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter that has MkDocs."""
    own = ROOT / ".venv-docs" / "bin" / "python"
    if own.exists():
        return str(own)
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("MkDocs is not installed; `make docs` installs it into .venv-docs")
    return sys.executable


def build(python: str, config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "mkdocs", "build", "-f", str(config), "-d", str(site)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def configure(folder: Path) -> Path:
    """Writes the configuration of a site with this repository's hook."""
    config = folder / "mkdocs.yml"
    hook = ROOT / "scripts" / "docs_site.py"
    config.write_text(
        "site_name: a\nstrict: true\nuse_directory_urls: false\n"
        f"theme: {{name: mkdocs, highlightjs: false}}\nhooks: [{hook}]\n"
    )
    return config


def foreign(page: Path) -> list[str]:
    loaded = Loaded()
    text = page.read_text()
    loaded.feed(text)
    return [each for each in loaded.addresses if ELSEWHERE.match(each)] + IN_STYLES.findall(text)


def pages_in(folder: Path, suffix: str) -> set[str]:
    """Paths of the pages in a folder and below it, without their suffix."""
    return {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob(f"*{suffix}")}


@pytest.mark.slow
def test_the_site_has_every_page_a_search_and_nothing_from_elsewhere(python: str, tmp_path: Path) -> None:
    done = build(python, ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = pages_in(ROOT / "docs", ".md") - {"README"} | {"index"}
    assert pages <= pages_in(tmp_path, ".html")
    files = [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]
    assert {str(path): foreign(path) for path in files if foreign(path)} == {}
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    assert pages <= {entry["location"].partition(".html")[0] or "index" for entry in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "says"),
    [
        ('<script src="https://example.org/a.js"></script>', "index.html: src="),
        ("[gone](gone.md)", "gone.md"),
        ("[outside](../gone.toml)", "gone.toml"),
    ],
)
def test_the_build_refuses(python: str, tmp_path: Path, page: str, says: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n{page}\n")
    done = build(python, configure(tmp_path), tmp_path / "site")
    assert done.returncode != 0
    assert says in done.stdout + done.stderr


@pytest.mark.slow
def test_a_page_in_a_folder_links_to_files_inside_and_outside(python: str, tmp_path: Path) -> None:
    (tmp_path / "docs" / "folder").mkdir(parents=True)
    (tmp_path / "docs" / "README.md").write_text("# Index\n\n[page](folder/page.md)\n")
    page = "# Page\n\n[inside](../README.md) [outside](../../pyproject.toml)\n"
    (tmp_path / "docs" / "folder" / "page.md").write_text(page)

    done = build(python, configure(tmp_path), tmp_path / "site")

    assert done.returncode == 0, done.stdout + done.stderr
    links = re.findall(
        r'href="([^"#]*)"[^>]*>(?:inside|outside)<', (tmp_path / "site/folder/page.html").read_text()
    )
    assert links == ["../index.html", "../files/pyproject.toml"]
    assert (tmp_path / "site" / "files" / "pyproject.toml").is_file()
