"""What Python files define, whatever their words and places: a hash of syntax trees without comments, docstrings,
layout, paths and names of local variables.

A name of a module stands for the definition that it leads to, however it is imported. So a file may be moved or
renamed, and a definition moved to another file of the set, without another hash.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDERS = ("src", "tests", "tools", "benchmarks")  # of the root, where Python files are
_LINK = re.compile("\0([^\0]*)\0([^\0]*)\0")  # a file and a name in it; no name is the module itself
_MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
_NO_MEANING = ("ctx", "type_comment", "kind", "type_ignores", "type_params")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_IMPORTS = (ast.Import, ast.ImportFrom)


def sources_hash(files: Iterable[Path], root: Path) -> str:
    """Twelve hexadecimal digits over what the files define; "none" where there is no file.

    Args:
        files: Python files below `root`.
        root: the folder that holds FOLDERS; modules of ours lie there or in its folder `src`.
    """
    return _hash(tuple(sorted({path.relative_to(root).as_posix() for path in files})), root, state(root))


@functools.lru_cache(maxsize=256)
def _hash(inside: tuple[str, ...], root: Path, state: State) -> str:
    tree = _tree(root, state)

    def linked(link: re.Match[str]) -> str:
        return tree.digest(link[1], link[2]) if link[1] in inside else link[2]

    texts = sorted(_LINK.sub(linked, text) for path in inside for text in tree.texts(path))
    return _digest(texts) if inside else "none"


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


State = tuple[tuple[str, int, int], ...]


def state(root: Path) -> State:
    """What changes when any of the root's files does."""
    walks = (os.walk(root / folder) for folder in FOLDERS)  # half the time of Path.rglob, once for every hash
    files = (f"{at}/{name}" for walk in walks for at, _, names in walk for name in names if name.endswith(".py"))
    stats = ((path, os.stat(path)) for path in sorted(files))
    return tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats)


@functools.lru_cache(maxsize=4)
def _tree(root: Path, _: State) -> _Tree:
    return _Tree(root)


class _Tree:
    """The files of a root in one state, each read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bodies: dict[str, list[ast.stmt]] = {}
        self._imports: dict[str, dict[str, tuple[str, str]]] = {}
        self._texts: dict[str, list[tuple[list[str], str]]] = {}
        self._digests: dict[tuple[str, str], str] = {}

    def texts(self, path: str) -> list[str]:
        """A text for each statement of a file, in which names of modules are links."""
        return [text for _, text in self._statements(path)]

    def digest(self, path: str, name: str) -> str:
        """Of the statements that bind a name in a file, or of all of them for the name "", with links as names."""
        if (path, name) not in self._digests:
            texts = [text for names, text in self._statements(path) if name in names or not name]
            self._digests[path, name] = _digest(sorted(_LINK.sub(r"\2", text) for text in texts) or [name])
        return self._digests[path, name]

    def file(self, module: str) -> str | None:
        """The path of a module of ours."""
        inner = module.replace(".", "/")
        for path in (f"src/{inner}.py", f"src/{inner}/__init__.py", f"{inner}.py", f"{inner}/__init__.py"):
            if module and (self.root / path).exists():
                return path
        return None

    def link(self, module: str, name: str, depth: int = 8) -> str:
        """A link to where a module's name is bound, behind modules that hand it on; for others their dotted name."""
        path, inner = self.file(module), self.file(f"{module}.{name}")
        if not name or inner is not None:
            there = inner or path
            return f"\0{there}\0\0" if there else module
        if path is None:
            return f"{module}.{name}"
        imported = self.imports(path).get(name)
        return self.link(*imported, depth - 1) if imported and depth else f"\0{path}\0{name}\0"

    def imports(self, path: str) -> dict[str, tuple[str, str]]:
        """(module, name) by the name that an import of a file's outermost statements binds."""
        if path not in self._imports:
            nodes = (node for statement in self._body(path) for node in _outside_functions(statement))
            found = [imported(node, path) for node in nodes if isinstance(node, _IMPORTS)]
            self._imports[path] = {name: target for names in found for name, target in names.items()}
        return self._imports[path]

    def _body(self, path: str) -> list[ast.stmt]:
        if path not in self._bodies:
            self._bodies[path] = ast.parse((self.root / path).read_text(encoding="utf-8")).body
        return self._bodies[path]

    def _statements(self, path: str) -> list[tuple[list[str], str]]:
        """The names that each statement binds, and its text."""
        if path not in self._texts:
            body = [statement for statement in self._body(path) if _is_code(statement)]
            bound = [list(dict.fromkeys(_bound([statement]))) for statement in body]
            names = {name: f"\0{path}\0{name}\0" for names in bound for name in names}
            names |= {name: self.link(*target) for name, target in self.imports(path).items()}
            writer = _Writer(self, path)
            self._texts[path] = [
                (names_, writer.text(node, (_Scope(names),))) for names_, node in zip(bound, body, strict=True)
            ]
        return self._texts[path]


def imported(node: ast.Import | ast.ImportFrom, path: str) -> dict[str, tuple[str, str]]:
    """(module, name) by the name that an import in the file at `path` binds; a module alone has the name ""."""
    if isinstance(node, ast.Import):
        whole = {alias.asname: (alias.name, "") for alias in node.names if alias.asname}
        first = (alias.name.partition(".")[0] for alias in node.names if not alias.asname)
        return whole | {name: (name, "") for name in first}
    package = list(Path(path).with_suffix("").parts[: -node.level]) if node.level else []
    module = ".".join([*(package[1:] if package[:1] == ["src"] else package), *filter(None, [node.module])])
    return {alias.asname or alias.name: (module, alias.name) for alias in node.names if module != "__future__"}


