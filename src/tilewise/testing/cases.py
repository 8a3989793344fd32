"""Named problems.

Every implementation is tested on each one that it can run, with every property that applies. Adding a mask or score to
the library means adding a case here; nothing else.
"""

from __future__ import annotations

import torch

import tilewise as tw
from tilewise.formula.library import tree_times
from tilewise.testing import plain
from tilewise.testing.case import Builder, Case, Maker, Spelled
from tilewise.testing.document_masks import ascending, causal_ascending, document, document_window
from tilewise.testing.grid_masks import neighborhood, sliding_tile

# masks -------------------------------------------------------------------------------------------------------------


def causal(case: Case, make: Maker) -> Spelled:
    return Spelled(tw.causal, plain.causal)


def window(left: int | None, right: int | None = 0) -> Builder:
    return lambda case, make: Spelled(tw.window(left, right), plain.window(left, right))


def prefix_lm(case: Case, make: Maker) -> Spelled:
    lengths = make.integers(0, case.seqlen_k, case.batch)
    return Spelled(tw.causal | tw.prefix(lengths), plain.either(plain.causal, plain.prefix(lengths)))


def padding(case: Case, make: Maker) -> Spelled:
    seqlens = make.fixed([0, *range(7, 7 + case.batch - 1)])  # the first batch element sees nothing
    return Spelled(tw.lengths(seqlens), plain.prefix(seqlens))


