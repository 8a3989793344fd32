"""Questions `sparse_forward`, `sparse_backward`, `sparse_choice`, `sparse_whole` and `sliding_tile`: attention over
selected tiles and over windows of tiles of a video.

bf16, heads times head_dim 2048, head_dim 128, one sequence.

Part map: 32,768 tokens, maps of tiles of 128 drawn at random for each head, 5 to 100 % of them taken, beside the same
kernel over all tiles; forward and backward. Errors are to float64 under the same map. TFLOP/s count what is taken.

Part choice: what `select_tiles` takes by means of tiles, 16,384 tokens of sequences of 8,192 and one of 131,072, beside
exact attention over all tiles; and encoding q, k and v without and with sums of blocks and the choice made of these,
in FP8 of centred numbers and of blocks as they are, beside FP8 attention over all tiles.

Part local: queries and keys that follow a random walk, 32,768 and 131,072 tokens, `Sparge` with and without summaries,
exact and in FP8, choice and codes included, beside the same over all tiles. TFLOP/s count all tiles; errors are to
exact attention over all of them, and the density is in the problem.

Part demo: the same of queries and keys of the demo's model, three of its layers one after another, causal, trained on
sequences of 32,768 tokens of Python and given 32,768 and 131,072 of others, with the thresholds for each head that
`tilewise tune-sparse` finds for an error of 5 % in relative L1.

Part sliding: a video of 30 x 48 x 80 latent tokens in tiles of 6 x 8 x 8 and 256 tokens of text, 24 heads, windows of
3 x 3 x 3 and of 5 x 5 x 5 tiles (9 and 42 % of the pairs), exact, in FP8, and with scores in INT8, as SageAttention 2
has them and of blocks as they are, beside all pairs by us and by peers. TFLOP/s count what is seen; errors are to
float64 under the same mask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

import tilewise as tw
from benchmarks.cases import Options
from benchmarks.cases.few_bits import SCHEMES
from benchmarks.contenders import HEAD, SDPA_BACKENDS, fa4, find_fa4, inputs, sdpa, sources_of
from benchmarks.environment import current
from benchmarks.records import Writer
from benchmarks.reference import Slice, head_slice, relative_error
from benchmarks.timing import TURN_MS, TURNS, Call, ceilings, interleaved, method
from tilewise.demo.activations import Layer, Trained
from tilewise.demo.options import Options as OfDemo
from tilewise.explain.sparsity import fit_sparge
from tilewise.ops.attention.choice import choose_tiles
from tilewise.ops.attention.problem import make_call

FORWARD, BACKWARD, CHOICE, WHOLE, SLIDING = QUESTIONS = (
    "sparse_forward", "sparse_backward", "sparse_choice", "sparse_whole", "sliding_tile",
)  # fmt: skip
DENSITIES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
ROUNDS = 20  # of the choice, call by call
HEADS, HEAD_DIM, TILE = 16, 128, 128
EXACT = "relative l2 to float64 under the same map, one head"
ALL = "relative l2 to exact attention over all tiles"
FP8, INT8 = SCHEMES["fp8"], SCHEMES["sage2"]
BY_BLOCKS = {"fp8": SCHEMES["blocks"], "int8": SCHEMES["int8_blocks"]}  # not centred, a scale for each block
TAKEN = tw.Sparge(tau=0.9, theta=-1.0)
MOST = 0.05  # relative L1 error of a head, for which thresholds are found
LOOKED_AT = 64  # tiles of queries by which they are found for the demo's model
CHOSEN = {"selected": tw.Select(TAKEN), "summary": tw.Select(TAKEN, far="summary")}


@dataclass(frozen=True)
class _Run:
    """What all parts share."""

    writer: Writer
    device: str
    rounds: int
    turn_ms: float
    quick: bool

    @property
    def row(self) -> str:
        return "hopper" if self.device == "cuda" else "cpu_tiled"

    @property
    def coded(self) -> str:
        return "hopper_codes" if self.device == "cuda" else "cpu_codes"

    @property
    def tile(self) -> int:
        return 16 if self.quick else TILE

    def shape(self, seqlen: int, batch: int = 1) -> tuple[int, int, int, int]:
        return (batch, 160, 4, 16) if self.quick else (batch, seqlen, HEADS, HEAD_DIM)

    def inputs(self, shape: tuple[int, int, int, int]) -> list[torch.Tensor]:
        return inputs(shape, torch.bfloat16 if self.device == "cuda" else torch.float32, self.device)

    def write(
        self, question: str, problem: dict[str, Any], calls: Mapping[str, Call], operations: Mapping[str, float],
        errors: Mapping[str, float], metric: str, includes: str,
    ) -> None:  # fmt: skip
        """Time the calls, taking turns, and write a record of each."""
        for name, result in interleaved(calls, device=self.device, rounds=self.rounds, turn_ms=self.turn_ms).items():
            times = result.quantiles
            outcome: dict[str, Any] = {"metric": "failure", "message": result.failure}
            if times:
                outcome = {"metric": metric, "value": float(f"{errors[name]:.3g}")} if name in errors else {}
            rate = operations[name] / times[1] / 1e9 if times and name in operations else None
            kind = name.split(".")[-1].removesuffix("_blocks")
            operation = {"choice": "select", "codes": "quantize", "codes_choice": "quantize"}.get(kind)
            self.writer.write(
                question, problem, name, times_ms=times, tflops=rate, error=outcome or None, includes=includes,
                sources=sources_of(name, operation or "attention"),
            )  # fmt: skip


def run(options: Options) -> None:
    """Measure what is wanted: parts map, choice, local, demo and sliding."""
    device = options.device
    ceiling = ceilings(device) if not options.quick else ceilings(device, size=128, copy_bytes=2**20)
    fa4_module, fa4_says = find_fa4(device)
    parts: dict[str, Callable[[_Run], None]] = {
        "map": _map, "choice": _choice, "local": _local, "demo": _demo,
        "sliding": functools.partial(_sliding, fa4_module=fa4_module),
    }  # fmt: skip
    for name, part in parts.items():
        if options.wants(name):
            # what is short is several launches, for which the host must be ahead each time
            rounds, turn_ms = (ROUNDS, 0.0) if name == "choice" else (TURNS, TURN_MS)
            rounds = min(options.rounds, rounds)
            said = f"{method(device, rounds, turn_ms=turn_ms)}; {fa4_says}"
            writer = Writer(current(device), method=said, ceilings=ceiling, results=options.out)
            part(_Run(writer, device, rounds, turn_ms, options.quick))


def _problem(what: str, shape: tuple[int, int, int, int], dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    batch, seqlen, heads, head_dim = shape
    return {
        "operation": what, "seqlen_q": seqlen, "seqlen_k": seqlen, "batch": batch, "num_heads_q": heads,
        "num_heads_kv": heads, "head_dim": head_dim, "dtype": str(dtype)[6:], **more,
    }  # fmt: skip


def _operations(shape: tuple[int, int, int, int], share: float = 1.0) -> float:
    batch, seqlen, heads, head_dim = shape
    return 4.0 * batch * heads * head_dim * seqlen**2 * share


# random maps ---------------------------------------------------------------------------------------------------------


def _map(what: _Run) -> None:
    shape = what.shape(32_768)
    q, k, v, do = what.inputs(shape)
    all_tiles = tw.select_tiles(q, k, tw.Select(tw.TopK(1.0), block=what.tile))
    generator = torch.Generator(q.device).manual_seed(0)
    order = torch.rand((1, shape[2], *all_tiles.kept.shape[2:]), generator=generator, device=q.device)
    dense = f"tilewise.{what.row}.dense"
    for density in DENSITIES if not what.quick else (0.1, 1.0):
        count = max(1, round(density * order.shape[-1]))
        kept = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order.topk(count).indices, True)
        selected, share = replace(all_tiles, kept=kept), count / order.shape[-1]
        want = _under(q, k, v, do, kept, what.tile)
        attention = {
            f"tilewise.{what.row}.selected": _attention(what.row, select=selected),
            dense: _attention(what.row),
        }
        problem = _problem("map", shape, q.dtype, formula=f"{share:.0%} of the tiles")
        outputs = {name: attend(q, k, v) for name, attend in attention.items()}
        grads = {name: torch.autograd.grad(o, (q, k, v), do, retain_graph=True) for name, o in outputs.items()}
        ours = f"tilewise.{what.row}.selected"
        off = relative_error(outputs[ours].detach()[HEAD[0], :, HEAD[1]], want.o)
        off_back = max(
            relative_error(x[HEAD[0], :, HEAD[1]], right)
            for x, right in zip(grads[ours], (want.dq, want.dk, want.dv), strict=True)
        )
        operations = {ours: _operations(shape, share), dense: _operations(shape)}
        forward = {name: _bound(attend, q, k, v) for name, attend in attention.items()}
        what.write(FORWARD, problem, forward, operations, {ours: off}, EXACT, "the whole call; the map is there")
        backward = {name: _gradient(o, (q, k, v), do) for name, o in outputs.items()}
        operations = {name: 2.5 * n for name, n in operations.items()}
        includes = "torch.autograd.grad of q, k, v from a saved forward; the map is there"
        what.write(BACKWARD, problem, backward, operations, {ours: off_back}, EXACT, includes)


def _under(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, kept: torch.Tensor, tile: int) -> Slice:
    """One head in float64 under a map."""

    def taken(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return kept[0, h, i // tile, j // tile]

    head = HEAD[1]
    return head_slice(q, k, v, do, mask=taken, score=None, batch=HEAD[0], head=head)


def _attention(row: str, **arguments: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: tw.attention(q, k, v, impl=row, **arguments)


def _bound(attend: Callable[..., Any], *tensors: torch.Tensor) -> Call:
    return lambda: attend(*tensors)


def _gradient(o: torch.Tensor, leaves: tuple[torch.Tensor, ...], do: torch.Tensor) -> Call:
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


# the choice ----------------------------------------------------------------------------------------------------------


def _choice(what: _Run) -> None:
    for seqlen, batch in ((8192, 2), (131_072, 1)):
        shape = what.shape(seqlen, batch)
        q, k, v = (x.detach() for x in what.inputs(shape)[:3])
        one = f"tilewise.{'triton' if what.device == 'cuda' else 'cpu'}"
        for name, mask in (("full", None), ("causal", tw.causal)):
            select = tw.Select(tw.Sparge(0.9, 0.3), block=what.tile)
            calls: dict[str, Call] = {
                f"{one}.choice": _selecting(q, k, select, mask),
                f"tilewise.{what.row}.dense": _bound(_attention(what.row, mask=mask), q, k, v),
                f"tilewise.{what.coded}.dense": _bound(_attention(what.coded, mask=mask, quantize=FP8), q, k, v),
            }
            for more, scheme in {"": FP8, "_blocks": BY_BLOCKS["fp8"]}.items():
                calls[f"{one}.codes{more}"] = _bound(functools.partial(tw.quantize_qkv, scheme=scheme), q, k, v)
                chosen = _encoding_and_selecting(q, k, v, scheme, tw.Select(*select.parts), mask)
                calls[f"{one}.codes_choice{more}"] = chosen
            problem = _problem("choice", shape, q.dtype, formula=name)
            what.write(CHOICE, problem, calls, {}, {}, "", "select_tiles; attention over all tiles")


def _selecting(q: torch.Tensor, k: torch.Tensor, select: tw.Select, mask: Any) -> Call:
    return lambda: tw.select_tiles(q, k, select, mask=mask)


def _encoding_and_selecting(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scheme: Any, select: tw.Select, mask: Any
) -> Call:
    """As `attention(select=, quantize=)` does before its kernel."""
    call = make_call(q, k, v, mask=mask)

    def run() -> Any:
        call.codes = tw.quantize_qkv(q, k, v, scheme=scheme, sums=True)
        return choose_tiles(call, select, None)

    return run


# from beginning to end -----------------------------------------------------------------------------------------------


def drifting(
    shape: tuple[int, int, int, int], tile: int, dtype: torch.dtype, device: str, near: float = 3.0
) -> list[torch.Tensor]:
    """q, k, v whose tiles lie around centres of a random walk, queries near theirs: most weights are near by, in as
    many tiles for each head as the walk is slow.
    """
    batch, seqlen, heads, head_dim = shape
    tiles = -(-seqlen // tile)
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(tiles, heads, head_dim, generator=generator) * torch.linspace(0.2, 0.6, heads)[:, None]
    centres = steps.cumsum(0)
    centres = (centres - centres.mean(0)) / centres.std(dim=(0, 2), keepdim=True)
    centres = centres.to(device).repeat_interleave(tile, 0)[:seqlen]
    on_device = torch.Generator(device).manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(batch, seqlen, heads, head_dim, generator=on_device, device=device)

    q, k, v = noise() + near * centres, 0.5 * noise() + centres, 0.5 * noise() + centres
    return [x.to(dtype) for x in (q, k, v)]


def _local(what: _Run) -> None:
    for seqlen in (32_768, 131_072):
        shape = what.shape(seqlen)
        q, k, v = drifting(shape, what.tile, torch.bfloat16 if what.device == "cuda" else torch.float32, what.device)
        want = tw.attention(q, k, v, impl=what.row)
        density = float(tw.select_tiles(q, k, tw.Select(TAKEN, block=what.tile)).density())
        calls: dict[str, Call] = {f"tilewise.{what.row}.dense": _bound(_attention(what.row), q, k, v)}
        calls[f"tilewise.{what.coded}.dense"] = _bound(_attention(what.coded, quantize=FP8), q, k, v)
        for name, made in CHOSEN.items():
            select = tw.Select(*made.parts, block=what.tile, far=made.far)
            calls[f"tilewise.{what.row}.{name}"] = _bound(_attention(what.row, select=select), q, k, v)
            if made.far == "drop":
                attend = _attention(what.coded, select=select, quantize=FP8)
                calls[f"tilewise.{what.coded}.{name}"] = _bound(attend, q, k, v)
        errors = {name: relative_error(call(), want) for name, call in calls.items()}  # type: ignore[arg-type]
        problem = _problem("local", shape, q.dtype, formula=f"{density:.0%} of the tiles")
        operations = dict.fromkeys(calls, _operations(shape))
        what.write(WHOLE, problem, calls, operations, errors, ALL, "the whole call; choice and codes are made")


def _demo(what: _Run) -> None:
    lengths, size, steps = ((160, 200), "tiny", 2) if what.quick else ((32_768, 131_072), "medium", 200)
    made = OfDemo(size=size, steps=steps, batch=1, seqlen=lengths[0], device=what.device)
    model = Trained.by(made, longest=lengths[-1], every=10)  # one of 20 files is less than the longest text
    for seqlen in lengths:
        layers = model.activations(1, seqlen)[1::3]
        selects = [_fit(what, *layer) for layer in layers]
        density = fmean(
            float(tw.select_tiles(q, k, select, mask=tw.causal).density())
            for (q, k, _), select in zip(layers, selects, strict=True)
        )
        calls: dict[str, Call] = {}
        for row, scheme in ((what.row, None), (what.coded, FP8)):
            for name, chosen in (("dense", [None] * len(layers)), ("selected", selects)):
                calls[f"tilewise.{row}.{name}"] = _in_turn(
                    [_attention(row, mask=tw.causal, quantize=scheme, select=select) for select in chosen], layers
                )
        want = calls[f"tilewise.{what.row}.dense"]()
        errors = {name: max(map(relative_error, call(), want)) for name, call in calls.items()}  # type: ignore[call-overload]
        shape, heads_kv = tuple(layers[0][0].shape), layers[0][1].shape[2]
        formula = f"{len(layers)} layers, causal, {density:.0%} of the tiles"
        problem = _problem("demo", shape, layers[0][0].dtype, formula=formula) | {"num_heads_kv": heads_kv}
        operations = dict.fromkeys(calls, len(layers) * _operations(shape, 0.5))
        includes = "whole calls of the layers in turn; choice and codes are made"
        what.write(WHOLE, problem, calls, operations, errors, f"{ALL}, of the layer with the largest", includes)


def _fit(what: _Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tw.Select:
    block = (what.tile, what.tile)
    return fit_sparge(q, k, v, MOST, mask=tw.causal, block=block, tiles=LOOKED_AT).select(block, "drop", None)


def _in_turn(attends: Sequence[Callable[..., torch.Tensor]], layers: Sequence[Layer]) -> Call:
    return lambda: [attend(*layer) for attend, layer in zip(attends, layers, strict=True)]


# windows of tiles ----------------------------------------------------------------------------------------------------


def _sliding(what: _Run, fa4_module: Any) -> None:
    canvas, tile, text = ((4, 6, 8), (2, 3, 4), 5) if what.quick else ((30, 48, 80), (6, 8, 8), 256)
    tokens = math.prod(canvas) + text
    shape = (1, tokens, 4, 16) if what.quick else (1, tokens, 24, HEAD_DIM)
    q, k, v = (x.detach() for x in what.inputs(shape)[:3])
    peers = {name: sdpa(backend, False) for name, backend in SDPA_BACKENDS[what.device].items()}
    peers |= {"fa4": fa4(fa4_module, False)} if fa4_module else {}
    for window in ((1, 2, 1),) if what.quick else ((3, 3, 3), (5, 5, 5)):
        mask = tw.sliding_tile(canvas, tile, window, text=text, device=what.device)
        rows = torch.arange(0, tokens, tokens // 150, device=what.device)
        want, seen = _sampled(q, k, v, mask, rows)
        share = ((tokens - text) * seen + text * tokens) / tokens**2  # windows hold as many tokens everywhere
        dense = {f"tilewise.{what.row}.dense": _attention(what.row), **peers}
        sparse = {
            f"tilewise.{what.row}.sliding": _attention(what.row, mask=mask),
            f"tilewise.{what.coded}.sliding": _attention(what.coded, mask=mask, quantize=FP8),
            f"tilewise.{what.coded}.sliding_int8": _attention(what.coded, mask=mask, quantize=INT8),
            f"tilewise.{what.coded}.sliding_int8_blocks": _attention(what.coded, mask=mask, quantize=BY_BLOCKS["int8"]),
        }
        errors = {name: relative_error(attend(q, k, v)[0, rows, HEAD[1]], want) for name, attend in sparse.items()}
        operations = {name: _operations(shape, share if name in sparse else 1.0) for name in (sparse | dense)}
        calls = {name: _bound(attend, q, k, v) for name, attend in (sparse | dense).items()}
        problem = _problem("sliding", shape, q.dtype, formula=f"{mask!r}, {share:.1%} of the pairs")
        includes = "the whole call, codes and tile lists are made"
        what.write(SLIDING, problem, calls, operations, errors, f"{EXACT}, every {tokens // 150}th query", includes)


def _sampled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: tw.Mask, rows: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """(the output of some queries of one head in float64, how many keys the first of them sees)"""
    head = HEAD[1]
    place = torch.tensor(0, device=q.device)
    keys = torch.arange(k.shape[1], device=q.device)
    seen = mask.evaluate(b=place, h=place + head, i=rows[:, None], j=keys)
    s = (q[0, rows, head].double() @ k[0, :, head].double().T) * q.shape[-1] ** -0.5
    o = torch.softmax(s.masked_fill(~seen, -torch.inf), -1) @ v[0, :, head].double()
    return o, int(seen[0].sum())
