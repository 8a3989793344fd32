"""The API reference in docs/reference.md, from docstrings; `python -m tools.readme` writes it.

A docstring is a summary, paragraphs, and the sections Args, Attributes, Returns, Raises, Source and Example.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from tilewise.core import errors
from tilewise.formula import library
from tilewise.schedule.tilemap import TileMap

GROUPS = {  # modules and names in tilewise, in order of the page; the longest that fits a name counts
    "Attention": "ops.attention ops.merge",
    "Masks and scores": "formula.library formula.grids formula.scores formula",
    "Layouts": "layouts",
    "Sampling": "ops.sampling",
    "KV cache": "kv.cache kv ops.kv_write layouts.PageSummaries ops.page_summaries",
    "Quantization": "quant.schemes ops.quantize quant",
    "Selections": "schedule ops.attention.selected ops.attention.choice",
    "Fused layers": "ops nn rotary frequencies",
    "Engine": "engine",
    "Tools": "ops.attention.why ops.attention.Explanation schedule.tilemap selections",
    "Errors": "core.errors",
}
INTERNAL = """
    Formula.structure Formula.bound Formula.sized Packed.bounds Packed.keys Paged.bounds Paged.pages Select.skip
    PageSummaries.tensors PageAllocator.check_live PageAllocator.violations PrefixCache.violations Quantized.tensors
    Quantized.rows Quantized.values Quantized.of_sequences Quantized.of_blocks ByChannel.check_places TopK.counts
    Sage.text Sage.v_largest Sage.p_largest FP8.text FP8.v_largest FP8.p_largest FP8.qk FP8.pv FP8.smooth Selected.near
    Selected.rest Selected.layout_of_rest Selected.kept_apart Selected.places Selected.skip_of Selected.under
    Selected.check SamplingParams.check_vocabulary
    SamplingParams.changes_logits EngineConfig.lag_on
"""  # methods and properties that the library alone calls


def names() -> dict[str, Any]:
    """Every public name, as users write it, and what it names."""
    found: dict[str, Any] = {}
    for path, short in (("tilewise", "tw"), *((f"tilewise.{x}", f"tw.{x}") for x in ("nn", "kv", "quant", "engine"))):
        module = importlib.import_module(path)
        more = [x for x in module.__all__ if f"tw.{x}" not in found]
        named = {f"{short}.{x}": getattr(module, x) for x in more}
        found |= {name: x for name, x in named.items() if not isinstance(x, dict) and not inspect.ismodule(x)}
    kinds = (x for x in vars(errors).values() if inspect.isclass(x) and issubclass(x, errors.TilewiseError))
    return found | {x.__name__: x for x in (TileMap, *kinds)}


def docstring(name: str) -> dict[str, str]:
    """The docstring of a public name by sections; of a mask the text after its assignment."""
    found = re.search(rf'\n{name[3:]}: [^\n]*\n"""(.*?)"""', inspect.getsource(library), re.DOTALL)
    return sections(found[1] if found else PUBLIC[name])


def sections(of: Any) -> dict[str, str]:
    """The parts of a docstring (given, or of an object) by header; "" has the summary and paragraphs."""
    found, at = {"": ""}, ""
    for line in (inspect.cleandoc(of) if isinstance(of, str) else inspect.getdoc(of) or "").splitlines():
        header = re.match(r"(Args|Attributes|Returns|Raises|Source|Example):(?: (.*))?$", line)
        if header:
            at, line = header[1], header[2] or ""
        elif line and not line.startswith(" ") and (at != "Source" or found[at].endswith("\n\n")):
            at = ""
        found[at] = found.get(at, "") + (line.removeprefix("    ") if at else line) + "\n"
    return {header: part.strip("\n") for header, part in found.items()}


def entries(text: str) -> list[tuple[list[str], str]]:
    """The entries "name, name: description" of a section."""
    found = (x.partition(":") for x in re.split(r"^(?=\S)", text, flags=re.MULTILINE) if x.strip())
    return [(re.split(r",\s+", named), " ".join(said.split())) for named, _, said in found]


def methods(owner: Any) -> dict[str, Any]:
    """The methods and properties that users call, with those of tilewise's own base classes."""
    bases = [base for base in reversed(inspect.getmro(owner)) if base.__module__.startswith("tilewise.")]
    public = {x: at for base in bases for x, at in vars(base).items() if f"{base.__name__}.{x}" not in INTERNAL.split()}
    return {name: x for name, x in public.items() if name[0] != "_" and (callable(x) or isinstance(x, property))}


