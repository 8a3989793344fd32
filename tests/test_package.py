"""The package as users get it: what the wheel holds, what PyPI would show, that it runs away from here; its history."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from packaging.metadata import Metadata

from tests.test_docs import blocks

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/tilewise/tilewise"
PAGES = (f"{REPOSITORY}/blob/main/", "https://raw.githubusercontent.com/tilewise/tilewise/main/")
MOST_BYTES = 2 * 2**20
RULE = "e1f162c7dbb7292e1a15a34fe482ccc1dc13e472"  # the last commit before CONTRIBUTING.md limited subjects


@dataclass(frozen=True)
class Built:
    """A wheel that was made of the source archive, and the files of both."""

    wheel: Path
    files: list[str]
    metadata: Metadata


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """No network: hatchling and its plugin are of this environment."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        (name,) = (file for file in files if file.endswith(".dist-info/METADATA"))
        return Built(wheel, files, Metadata.from_email(archive.read(name), validate=True))


@pytest.fixture(scope="module")
def python(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel; PyTorch and the rest are this environment's."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    found = folder / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    # Files named .pth are not read in a folder that a .pth file adds, so an editable install of tilewise stays outside.
    Path(paths["purelib"], "others.pth").write_text("\n".join(_packages()))
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(built.wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(found), *install], check=True)
    return found


def _packages() -> Iterator[str]:
    """The folders of this environment's packages."""
    return (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))


def _run(command: list[str], folder: Path) -> str:
    """Standard output of a command that succeeds, in another folder and with no path of this checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _version() -> str:
    (found,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return str(found)


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/tilewise").rglob("*.py")}
    extra = {file for file in built.files if ".dist-info/" not in file} - sources
    assert sources <= set(built.files)
    assert {file for file in extra if not file.startswith("tilewise/")} == set()
    assert any(file.endswith("/licenses/LICENSE") for file in built.files)
    assert "tilewise/py.typed" in built.files
    assert built.wheel.stat().st_size < MOST_BYTES


def test_the_metadata_is_complete(built: Built) -> None:
    found = built.metadata
    assert {"Homepage", "Documentation", "Source", "Changelog", "Issues"} == set(found.project_urls or {})
    assert all(url.startswith(REPOSITORY) for url in (found.project_urls or {}).values())
    assert (str(found.version), found.author) == (_version(), "The tilewise authors")
    assert (found.license_expression, found.license_files) == ("Apache-2.0", ["LICENSE"])
    minor = [text.rpartition(" ")[2] for text in found.classifiers or [] if re.search(r":: 3\.\d+$", text)]
    assert minor == ["3.10", "3.11", "3.12", "3.13"]
    assert str(found.requires_python) == f">={minor[0]}"


def _tokens(found: list[Token]) -> Iterator[Token]:
    for token in found:
        yield token
        yield from _tokens(token.children or [])


def test_links_of_the_description_are_absolute_and_lead_to_files(built: Built) -> None:
    description = built.metadata.description or ""
    assert built.metadata.description_content_type == "text/markdown"
    tokens = list(_tokens(MarkdownIt("commonmark").enable("table").parse(description)))
    links = [str(link) for token in tokens if (link := token.attrGet("href") or token.attrGet("src"))]
    assert len(links) >= 15
    assert [link for link in links if not link.startswith("https://")] == []
    own = [link.removeprefix(page) for link in links for page in PAGES if link.startswith(page)]
    assert [name for name in own if not (ROOT / name).exists()] == []
    assert PAGES[1] + "docs/pictures/masks.svg" in links
    assert blocks(description)[0].code == blocks((ROOT / "README.md").read_text())[0].code


def test_the_wheel_runs_the_readmes_first_example_and_each_module_imports(
    python: Path, built: Built, tmp_path: Path
) -> None:
    example = blocks((ROOT / "README.md").read_text())[0].code
    modules = [file.removesuffix(".py").replace("/", ".") for file in built.files if file.endswith(".py")]
    names = [name.removesuffix(".__init__") for name in modules if not name.endswith("__main__")]
    script = tmp_path / "example.py"
    script.write_text(
        f"{example}\nprint(tw.__file__, o.isfinite().all().item())\n"
        f"import importlib\nprint(len([importlib.import_module(name) for name in {names!r}]))\n"
    )
    file, finite, count = _run([str(python), str(script)], tmp_path).split()
    assert python.parent.parent in Path(file).parents
    assert (finite, int(count)) == ("True", len(names))
    assert len(names) > 200


def test_the_wheel_brings_the_command(python: Path, tmp_path: Path) -> None:
    said = _run([str(python.parent / "tilewise"), "--help"], tmp_path)
    assert all(name in said for name in ("demo", "why", "explain", "bench"))
    init = (ROOT / "src" / "tilewise" / "__init__.py").read_text()
    assert f'__version__ = "{_version()}"' in init


def test_the_changelog_is_a_list_of_releases_and_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## \[([\d.]+|Unreleased)\](?: - (\d{4}-\d\d-\d\d|unreleased))?$", text, re.MULTILINE)
    assert len(releases) == len(re.findall(r"^## ", text, re.MULTILINE))
    versions = [version for version, _ in releases if version != "Unreleased"]
    assert versions[0] == _version().partition(".dev")[0]
    assert versions == sorted(versions, key=lambda version: tuple(map(int, version.split("."))), reverse=True)
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= {
        "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security",
    }  # fmt: skip
    assert [line for line in text.splitlines() if len(line) > 120] == []


def test_subjects_of_commits_are_short() -> None:
    git = shutil.which("git")
    log = [str(git), "log", "--format=%s", f"{RULE}..HEAD"]
    done = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=False) if git else None
    if done is None or done.returncode:
        pytest.skip("no history to look at")
    assert [subject for subject in done.stdout.splitlines() if len(subject) > 72] == []
