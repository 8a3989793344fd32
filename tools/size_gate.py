"""Fail where a file or a signature has grown past what one reader can hold: `python -m tools.size_gate`.

A kernel file (triton_*.py, gluon_*.py, anything in tiles/) may have 600 lines, any other file 400; a public function
or method may have 15 parameters, `self`, `cls` and `**unknown: NoReturn` (which takes nothing) not counted, and a
command of cli/ 20, all of them options with a name; in adapters/ the signatures are other libraries' own.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")
KERNEL_LINES, OTHER_LINES, PARAMETERS, OPTIONS = 600, 400, 15, 20


def is_kernel_file(path: Path) -> bool:
    """Whether the larger limit holds: by the file's name, or by its folder."""
    return path.name.startswith(("triton_", "gluon_")) or "tiles" in path.parts[:-1]


def public_functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Module-level functions and methods of module-level classes whose every name is public (or `__init__`)."""
    bodies: list[tuple[str, list[ast.stmt]]] = [("", tree.body)]
    while bodies:
        prefix, body = bodies.pop()
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_") and node.name != "__init__":
                continue
            if isinstance(node, ast.ClassDef):
                bodies.append((f"{prefix}{node.name}.", node.body))
            else:
                yield prefix + node.name, node


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Device code takes pointers and strides one by one; the limit is for functions that people call."""
    return any(ast.unparse(decorator).split("(")[0].endswith("jit") for decorator in node.decorator_list)


def violations(path: Path) -> Iterator[str]:
    """One line per limit that the Python file `path` breaks."""
    text = path.read_text(encoding="utf-8")
    limit = KERNEL_LINES if is_kernel_file(path) else OTHER_LINES
    lines = len(text.splitlines())
    if lines > limit:
        yield f"{path}: {lines} lines, at most {limit}"
    for name, node in public_functions(ast.parse(text, filename=str(path))):
        arguments, caught = node.args, node.args.kwarg
        nothing = caught is None or (caught.annotation is not None and ast.unparse(caught.annotation) == "NoReturn")
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg]
        every += [] if nothing else [caught]
        count = sum(arg is not None and arg.arg not in ("self", "cls") for arg in every)
        most = OPTIONS if "cli" in path.parts else PARAMETERS
        if count > most and not is_kernel(node) and "adapters" not in path.parts:
            yield f"{path}:{node.lineno}: {name} has {count} parameters, at most {most}"


def main(argv: list[str] | None = None) -> int:
    """Print every violation under the given folders; exit status 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / folder for folder in FOLDERS])
    roots: list[Path] = parser.parse_args(argv).paths
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*.py")))]
    found = [line for file in files for line in violations(file)]
    print("\n".join(found) if found else f"size gate: {len(files)} files within their limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