def signature(name: str, value: Any) -> str:
    """A call and its defaults, without types."""
    given = [x.replace(annotation=x.empty) for x in inspect.signature(value).parameters.values() if x.name != "self"]
    return re.sub(r"<[\w -]+ '?(\w+)'?>", r"\1", f"{name}{inspect.Signature(given)}")


def heading(name: str) -> str:
    """Above a section; it tells the class tw.Mask from tw.mask, which would share an anchor."""
    return f"class {name}" if inspect.isclass(PUBLIC[name]) else name


def link(name: str, shown: str) -> str:
    """To a name's section."""
    return f"[{shown}](#{heading(name).lower().replace(' ', '-').replace('.', '')})"


def prose(text: str) -> str:
    """Text as Markdown: what would be markup is escaped, and code that names a class, or a name in full, is a link."""
    parts = re.split(r"(`[^`]+`)", text)
    for n, part in enumerate(parts):
        name = f"tw.{part.strip('`').removeprefix('tilewise.')}"
        if n % 2 == 0:
            parts[n] = part.replace("*", r"\*").replace("<", "&lt;")
        elif name in PUBLIC and (part.startswith("`tilewise.") or name[3].isupper()):
            parts[n] = link(name, part)
    return "".join(parts)


def body(parts: dict[str, str]) -> Iterator[str]:
    """A docstring as paragraphs, lists and code."""
    for header, text in parts.items():
        if header in ("Args", "Attributes", "Raises"):
            listed = ((", ".join(f"`{x}`" for x in named), prose(said)) for named, said in entries(text))
            yield f"**{header}**\n\n" + "\n".join(f"* {named}: {said}" for named, said in listed)
        elif header == "Example":
            code = "\n".join(x[4:] if x[:3] in (">>>", "...") else x and f"# {x}" for x in text.splitlines())
            code = re.sub(r"^((?:from|import) .*\n)(?!from |import )", r"\1\n", code, flags=re.MULTILINE)
            yield f"```python\n{code}\n```"
        else:
            said = "\n\n".join(x if x.startswith("    ") else prose(x) for x in text.split("\n\n"))
            yield f"**{header}:** {said}" if header else said


def section(name: str) -> Iterator[str]:
    """A name's heading, call, docstring, properties and methods."""
    value = PUBLIC[name]
    yield f"### {heading(name)}"
    if callable(value) and ("Args" in PARTS[name] or "Attributes" not in PARTS[name]):  # else the library makes it
        lines = textwrap.wrap(signature(name, value), 100, subsequent_indent="    ")
        yield "\n".join(["```text", *lines, "```"])  # no python, whose blocks tests run and ruff formats
    yield from body(PARTS[name])
    for method, at in methods(value).items() if inspect.isclass(value) else ():
        shown = f"{value.__name__}.{method}"
        yield f"**`{shown if isinstance(at, property) else signature(shown, getattr(value, method))}`**"
        yield from body(sections(at))


def page() -> str:
    """Each group: a list of its names, then their sections."""
    starts = [(start, title) for title, text in GROUPS.items() for start in text.split()]

    def place(name: str) -> int:
        value = PUBLIC[name]
        path = f"{value.__module__}.{value.__name__}" if callable(value) else library.__name__  # a mask
        fits = [n for n, (start, _) in enumerate(starts) if f"{path}.".startswith(f"tilewise.{start}.")]
        return max(fits, key=lambda n: len(starts[n][0]))

    found = []
    ordered = sorted(PUBLIC, key=lambda name: (place(name), name.lower()))
    for title, group in itertools.groupby(ordered, lambda name: starts[place(name)][1]):
        named = list(group)
        listed = (f"* {link(x, f'`{x}`')}: {prose(PARTS[x][''].splitlines()[0])}" for x in named)
        found += [f"## {title}", "\n".join(listed), *itertools.chain.from_iterable(map(section, named))]
    return "\n\n".join(found)


PUBLIC = names()
PARTS = {name: docstring(name) for name in PUBLIC}
