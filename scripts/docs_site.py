"""What MkDocs needs to show the same Markdown as a code host does; see `hooks` in mkdocs.yml.

Headings get the anchors that code hosts give them. Files outside of docs/ that a page links to become files
of the site, and links to folders lead to the folder's name in the text alone.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^]]*)\]\((\.\./[^)\s#]+)\)")
"""A link to a file or folder above the page's own folder."""
ABROAD = re.compile(
    r"""(?:src|data)=["']?(?:https?:)?//|<link[^>]+href=["']?(?:https?:)?//|url\(["']?https?:"""
)
"""Pattern of HTML and CSS that makes a browser load something from another host."""


def anchor(heading: str, separator: str) -> str:
    """The anchor of a heading, as code hosts write it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def outside(page: str, link: str) -> str | None:
    """Path in the repository of what a link of a page of docs/ leads to; None for a page or file of docs/.

    A page is given by its path in docs/.
    """
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path


def on_config(config: Any) -> Any:
    """Sets how headings become anchors."""
    config.mdx_configs["toc"] = {"slugify": anchor, "permalink": "#"}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside of docs/ that pages link to."""
    linked = {
        path
        for page in files.documentation_pages()
        for _, link in LINK.findall(page.content_string)
        if (path := outside(page.src_uri, link)) is not None
    }
    for path in sorted(linked):
        if (ROOT / path).is_file() and not path.endswith(".md"):
            files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points links out of docs/ at the site's copies; a folder or a Markdown file becomes its name."""

    def within(link: re.Match[str]) -> str:
        text, path = link[1], outside(page.file.src_uri, link[2])
        if path is None or not (ROOT / path).exists():
            return link[0]  # MkDocs reports a link that leads nowhere
        if files.get_file_from_path(f"files/{path}") is None:
            return f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(f'files/{path}', posixpath.dirname(page.file.src_uri))})"

    return LINK.sub(within, markdown)


def on_post_build(config: Any) -> None:
    """Raises SystemExit for a page or a style that loads something from another host."""
    site = Path(config.site_dir)
    found = [
        f"{path.relative_to(site)}: {match[0]}"
        for path in sorted(site.rglob("*"))
        if path.suffix in {".html", ".css"} and (match := ABROAD.search(path.read_text(encoding="utf-8")))
    ]
    if found:
        raise SystemExit("these files load something from another host:\n" + "\n".join(found))