def far_ends(case: Case, make: Maker) -> Spelled:
    """Runs whose ends 32 bits do not hold, and 64 bits do not beside a position: nothing before, or all up to, one."""
    first, last = make.fixed([3, 2**31 - 1, 3, 3]).int(), make.fixed([2**40, 2**31, 20, -(2**63)])
    back = make.fixed([2**63 - 1, 2**33, 7, 2**63 - 1])

    def seen(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (j > first[h]) & (j < last[h]) & (i - j <= back[h]) & (i - j < 2**60)

    return Spelled(seen, seen)


def tree(case: Case, make: Maker) -> Spelled:
    draws = make.integers(0, 1000, case.seqlen_k).tolist()
    parents = [-1, *(draw % node if draw % 9 else -1 for node, draw in enumerate(draws[1:], 1))]
    entry, exit_ = (t.to(make.device) for t in tree_times(parents))
    return Spelled(tw.tree(entry, exit_), plain.tree(parents, make.device))


def dilated_window(case: Case, make: Maker) -> Spelled:
    return Spelled(tw.window(24) & tw.dilated(3), plain.both(plain.window(24), plain.dilated(3)))


def head_blocks(case: Case, make: Maker) -> Spelled:
    size = 16
    visible = make.booleans(0.5, case.heads_q, -(-case.seqlen_k // size), -(-case.seqlen_k // size))
    return Spelled(tw.blocks(visible, size), plain.blocks(visible, size))


def explicit(case: Case, make: Maker) -> Spelled:
    keep = make.booleans(0.3, case.batch, case.heads_q, case.seqlen_q, case.seqlen_k)
    keep[:, 0, 3] = False  # an empty row in one head
    return Spelled(tw.explicit(keep), plain.table(keep))


def anti_causal(case: Case, make: Maker) -> Spelled:
    return Spelled(~tw.causal, plain.opposite(plain.causal))


def by_head(case: Case, make: Maker) -> Spelled:
    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (i - j < (h + 1) * 8) & (j <= i) | (j == b)

    return Spelled(visible, visible)


def chunked(case: Case, make: Maker) -> Spelled:
    return Spelled(tw.chunked(16) & tw.causal, plain.both(plain.chunked(16), plain.causal))


def segments(case: Case, make: Maker) -> Spelled:
    starts = make.fixed([0, 3, 1, 2, 0, 1, 0, 0, 0])[: len(case.lengths)]

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (j <= i) & (j >= starts[b])

    return Spelled(visible, visible)


def small_integers(case: Case, make: Maker) -> Spelled:
    """Sums of int8 and differences of uint8 that pass the ends of their types, and an index that is not monotone."""
    signed = make.integers(90, 128, case.seqlen_k).to(torch.int8)
    unsigned = make.integers(0, 9, case.seqlen_k).to(torch.uint8)
    shares = make.fixed([1, 0, 1])

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (
            (signed[i] + signed[j] > 210)
            & (unsigned[i] - unsigned[j] < 4)
            & (-signed[j] < 0)
            & (shares[(h + 2 * b) % 3] > 0)
        )

    def plain_visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        sums, steps = signed[i].long() + signed[j].long(), unsigned[i].long() - unsigned[j].long()
        return (sums > 210) & (steps < 4) & (shares[(h + 2 * b) % 3] > 0)

    return Spelled(visible, plain_visible)


def quotients(case: Case, make: Maker) -> Spelled:
    """Chunks whose borders stand where a position times the reciprocal of the divisor falls short of a whole number."""

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (torch.floor(i / 41) == torch.floor(j / 41)) | (torch.floor(j / 47) == 1)

    return Spelled(visible, lambda b, h, i, j: (i // 41 == j // 41) | (j // 47 == 1))


def undefined(case: Case, make: Maker) -> Spelled:
    """The root of a negative number is NaN, of which no comparison holds."""

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return torch.sqrt((i - j).float()) <= 20

    return Spelled(visible, plain.causal)


def undefined_value(case: Case, make: Maker) -> Spelled:
    table = make.integers(0, 9, case.seqlen_k).float()
    table[20] = torch.nan
    return Spelled(lambda b, h, i, j: table[j] < 10, lambda b, h, i, j: (j != 20) & (i == i))


def float_steps(case: Case, make: Maker) -> Spelled:
    """0.2 is a little more than a fifth, in 32 bits as in 64: 5 of it reach beyond 1."""

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        distance = (i - j).float()
        return ((distance // 0.2) % 3.0 == 0) | ((distance % 0.2 > 0.1) & (j % 5 == 0))

    def plain_visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        before = i > j
        return ((5 * (i - j) - before.long()) % 3 == 0) | (before & (j % 5 == 0))

    return Spelled(visible, plain_visible)


# scores ------------------------------------------------------------------------------------------------------------


def alibi(case: Case, make: Maker) -> Spelled:
    slopes = make.learned(case.heads_q, low=0.05)
    return Spelled(tw.alibi(slopes), plain.alibi(slopes))


def batch_alibi(case: Case, make: Maker) -> Spelled:
    slopes = make.learned(len(case.lengths), case.heads_q, low=0.05)
    return Spelled(tw.alibi(slopes), plain.alibi(slopes))


def softcap(case: Case, make: Maker) -> Spelled:
    return Spelled(tw.softcap(1.5), plain.softcap(1.5))


def relative_bias(bidirectional: bool) -> Builder:
    def build(case: Case, make: Maker) -> Spelled:
        values = make.learned(16, case.heads_q)
        options = {"bidirectional": bidirectional, "max_distance": 40}
        return Spelled(tw.relative_bias(values, **options), plain.relative_bias(values, **options))  # type: ignore[arg-type]

    return build


def bias(case: Case, make: Maker) -> Spelled:
    values = make.learned(1, case.heads_q, case.seqlen_q, case.seqlen_k, dtype=make.dtype)
    return Spelled(tw.bias(values), plain.added(plain.table(values)))


def batch_bias(case: Case, make: Maker) -> Spelled:
    values = make.learned(case.batch, 1, case.seqlen_q, case.seqlen_k)
    return Spelled(tw.bias(values), plain.added(plain.table(values)))


def plane_bias(case: Case, make: Maker) -> Spelled:
    values = make.learned(case.seqlen_q, case.seqlen_k)
    return Spelled(tw.bias(values), plain.added(plain.table(values)))


def tanh_score(case: Case, make: Maker) -> Spelled:
    return Spelled(tw.tanh_score(), lambda s, b, h, i, j: torch.tanh(s))


def sigmoid_score(case: Case, make: Maker) -> Spelled:
    return Spelled(tw.sigmoid_score(), lambda s, b, h, i, j: torch.sigmoid(s))


def temperature(case: Case, make: Maker) -> Spelled:
    factor = make.learned(low=0.5)

    def score(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return s * factor

    return Spelled(score, score)


def capped_alibi(case: Case, make: Maker) -> Spelled:
    slopes = make.learned(case.heads_q, low=0.05)
    return Spelled(tw.alibi(slopes) >> tw.softcap(2.0), plain.then(plain.alibi(slopes), plain.softcap(2.0)))


def many_operations(case: Case, make: Maker) -> Spelled:
    level, kind = make.learned(case.seqlen_k, 4), make.integers(0, 4, case.seqlen_k)

    def score(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        near = torch.where(i >= j, s * 0.5, torch.abs(s) + 0.25)
        wave = torch.sin(near) * torch.exp(-torch.abs(s)) + torch.sqrt(s * s + 1.0) - torch.log(s * s + 2.0)
        return wave + torch.sigmoid(level[j, kind[j]]) * torch.clamp(s, -1.0, 1.0)

    return Spelled(score, score)


def by_row(case: Case, make: Maker) -> Spelled:
    """A score that depends on the query alone: every key it sees weighs the same."""
    level = make.learned(case.seqlen_k)

    def score(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return level[i] * 0.5

    return Spelled(score, lambda s, b, h, i, j: score(s, b, h, i, j) + 0.0 * s)


def by_key(case: Case, make: Maker) -> Spelled:
    level = make.learned(case.seqlen_k)

    def score(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return level[j] * 0.5

    return Spelled(score, lambda s, b, h, i, j: score(s, b, h, i, j) + 0.0 * s)


def constant(case: Case, make: Maker) -> Spelled:
    return Spelled(lambda s, b, h, i, j: 0.25, lambda s, b, h, i, j: 0.25 + 0.0 * s)


def clock(case: Case, make: Maker) -> Spelled:
    """Differences of times that float32 does not hold."""
    times = 1_700_000_000 + make.integers(1, 5, case.seqlen_k).cumsum(0)
    return Spelled(
        lambda s, b, h, i, j: s - 0.125 * (times[i] - times[j]),
        lambda s, b, h, i, j: s - 0.125 * (times[i] - times[j]).to(s.dtype),
    )


def high_softcap(case: Case, make: Maker) -> Spelled:
    return Spelled(tw.softcap(50.0), plain.softcap(50.0))


def wide_softcap(case: Case, make: Maker) -> Spelled:
    return Spelled(tw.softcap(500.0), plain.softcap(500.0))


# the list ----------------------------------------------------------------------------------------------------------

LENGTHS = ((17, 17), (0, 0), (1, 1), (40, 40), (7, 7))
CROSS = ((5, 33), (1, 20), (0, 9), (9, 0), (12, 4), (40, 70))


def _named(**cases: Case) -> dict[str, Case]:
    return {name: case.with_(name=name) for name, case in cases.items()}


_ = ""
CASES: dict[str, Case] = _named(
    plain=Case(_),
    causal=Case(_, mask=causal),
    causal_more_keys=Case(_, seqlen_q=17, mask=causal),
    causal_more_queries=Case(_, seqlen_k=17, mask=causal),
    plain_more_queries=Case(_, seqlen_q=66, seqlen_k=5),
    window=Case(_, mask=window(9)),
    window_two_sided=Case(_, seqlen_q=40, mask=window(9, 5)),
    window_future=Case(_, mask=window(None, 3)),
    window_empty_rows=Case(_, seqlen_k=20, mask=window(6, 2)),
    chunked=Case(_, mask=chunked),
    prefix_lm=Case(_, mask=prefix_lm),
    padding=Case(_, batch=3, seqlen_k=40, mask=padding),
    far_ends=Case(_, batch=1, seqlen_q=50, heads_q=4, mask=far_ends),
    document=Case(_, mask=document),
    document_window=Case(_, mask=document_window),
    ascending=Case(_, mask=ascending),
    causal_ascending=Case(_, mask=causal_ascending),
    tree=Case(_, seqlen_q=20, seqlen_k=33, mask=tree),
    dilated_window=Case(_, mask=dilated_window),
    neighborhood_1d=Case(_, seqlen_q=40, seqlen_k=40, mask=neighborhood((40,), (7,))),
    neighborhood_2d=Case(_, seqlen_q=63, seqlen_k=63, mask=neighborhood((7, 9), (3, 5))),
    neighborhood_3d=Case(_, seqlen_q=60, seqlen_k=60, mask=neighborhood((3, 4, 5), (3, 3, 1))),
    neighborhood_even=Case(_, seqlen_q=54, seqlen_k=54, mask=neighborhood((6, 9), (4, 6), stride=(3, 2))),
    neighborhood_steps=Case(_, mask=neighborhood((5, 13), (2, 4), dilation=(2, 3), causal=(True, False))),
    sliding_tile=Case(_, 1, 100, 100, mask=sliding_tile((2, 8, 6), (1, 2, 2), (1, 3, (1, 0)), text=4, text_first=True)),
    sliding_tile_heads=Case(_, mask=sliding_tile((3, 5, 4), (2, 2, 3), [(1, 1, 2), (2, 3, 1)], text=5)),
    sliding_tile_curve=Case(_, mask=sliding_tile((7, 8), (3, 2), (2, 3), order="hilbert", text=9, text_first=True)),
    sliding_tile_causal=Case(_, mask=sliding_tile((13, 5), (2, 3), (3, 1), causal=True)),
    head_blocks=Case(_, mask=head_blocks),
    explicit=Case(_, seqlen_q=30, mask=explicit),
    anti_causal=Case(_, mask=anti_causal),
    by_head=Case(_, heads_q=4, mask=by_head),
    small_integers=Case(_, heads_q=4, mask=small_integers),
    undefined=Case(_, 1, 40, 384, 1, 1, mask=undefined),
    undefined_value=Case(_, mask=undefined_value),
    float_steps=Case(_, mask=float_steps),
    quotients=Case(_, seqlen_q=100, seqlen_k=130, mask=quotients),
    score_by_row=Case(_, mask=causal, score=by_row),
    score_by_key=Case(_, mask=window(20), score=by_key),
    score_constant=Case(_, mask=causal, score=constant),
    score_clock=Case(_, mask=causal, score=clock),
    softcap_wide=Case(_, mask=causal, score=wide_softcap),
    alibi_causal=Case(_, mask=causal, score=alibi),
    alibi_more_keys=Case(_, seqlen_q=20, score=alibi),
    alibi_batch=Case(_, mask=causal, score=batch_alibi),
    softcap_causal=Case(_, mask=causal, score=softcap),
    relative_bias=Case(_, score=relative_bias(True)),
    relative_bias_causal=Case(_, mask=causal, score=relative_bias(False)),
    bias=Case(_, seqlen_q=30, score=bias),
    bias_batch=Case(_, seqlen_q=30, seqlen_k=31, mask=causal, score=batch_bias),
    bias_plane=Case(_, seqlen_q=33, seqlen_k=20, score=plane_bias),
    tanh_score=Case(_, score=tanh_score),
    sigmoid_score=Case(_, mask=window(20), score=sigmoid_score),
    temperature=Case(_, mask=causal, score=temperature),
    capped_alibi=Case(_, mask=window(30), score=capped_alibi),
    many_operations=Case(_, mask=causal, score=many_operations),
    gqa_2=Case(_, heads_q=4, mask=causal),
    gqa_4=Case(_, heads_q=8, mask=window(20), score=softcap),
    gqa_8=Case(_, batch=1, heads_q=16, seqlen_q=33, seqlen_k=40),
    gqa_3=Case(_, batch=1, heads_q=6, mask=causal, score=alibi),
    mqa=Case(_, batch=1, heads_q=6, heads_kv=1, mask=causal),
    length_1=Case(_, seqlen_q=1, seqlen_k=1, mask=causal),
    length_7=Case(_, seqlen_q=7, seqlen_k=7, mask=causal, score=alibi),
    length_129=Case(_, batch=1, seqlen_q=129, seqlen_k=129, heads_q=1, heads_kv=1, mask=causal, score=softcap),
    length_1025=Case(_, batch=1, seqlen_q=1025, seqlen_k=1025, heads_q=2, heads_kv=1, mask=window(300)),
    one_query=Case(_, seqlen_q=1, seqlen_k=129, heads_q=8, mask=causal),
    many_heads=Case(_, batch=1, seqlen_q=1, seqlen_k=70, heads_q=32, heads_kv=32),
    many_heads_packed=Case(_, packed=((1, 9), (1, 130), (0, 3), (2, 40)), heads_q=32, heads_kv=16, mask=causal),
    one_query_long=Case(_, batch=1, seqlen_q=1, seqlen_k=1500, heads_q=4, heads_kv=1, mask=window(1100), score=alibi),
    few_queries=Case(_, seqlen_q=5, seqlen_k=200, heads_q=4, mask=prefix_lm, score=batch_alibi),
    head_dim_1=Case(_, seqlen_q=33, head_dim=1, head_dim_v=1, mask=causal),
    head_dim_40=Case(_, seqlen_q=33, head_dim=40, head_dim_v=40, mask=causal),
    head_dim_64=Case(_, head_dim=64, head_dim_v=64),
    head_dim_80=Case(_, batch=1, seqlen_q=33, head_dim=80, head_dim_v=80, mask=causal, score=alibi),
    head_dim_96=Case(_, batch=1, seqlen_q=33, head_dim=96, head_dim_v=96),
    head_dim_128=Case(_, batch=1, head_dim=128, head_dim_v=128, mask=causal),
    head_dim_192=Case(_, batch=1, seqlen_q=33, head_dim=192, head_dim_v=128, mask=causal),
    head_dim_256=Case(_, batch=1, seqlen_q=33, head_dim=256, head_dim_v=256, score=softcap),
    head_dim_512=Case(_, batch=1, seqlen_q=33, heads_kv=1, head_dim=512, head_dim_v=512, mask=causal),
    head_dim_v_wider=Case(_, head_dim=16, head_dim_v=40, mask=causal),
    sliced=Case(_, memory="sliced", heads_q=4, mask=causal),
    expanded=Case(_, memory="expanded", heads_q=4, heads_kv=4, mask=causal),
    scale=Case(_, scale=0.7, mask=causal, score=softcap),
    scale_negative=Case(_, scale=-0.2),
    sink_causal=Case(_, heads_q=4, sink=True, mask=causal),
    sink_empty_rows=Case(_, seqlen_k=20, sink=True, mask=window(6)),
    sink_alibi=Case(_, sink=True, score=alibi),
    dropout=Case(_, dropout=0.3),
    dropout_causal=Case(_, seqlen_q=66, seqlen_k=33, heads_q=4, dropout=0.1, mask=causal, score=softcap),
    lse_gradient=Case(_, lse_gradient=True),
    lse_gradient_causal=Case(_, seqlen_k=40, lse_gradient=True, mask=causal),
    lse_gradient_everything=Case(_, heads_q=4, lse_gradient=True, sink=True, dropout=0.2, mask=causal, score=alibi),
    packed=Case(_, packed=LENGTHS),
    packed_causal=Case(_, packed=LENGTHS, heads_q=4, mask=causal),
    packed_cross=Case(_, packed=CROSS),
    packed_cross_causal=Case(_, packed=CROSS, mask=causal, score=batch_alibi),
    packed_window_sink=Case(_, packed=CROSS, sink=True, lse_gradient=True, mask=window(6)),
    packed_segments=Case(_, packed=LENGTHS, mask=segments),
    packed_document=Case(_, packed=LENGTHS, mask=document),
    packed_ascending=Case(_, packed=LENGTHS, mask=ascending),
    packed_dropout=Case(_, packed=LENGTHS, dropout=0.2, mask=causal, score=softcap),
    batch_70000=Case(_, batch=70_000, seqlen_q=3, seqlen_k=3, heads_q=1, heads_kv=1, mask=causal, gpu=True),
    length_4100=Case(
        _, batch=1, seqlen_q=4100, seqlen_k=4100, heads_q=4, head_dim=64, head_dim_v=64, mask=causal, gpu=True
    ),
    length_4100_alibi=Case(
        _, batch=1, seqlen_q=2050, seqlen_k=4100, head_dim=128, head_dim_v=128, mask=window(700), score=alibi, gpu=True
    ),
    packed_long=Case(
        _, packed=((1500, 1500), (0, 0), (700, 2100), (1, 900)), head_dim=128, head_dim_v=128, mask=causal, gpu=True
    ),
)
CPU_CASES = [case for case in CASES.values() if not case.gpu]
INTERPRETER_CASES = [case for case in CASES.values() if case.interpret]
