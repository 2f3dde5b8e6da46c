"""The corpus of the embedded target: pinned wheels -> source files -> splits -> functions.

Everything here is a function of the wheels and of the interpreter's grammar: a file that `ast`
cannot parse (syntax newer than the interpreter) stays in the corpus but yields no functions.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wheels import Pin

SPLITS = ("target", "head", "heldout")
SHARES = (0.70, 0.27, 0.03)
SKIPPED_PARTS = re.compile(
    r"(^|/)(tests?|testing|_?vendor(ed)?|third_party|extern(als?)?|_extern|enterprise|locale|"
    r"migrations|_pb2|generated|gen_.*)(/|\.py$)|/test_[^/]*\.py$|_tests?\.py$|_pb2(_grpc)?\.py$"
)
GENERATED = re.compile(r"(auto[- ]?(matically )?generated|@generated|do not edit)", re.I)


@dataclass(frozen=True)
class Function:
    """A documented function. `prompt` and `answer` are message contents; keys find duplicates."""

    source: str  # "package/path.py:Class.function"
    prompt: str
    short_prompt: str  # the same with only the docstring's first paragraph
    answer: str
    body_key: str
    doc_key: str


# --- files --------------------------------------------------------------------------------------


def refusal(path: str, raw: bytes) -> str | None:
    """Return why a file is left out of the corpus; None if it is good source text."""
    if SKIPPED_PARTS.search(path):
        return "test, vendored or generated path"
    if not 300 <= len(raw) <= 200_000:
        return "size"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    lines = text.splitlines()
    if max(map(len, lines)) > 400 or len(text) / len(lines) > 90:
        return "long lines"
    foreign = 0 if text.isascii() else sum(not c.isascii() for c in text)
    if sum(c.isdigit() for c in text) > 0.12 * len(text) or foreign > 0.02 * len(text):
        return "data table"
    if GENERATED.search(text[:3000]):
        return "generated"
    if "GNU General Public" in text or "GNU Lesser" in text:
        return "names another licence"
    return None


def documents(pins: list[Pin], folder: Path) -> tuple[list[tuple[str, str]], Counter[str]]:
    """Return accepted (path, text) in pin order, and counts of reasons for refusals.

    A file is a near-copy when 60 % of its longer lines stand in files kept before it: that drops
    vendored and copied modules, whichever split they would fall in.
    """
    kept, why = [], Counter[str]()
    seen_files: set[bytes] = set()
    seen_lines: set[int] = set()
    for pin in pins:
        with zipfile.ZipFile(folder / pin.file) as archive:
            for name in sorted(n for n in archive.namelist() if n.endswith(".py")):
                if ".data/" in name or ".dist-info/" in name:
                    continue
                raw = archive.read(name)
                digest = hashlib.sha256(raw).digest()
                reason = "copy" if digest in seen_files else refusal(name, raw)
                if reason is None:
                    seen_files.add(digest)
                    text = raw.decode("utf-8").replace("\r\n", "\n")
                    lines = {hash(s) for line in text.split("\n") if len(s := line.strip()) >= 12}
                    if len(lines & seen_lines) >= 0.6 * len(lines):
                        reason = "near-copy"
                    else:
                        seen_lines |= lines
                        kept.append((name, text))
                why[reason or "kept"] += 1
    return kept, why


def split_of(text: str) -> str:
    """Return the split of a file by the hash of its content, whatever other files exist."""
    x = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return SPLITS[0] if x < SHARES[0] else SPLITS[1] if x < SHARES[0] + SHARES[1] else SPLITS[2]


# --- functions ----------------------------------------------------------------------------------


def _key(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _defs(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _defs(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node  # type: ignore[misc]
        elif isinstance(node, ast.If | ast.Try):
            yield from _defs(node, prefix)


def _prompt(signature: str, docstring: str) -> str:
    indented = textwrap.indent(docstring, "    ").lstrip()
    return f'Write this Python function:\n\n```python\n{signature}\n    """{indented}"""\n```'


def functions(item: tuple[str, str]) -> list[Function]:
    """Return the functions of one (path, text). Unfit ones have an empty `prompt`.

    Unfit ones keep their keys, so that their bodies still count when splits are compared.
    """
    path, text = item
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines, found = text.split("\n"), []
    for name, node in _defs(tree):
        docstring = ast.get_docstring(node)
        first = node.body[0]
        start = first.end_lineno if docstring else first.lineno - 1
        body = "\n".join(lines[start : node.end_lineno])
        plain = re.sub(r"#.*|\s+", "", body)
        short_name = name.rsplit(".", 1)[-1]
        doc_key = _key(short_name + " " + " ".join((docstring or "").lower().split()))
        prompt = short_prompt = answer = ""
        if (
            docstring
            and len(docstring) >= 20
            and docstring.isascii()
            and "\\" not in docstring
            and '"""' not in docstring
            and first.lineno > node.lineno
            and plain
            and not short_name.startswith("__")
            and not re.match(r"(pass|\.\.\.|raiseNotImplementedError.*)$", plain)
        ):
            signature = "\n".join(lines[node.lineno - 1 : first.lineno - 1])
            dedented = textwrap.dedent(signature + "\n" + body.rstrip())
            head = "\n".join(dedented.split("\n")[: signature.count("\n") + 1]).rstrip()
            docstring = inspect.cleandoc(docstring)
            prompt = _prompt(head, docstring)
            short_prompt = _prompt(head, docstring.split("\n\n")[0].strip())
            answer = f"```python\n{dedented}\n```"
        found.append(Function(f"{path}:{name}", prompt, short_prompt, answer, _key(plain), doc_key))
    return found


def disjoint(by_split: dict[str, list[Function]]) -> dict[str, list[Function]]:
    """Return usable functions of each split; no held-out one is in a training split.

    A held-out function goes when its body, or its name with docstring, occurs in any function of
    the other splits; a head one when it occurs in the target's; then repeats within a split go.
    """
    bodies = {s: {f.body_key for f in fs} for s, fs in by_split.items()}
    docs = {s: {f.doc_key for f in fs} for s, fs in by_split.items()}
    against = {"target": (), "head": ("target",), "heldout": ("target", "head")}
    result: dict[str, list[Function]] = {}
    for split, found in by_split.items():
        own_bodies: set[str] = set()
        own_docs: set[str] = set()
        result[split] = []
        for function in found:
            body, doc = function.body_key, function.doc_key
            known = any(body in bodies[o] or doc in docs[o] for o in against[split])
            if function.prompt and not (known or body in own_bodies or doc in own_docs):
                own_bodies.add(body)
                own_docs.add(doc)
                result[split].append(function)
    return result