def _is_code(node: ast.stmt) -> bool:
    """Not a docstring, an import, for which names stand, what only a type checker sees, or a list of public names."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
        return node.test.id != "TYPE_CHECKING"
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id != "__all__"
    return not isinstance(node, _IMPORTS)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those below it in the same scope, in order; a function or class stands for its name alone."""
    yield node
    if not isinstance(node, _SCOPES):
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.comprehension) and child is node.target):
                yield from _outside_functions(child)


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names that nodes bind in their own scope, in order, without imports."""
    for inner in (below for node in nodes for below in _outside_functions(node)):
        if isinstance(inner, ast.Name):
            yield from [] if isinstance(inner.ctx, ast.Load) else [inner.id]
        elif isinstance(inner, ast.MatchMapping):
            yield from filter(None, [inner.rest])
        elif isinstance(inner, _NAMED):
            yield from filter(None, [inner.name])


class _Scope(dict[str, str]):
    """What stands for each name that a function, class or module binds."""


class _ClassScope(_Scope):
    """Names of a class, which its methods do not see."""


Scopes = tuple[_Scope, ...]  # the module's first, the innermost last


class _Writer:
    """Writes nodes of one file as text."""

    def __init__(self, tree: _Tree, path: str) -> None:
        self.tree, self.path = tree, path

    def text(self, value: object, scopes: Scopes) -> str:
        if isinstance(value, list):
            return "[" + ",".join(self.text(x, scopes) for x in value if self._kept(x)) + "]"
        if not isinstance(value, ast.AST):
            return repr(value)
        if isinstance(value, ast.Name):
            return _known(value.id, scopes)
        if isinstance(value, ast.Constant):
            return self._constant(value.value)
        if isinstance(value, ast.Attribute):
            return self._attribute(value, scopes)
        if isinstance(value, ast.JoinedStr):  # Python 3.12 has empty texts in it
            parts = [x for x in value.values if not (isinstance(x, ast.Constant) and x.value == "")]
            return f"JoinedStr(values={self.text(parts, scopes)})"
        if isinstance(value, _FUNCTIONS):
            return self._function(value, scopes)
        if isinstance(value, _COMPREHENSIONS):
            names = list(_bound([part.target for part in value.generators]))
            return self._fields(value, (*scopes, _numbered(names, scopes)))
        if isinstance(value, ast.ClassDef):
            inner = (*scopes, _ClassScope({name: name for name in _bound(value.body)}))
            head = self._fields(value, scopes, "name", "body")
            return f"{_known(value.name, scopes)}:{head}:{self.text(value.body, inner)}"
        return self._fields(value, scopes)

    def _fields(self, node: ast.AST, scopes: Scopes, *without: str) -> str:
        parts = []
        for name, value in ast.iter_fields(node):
            if value is None or value == [] or name in (*_NO_MEANING, *without):
                continue
            local = name in ("name", "rest") and isinstance(value, str) and not isinstance(node, ast.alias)
            if local or isinstance(node, ast.Global | ast.Nonlocal):
                names = [value] if local else value
                parts.append(f"{name}={[_known(x, scopes) for x in names]}")
            else:
                parts.append(f"{name}={self.text(value, scopes)}")
        return f"{type(node).__name__}({','.join(parts)})"

    def _kept(self, node: object) -> bool:
        ours = isinstance(node, _IMPORTS) and any(self.tree.file(m) for m, _ in imported(node, self.path).values())
        return not ours and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))

    def _constant(self, value: object) -> str:
        path = self.tree.file(value) if isinstance(value, str) and _MODULE.fullmatch(value) else None
        return f"\0{path}\0\0" if path else repr(value)

    def _attribute(self, node: ast.Attribute, scopes: Scopes) -> str:
        of = self.text(node.value, scopes)
        module = _LINK.fullmatch(of)
        if module and not module[2]:
            dotted = module[1].removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            return self.tree.link(dotted, node.attr)
        return f"{of}.{node.attr}"

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scopes: Scopes) -> str:
        body = node.body if isinstance(node.body, list) else [node.body]
        arguments = node.args
        optional = [x for x in (arguments.vararg, arguments.kwarg) if x]
        named = {x.arg for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *optional)}
        below = [inner for part in body for inner in _outside_functions(part)]
        outer = {x for inner in below if isinstance(inner, ast.Global | ast.Nonlocal) for x in inner.names}
        bound = list(_bound(body))
        imports = [imported(inner, self.path) for inner in below if isinstance(inner, _IMPORTS)]
        links = {name: self.tree.link(*target) for names in imports for name, target in names.items()}
        local = _numbered([name for name in bound if name not in named | outer | set(links)], scopes)
        visible = tuple(scope for scope in scopes if not isinstance(scope, _ClassScope))
        inner = (*visible, _Scope({name: name for name in named} | links | local))
        name = "lambda" if isinstance(node, ast.Lambda) else _known(node.name, scopes)
        head = self._fields(node, scopes, "name", "body")
        return f"{name}:{head}:{self.text(body, inner)}"


def _known(name: str, scopes: Scopes) -> str:
    """What stands for a name."""
    return next((names[name] for names in reversed(scopes) if name in names), name)


def _numbered(names: Iterable[str], scopes: Scopes) -> _Scope:
    """Local names by the order in which they are bound."""
    return _Scope({name: f"${len(scopes)}.{number}" for number, name in enumerate(dict.fromkeys(names))})
