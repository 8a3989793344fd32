"""`tilewise explain`: small programs that count traffic or forwards, and pictures of masks, divided work and steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli import explain_decode, explain_guesses, explain_step, shapes
from tilewise.cli.expression import read_mask
from tilewise.cli.output import FAILED, console, guarded, say, say_json, table
from tilewise.core.errors import InputError
from tilewise.explain import guesses, ladder
from tilewise.explain import traffic as closed_forms
from tilewise.explain.ladder import ORDER, Report
from tilewise.formula.sizes import made_for
from tilewise.schedule.sharing import Group
from tilewise.schedule.tilemap import EMPTY, FULL, PARTIAL, TileMap
from tilewise.schedule.worklist import WorkList

WIDEST = 64  # tiles a side that a terminal shows
PREFIX_ROWS = 64  # of a tile of a prefix that requests share, as for head dimensions up to 128
GLYPHS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}


def _title(module: Any) -> str:
    return str(module.__doc__).splitlines()[0].rstrip(".")


@guarded
def overview(context: typer.Context) -> None:
    """Small programs that count memory traffic or forwards; whole algorithms, masks and an engine's steps as pictures.

    Without a command: list the rungs of the ladder, and the methods of guessing tokens.
    """
    if context.invoked_subcommand is None:
        rungs = [(name, _title(ladder.rung(name))) for name in ORDER]
        table("the ladder (tilewise explain ladder NAME runs one)", ("rung", ""), rungs, left=2)
        say("")
        methods = [(name, _title(guesses.method(name))) for name in guesses.ORDER]
        table("guess, then check (tilewise explain guesses NAME runs one)", ("method", ""), methods, left=2)


@guarded
def climb(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RUNG]...", help="Names of rungs; all of them without.")
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="Side of the matrices, or tokens.")] = 32,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of q, k and v in the attention rungs.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=NUMBER", help="Passed to the rung: tile, fast_memory, block_m, …"),
    ] = None,
    source: Annotated[bool, typer.Option("--source", help="Print the rung's program too.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Draw the counts into this .svg or .png file.")] = None,
    as_json: shapes.Json = False,
) -> None:
    """Run rungs of the ladder: each counts its loads and stores and is checked against its formula and NumPy.

    Exit code 1 if a count differs from its formula.

    Example: tilewise explain ladder flash_attention_2 --size 128 --head-dim 16 -o block_m=32 --source
    """
    options = dict(_number(text) for text in option or ())
    if options and len(names or ()) != 1:
        hint = "name the rung that takes the option"
        raise InputError("--option", got=f"{len(names or ())} rungs", expected="exactly one rung", hint=hint)
    if out is not None:
        from tilewise.explain import draw

        draw.check_target(out)
    reports = [_run(name, size=size, head_dim=head_dim, seed=seed, options=options) for name in names or ORDER]
    if out is not None:
        draw.save(draw.ladder(reports), out)
    if as_json:
        say_json([_data(report) for report in reports])
    else:
        for report in reports:
            say(str(report))
            if source:
                say("\n" + Path(str(ladder.rung(report.rung).__file__)).read_text(encoding="utf-8"))
    if any(report.counts != report.formula for report in reports):
        raise typer.Exit(FAILED)


def _run(name: str, *, size: int, head_dim: int, seed: int, options: dict[str, int]) -> Report:
    try:
        return ladder.climb(name, size=size, head_dim=head_dim, seed=seed, **options)
    except TypeError as error:
        if not options:
            raise
        raise InputError("--option", got=", ".join(options), expected=f"options of {name}", hint=str(error)) from error


def _number(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name.isidentifier() or not number.lstrip("-").isdecimal():
        hint = "an option is an integer parameter of the rung's run(); --source prints it"
        raise InputError("--option", got=repr(text), expected="NAME=NUMBER, such as tile=8", hint=hint)
    return name, int(number)


def _data(report: Report) -> dict[str, Any]:
    return {
        "rung": report.rung,
        "title": report.title,
        "problem": report.problem,
        "loads": report.counts.loads,
        "stores": report.counts.stores,
        "formula_loads": report.formula.loads,
        "formula_stores": report.formula.stores,
        "error": report.error,
    }


@guarded
def mask(
    expression: Annotated[
        str | None, typer.Argument(metavar="EXPRESSION", help="Deprecated: write --mask EXPRESSION.")
    ] = None,
    mask_text: shapes.MaskText = None,
    seqlen: Annotated[int, typer.Option("--seqlen", min=1, help="Number of keys, and of queries.")] = 1024,
    seqlen_q: Annotated[
        int | None, typer.Option("--seqlen-q", min=1, help="Number of queries. Default: as many as keys.")
    ] = None,
    block_m: Annotated[int, typer.Option("--block-m", min=1, help="Queries of a tile (TileMap.build: 128).")] = 64,
    block_n: Annotated[int, typer.Option("--block-n", min=1, help="Keys of a tile (TileMap.build: 128).")] = 64,
    query: Annotated[
        int | None, typer.Option("--query", min=0, help="With --out: draw the tiles that this query visits.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Draw into this .svg or .png file (at most 2,048 tokens a side).")
    ] = None,
    as_json: shapes.Json = False,
) -> None:
    """Classify the tiles of a mask: EMPTY tiles are skipped, PARTIAL ones masked, FULL ones computed without a mask.

    Example: tilewise explain mask --mask "causal & window(256)" --seqlen 2048 --out window.svg
    """
    formula, queries = read_mask(_one_mask(mask_text, expression)), seqlen_q or seqlen
    assert formula is not None
    if query is not None and out is None:
        hint = "--out mask.svg: text shows the tiles of all queries"
        raise InputError("--query", got=f"{query} without --out", expected="--out with it", hint=hint)
    if out is not None:
        from tilewise.explain import draw

        draw.check_target(out)
    batch, heads = (made_for(formula.sizes, axis, 1) for axis in ("batch", "num_heads_q"))
    given: dict[str, Any] = {"seqlen_q": queries, "seqlen_k": seqlen, "block_m": block_m, "block_n": block_n}
    tilemap = TileMap.build(formula, batch=batch, heads=heads, **given)
    classes = tilemap.classes[0, 0].tolist()
    count = {kind: sum(row.count(kind) for row in classes) for kind in (EMPTY, PARTIAL, FULL)}
    if out is not None:
        panel = draw.panel(formula, seqlen_q=queries, seqlen_k=seqlen, block_m=block_m, block_n=block_n)
        figure = draw.tiles([panel], block_m, block_n) if query is None else draw.query(panel, block_m, block_n, query)
        draw.save(figure, out)
    if as_json:
        names = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}
        sizes = {"seqlen_q": queries, "seqlen_k": seqlen, "block_m": block_m, "block_n": block_n}
        tiles = {names[kind]: n for kind, n in count.items()}
        say_json({"mask": repr(formula), **sizes, **tiles, "density": tilemap.density(), "classes": classes})
        return
    total = sum(count.values())
    say(f"{formula!r}: {queries} queries × {seqlen} keys in tiles of {block_m} × {block_n}")
    if max(len(classes), len(classes[0])) <= WIDEST:
        glyphs = {kind: glyph if _unicode() else ".+#"[kind] for kind, glyph in GLYPHS.items()}
        say("\n".join("".join(2 * glyphs[kind] for kind in row) for row in classes))
        say(f"{glyphs[FULL]} FULL  {glyphs[PARTIAL]} PARTIAL  {glyphs[EMPTY]} EMPTY")
    say(
        f"visits {count[PARTIAL] + count[FULL]} of {total} tiles ({tilemap.density():.1%}): "
        f"{count[FULL]} FULL, {count[PARTIAL]} PARTIAL; skips {count[EMPTY]}"
    )
    if out is not None:
        say(f"drawn: {out}")


def _one_mask(mask_text: str | None, expression: str | None) -> str:
    """The text of --mask, or of the argument that earlier releases took."""
    if (mask_text is None) == (expression is None):
        got = "none" if mask_text is None else "an argument and --mask"
        hint = 'tilewise explain mask --mask "causal & window(256)"'
        raise InputError("--mask", got=got, expected="one mask", hint=hint)
    if mask_text is not None:
        return mask_text
    assert expression is not None
    console(stderr=True).print(
        f"tilewise: deprecated: write --mask {expression!r}; the next release drops the argument"
    )
    return expression


def _unicode() -> bool:
    return console().encoding.lower().startswith("utf")


@guarded
def traffic(
    seqlen: Annotated[int, typer.Option("--seqlen", min=1, help="Queries and keys.")] = 4096,
    head_dim: Annotated[int, typer.Option("--head-dim", min=1, help="Width of q, k and v.")] = 128,
    fast_memory: Annotated[
        int, typer.Option("--fast-memory", min=1, help="Elements of on-chip memory a tile may use.")
    ] = 49152,
    causal: Annotated[bool, typer.Option("--causal", help="FlashAttention-2 skips tiles above the diagonal.")] = False,
    as_json: shapes.Json = False,
) -> None:
    """Compare what one head moves through slow memory: materialised attention, FlashAttention-1, FlashAttention-2."""
    rows = closed_forms.compare(seqlen, seqlen, head_dim, fast_memory=fast_memory, causal=causal)
    if as_json:
        say_json(
            [
                {
                    "algorithm": row.algorithm,
                    "loads": row.counts.loads,
                    "stores": row.counts.stores,
                    "bytes": row.bytes,
                    "extra_elements": row.extra_elements,
                }
                for row in rows
            ]
        )
    else:
        say(closed_forms.table(rows))


@guarded
def plan(
    lengths: Annotated[str, typer.Argument(help='Keys of each request, such as "100,4000,64" or "8*512,32768".')],
    queries: Annotated[int, typer.Option(min=0, help="New queries of each request.")] = 1,
    heads_q: shapes.HeadsQ = 32,
    heads_kv: shapes.HeadsKV = 8,
    programs: Annotated[
        int, typer.Option(min=1, max=2**16, help="Programs that share the work; on a GPU two per multiprocessor.")
    ] = 16,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a tile: queries × query heads per KV head.")] = 16,
    block_n: Annotated[int, typer.Option("--block-n", min=1, help="Keys of a tile.")] = 64,
    shared: Annotated[int, typer.Option(min=0, help="Keys of the prefix that all requests share.")] = 0,
    mask_text: shapes.MaskText = None,
    out: Annotated[Path | None, typer.Option("--out", help="Draw into this .svg or .png file.")] = None,
    as_json: shapes.Json = False,
) -> None:
    """Show how programs divide attention over pages: each gets an equal share of all tiles; split rows are merged.

    With --shared, the prefix that all requests share is computed first, once for all of them, in tiles of 64 rows.

    Example: tilewise explain plan "100,4000,64,900" --programs 8 --out plan.svg
    """
    if out is not None:
        from tilewise.explain import draw

        draw.check_target(out)
    keys = shapes.lengths(lengths, "LENGTHS")
    heads_kv = heads_kv or heads_q
    together = PREFIX_ROWS * heads_kv // max(queries * heads_q, 1)
    tiles = min([shared, *(n - queries for n in keys)]) // block_n
    work = WorkList.build(
        [queries] * len(keys), keys, heads_q=heads_q, heads_kv=heads_kv, programs=programs, rows=rows, block_n=block_n,
        mask=None if mask_text is None else read_mask(mask_text), together=together,
        groups=[Group(0, len(keys), tiles)] if tiles > 0 and together > 1 and queries > 0 else (),
    )  # fmt: skip
    merges = work.merges()
    if out is not None:
        draw.save(draw.shares(work), out)
    if as_json:
        before = {} if work.prefixes is None else {"prefixes": _shares(work.prefixes)}
        say_json({**_shares(work), **before, "merges": [merge._asdict() for merge in merges]})
        return
    if work.prefixes is not None:
        say(f"first the shared prefix: {work.prefixes.work} tiles of {PREFIX_ROWS} rows and {block_n} keys")
        _say_shares(work.prefixes, "requests from ")
    say(f"{len(keys)} requests, {work.work} tiles of {rows} rows and {block_n} keys")
    _say_shares(work, "request ")
    parts = sum(len(merge.slots) + len(merge.prefix) for merge in merges)
    say(f"merged: {len(merges)} rows of tiles that are split or have a prefix, from {parts} parts")
    if out is not None:
        say(f"drawn: {out}")


def _shares(work: WorkList) -> dict[str, Any]:
    """What the programs of a line do."""
    done = [
        [{"request": int(work.request[s.unit]), **s._asdict()} for s in work.segments(program)]
        for program in range(work.programs)
    ]
    return {"tiles": work.work, "programs": done}


def _say_shares(work: WorkList, whose: str) -> None:
    done = [list(work.segments(program)) for program in range(work.programs)]
    most = max((sum(s.end - s.first for s in segments) for segments in done), default=0)
    say(f"{work.programs} programs, at most {most} tiles each")
    for program, segments in enumerate(done[:WIDEST]):
        shown = ", ".join(f"{whose}{work.request[u]} head {h} tiles {a}-{b - 1}" for u, h, a, b in segments[:4])
        more = f", and {len(segments) - 4} more" if len(segments) > 4 else ""
        say(f"  {program}: {shown or 'nothing'}{more}")


def register(app: typer.Typer) -> None:
    """Add the command group to `app`."""
    app.callback(invoke_without_command=True)(overview)
    app.command("decode")(explain_decode.decode)
    app.command("guesses")(explain_guesses.guess)
    app.command("ladder")(climb)
    app.command("mask")(mask)
    app.command("plan")(plan)
    app.command("step")(explain_step.step)
    app.command("traffic")(traffic)
