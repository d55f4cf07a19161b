"""What MkDocs needs to show the same Markdown as a code host does; see `hooks` in mkdocs.yml.

Headings get the anchors that code hosts give them. Files outside of docs/ that a page links to become files
of the site, and links to folders lead to the folder's name in the text alone.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"\[([^]]*)\]\(\.\./([^)\s#]+)\)")
"""A link from a page to a file or folder beside docs/."""
ABROAD = re.compile(
    r"""(?:src|data)=["']?(?:https?:)?//|<link[^>]+href=["']?(?:https?:)?//|url\(["']?https?:"""
)
"""Pattern of HTML and CSS that makes a browser load something from another host."""


def anchor(heading: str, separator: str) -> str:
    """The anchor of a heading, as code hosts write it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    """Sets how headings become anchors."""
    config.mdx_configs["toc"] = {"slugify": anchor, "permalink": "#"}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside of docs/ that pages link to."""
    linked = {
        path for page in files.documentation_pages() for _, path in OUTSIDE.findall(page.content_string)
    }
    for path in sorted(linked):
        if (ROOT / path).is_file() and not path.endswith(".md"):
            files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points links out of docs/ at the site's copies; a folder or a Markdown file becomes its name."""

    def within(link: re.Match[str]) -> str:
        text, path = link.groups()
        if not (ROOT / path).exists():
            return link[0]  # MkDocs reports it
        return (
            f"[{text}](files/{path})" if files.get_file_from_path(f"files/{path}") else f"{text} (`{path}`)"
        )

    return OUTSIDE.sub(within, markdown)


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
