"""Python source with its identifiers renamed and its comments and docstrings rewritten, its logic kept.

The result looks like a colleague's version of a module: the same statements in other words. Deterministic: a
name's new spelling depends on the name and the seed alone. Knows nothing of models or memories.
"""

import ast
import builtins
import hashlib
import io
import keyword
import tokenize

_TEXT = """
account amount anchor batch border bucket cell chunk client column cursor delta digit edge entry
epoch factor field frame gauge grade group handle hook input label layer ledger level limit
line margin mask member meter mode node offer option order owner packet page panel part
pile plan point pool probe quota range record region report room route sample scope score
seat shape share sheet shift side slice slot sort span stage stamp step stock strip
table tally target term ticket token total track trail unit view
"""
WORDS = tuple(_TEXT.split())


def renamed(source: str, seed: int = 0) -> str:
    """The source with every name that it defines spelt anew and every comment and docstring replaced.

    Imported names, builtins, double-underscored names and other strings stay. The result parses to the same
    tree except for names and docstrings. Raises SyntaxError where the source is not Python.
    """
    tree = ast.parse(source)
    own = _defined(tree)
    spelling = _spellings(own, seed)
    docstrings = _docstring_starts(tree)
    lines = source.splitlines(keepends=True)
    edits: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string
        if token.type == tokenize.NAME and text in spelling:
            edits.append((token.start, token.end, spelling[text]))
        elif token.type == tokenize.COMMENT:
            edits.append((token.start, token.end, "# " + _sentence(text, seed)))
        elif token.type == tokenize.STRING and token.start in docstrings:
            edits.append((token.start, token.end, _docstring(text, token.start[1], seed)))
    return _apply(lines, edits)


def _defined(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {part for alias in node.names for part in (alias.asname or alias.name).split(".")}
    return {
        name
        for name in found - imported - set(dir(builtins)) - {"self", "cls"}
        if not name.startswith("__") and not keyword.iskeyword(name) and not keyword.issoftkeyword(name)
    }


def _spellings(names: set[str], seed: int) -> dict[str, str]:
    taken = set(names)
    spelling = {}
    for name in sorted(names):
        attempt = 0
        while (new := _spelt_anew(name, seed, attempt)) in taken:
            attempt += 1
        taken.add(new)
        spelling[name] = new
    return spelling


def _spelt_anew(name: str, seed: int, attempt: int) -> str:
    number = _hash(f"{seed}:{attempt}:{name}")
    parts = max(1, min(3, name.strip("_").count("_") + 1 + attempt // 4))
    words = [WORDS[number // len(WORDS) ** part % len(WORDS)] for part in range(parts)]
    underscores = name[: len(name) - len(name.lstrip("_"))]
    if name.lstrip("_")[:1].isupper():
        new = "_".join(words).upper() if name.isupper() else "".join(word.title() for word in words)
    else:
        new = "_".join(words)
    return underscores + new


def _sentence(text: str, seed: int) -> str:
    number = _hash(f"{seed}:{text}")
    count = max(2, min(14, len(text.split()) + number % 3 - 1))
    return " ".join(WORDS[_hash(f"{number}:{index}") % len(WORDS)] for index in range(count))


def _docstring(text: str, indent: int, seed: int) -> str:
    lines = [_sentence(line, seed).capitalize() + "." for line in text.splitlines() if line.strip(" \"'")]
    return '"""' + ("\n" + " " * indent).join(lines or ["Nothing."]) + '"""'


def _docstring_starts(tree: ast.AST) -> set[tuple[int, int]]:
    starts = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            starts.add((first.lineno, first.col_offset))
    return starts


def _apply(lines: list[str], edits: list[tuple[tuple[int, int], tuple[int, int], str]]) -> str:
    for (row, column), (last, end), text in reversed(edits):
        head, tail = lines[row - 1][:column], lines[last - 1][end:]
        lines[row - 1 : last] = [head + text + tail]
    return "".join(lines)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
