"""The shape of the repository: public names, layers, names that say what a thing is, and what an import may need."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise
from tools.families import NEIGHBOURS

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "tilewise"
# Modules that import Triton say so in their name, and nothing else may import it at module level.
KERNEL_MODULE = re.compile(r"(^|[./])(triton_|gluon_|tiles([./]|$))")
# Published systems and papers: docs/papers.md maps them to arguments, module names say what the code does.
PAPERS = re.compile(
    r"flash(_?attention|_?decoding|_?attn)|flashinfer|flash_?[234]\b|^fa[234]|sage|sparge|lean|stream_?k|vllm|radix"
    r"|natten|kivi|alibi|spar_?q|medusa|eagle|orca|sarathi",
    re.IGNORECASE,
)
# Adapters carry the name of the interface they speak; the ladder's rungs carry the name of the step in history.
NAMED_AFTER_AN_INTERFACE = ("tilewise.adapters.", "tilewise.explain.ladder.")
PRIVATE_PLACES = re.compile(r"(?<![\w./-])/(?:home|root|Users|opt|mnt|workspace|work)/[\w.-]+")
TEXTS = (".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".jsonl", "run")


def _modules() -> list[str]:
    return sorted(module.name for module in pkgutil.walk_packages([str(SOURCE)], "tilewise."))


def _tracked() -> list[Path]:
    """Text files of the checkout, by git where there is one, else by walking the folders that are committed."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        folders = ("src", "tests", "tools", "benchmarks", "docs", "examples")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    return [path for path in paths if path.is_file() and path.name.endswith(TEXTS)]


def test_all_is_complete_and_every_name_in_it_exists() -> None:
    exported = list(tilewise.__all__)
    assert sorted(set(exported)) == sorted(exported)
    assert [name for name in exported if not hasattr(tilewise, name)] == []
    modules = {name.split(".")[1] for name in _modules()}
    public = {name for name in vars(tilewise) if not name.startswith("_")} - modules - {"annotations"}
    assert public <= set(exported), f"public but not in __all__: {sorted(public - set(exported))}"


def test_what_is_imported_on_first_use_is_there_and_listed() -> None:
    """In a fresh process, where nothing has imported these modules yet."""
    program = """
import sys, tilewise as tw
lazy = ["engine", "kv", "nn", "errors", "KVCache"]
parts = {name: f"tilewise.{name}" for name in ("engine", "kv", "nn", "errors")}
assert not set(parts.values()) & set(sys.modules), "imported at once"
assert all(getattr(tw, name) is sys.modules[module] for name, module in parts.items())
assert set(lazy) <= set(dir(tw))
assert tw.KVCache is tw.kv.KVCache and issubclass(tw.errors.InputError, tw.errors.TilewiseError)
assert tw.errors.OutOfPagesError is tw.core.errors.OutOfPagesError and tw.nn.RMSNorm(8)
try:
    tw.KVCash
except AttributeError as error:
    assert str(error) == "module 'tilewise' has no attribute 'KVCash'"
else:
    raise AssertionError("a name that is not there")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_public_module_of_errors_has_them_all() -> None:
    from tilewise.core import errors as core

    kinds = {name for name, x in vars(core).items() if isinstance(x, type) and issubclass(x, core.TilewiseError)}
    assert {*tilewise.errors.__all__} == kinds
    assert all(getattr(tilewise.errors, name) is getattr(core, name) for name in kinds)


@pytest.mark.parametrize("name", [name for name in _modules() if not KERNEL_MODULE.search(name)])
def test_every_module_without_kernels_imports(name: str) -> None:
    if name.rpartition(".")[2] != "__main__":
        importlib.import_module(name)


def test_no_module_is_named_after_a_paper() -> None:
    named = [
        name
        for name in _modules()
        if not name.startswith(NAMED_AFTER_AN_INTERFACE) and PAPERS.search(name.rpartition(".")[2])
    ]
    assert named == []


def test_the_cpu_path_needs_no_triton() -> None:
    """A fresh process in which importing Triton fails: attention still runs, forward and backward."""
    program = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import torch, tilewise as tw
q, k, v = (torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3))
tw.attention(q, k, v, mask=tw.causal & tw.window(8), score=tw.softcap(20.0)).sum().backward()
o, _ = tw.merge(tw.attention_with_lse(q, k[:, :9], v[:, :9]), tw.attention_with_lse(q, k[:, 9:], v[:, 9:]))
o.sum().backward()
pages = torch.zeros(3, 16, 2, 16)
tw.kv_write(k[0].detach(), v[0].detach(), pages, pages.clone(), torch.arange(40))
assert q.grad.isfinite().all() and not any(name.split(".")[0] == "triton" for name in sys.modules)
print(tw.why(q, k, v))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_importing_tilewise_imports_no_triton_and_no_extra() -> None:
    heavy = ("triton", "matplotlib", "typer", "rich", "transformers", "tokenizers")
    program = f"import sys, tilewise; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-2000:]


def test_only_kernel_files_import_triton_at_module_level() -> None:
    found = []
    for path in SOURCE.rglob("*.py"):
        if KERNEL_MODULE.search(path.relative_to(SOURCE).as_posix()):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "triton" for name in names):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("operation", ["attention", "merge", "kv_write", "qkv_prologue", *NEIGHBOURS])
def test_implementations_do_not_import_each_other(operation: str) -> None:
    """Rows of one operation share `problem` and `configs`, never another row and never the reference."""
    folder = SOURCE / "ops" / operation
    rows = {
        path.stem for path in folder.glob("*.py") if path.stem.startswith(("triton_", "gluon_", "cpu", "reference"))
    }
    found = []
    for stem in sorted(rows):
        for node in ast.walk(ast.parse((folder / f"{stem}.py").read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(f"tilewise.ops.{operation}"):
                continue
            named = {(node.module or "").rpartition(".")[2], *(alias.name for alias in node.names)}
            found += [f"{stem} imports {other}" for other in sorted(named & rows - {stem}) if _apart(stem, other)]
    assert found == []


def _apart(one: str, other: str) -> bool:
    """Files of the same implementation (triton_fwd, triton_bwd) may share; different implementations may not. Gluon
    kernels are launched as Triton's are.
    """
    kinds = (one.split("_")[0], other.split("_")[0])
    return kinds[0] != kinds[1] and kinds != ("gluon", "triton")


def test_layer_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_no_file_speaks_of_a_private_place() -> None:
    """A path on one person's machine helps no reader."""
    found = []
    for path in _tracked():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            match = PRIVATE_PLACES.search(line)
            if match:
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert found == []


def test_every_environment_variable_is_documented() -> None:
    """Configuration that nothing mentions might as well not exist."""
    used = {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"""(?:environ(?:\.get)?[\[(]|getenv\()["'](TILEWISE_\w+)""", path.read_text())
    }
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"]
    documented = "\n".join(page.read_text(encoding="utf-8") for page in pages if page.exists())
    assert sorted(name for name in used if name not in documented) == []


def test_package_is_marked_as_typed() -> None:
    assert (SOURCE / "py.typed").exists()
    assert os.path.getsize(ROOT / "LICENSE") > 10_000
