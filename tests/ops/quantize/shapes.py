"""Cases of `quantize_qkv` drawn by hypothesis: any scheme, lengths around blocks, packed or not."""

from __future__ import annotations

from hypothesis import strategies as st

import tilewise as tw
from tilewise.quant.schemes import SAMPLED_FROM
from tilewise.testing.quantize import QuantizeCase

SCHEMES = st.one_of(
    st.builds(
        tw.Sage,
        qk=st.sampled_from(["int8", "fp8", "int4"]),
        pv=st.sampled_from(["fp8", "fp16", "bf16"]),
        q_scale=st.sampled_from(["token", "thread", "warp", "block"]),
        k_scale=st.sampled_from(["token", "thread", "block"]),
        smooth=st.sets(st.sampled_from("qkv")).map(tuple),
        rotate=st.sampled_from(["none", "hadamard"]),
    ),
    st.builds(tw.Sage, smooth=st.sets(st.sampled_from("kv")).map(tuple), v_scale=st.just("block")),
    st.builds(
        tw.FP8,
        q_scale=st.sampled_from(["head", "block", "token"]),
        k_scale=st.sampled_from(["head", "block", "token"]),
        v_scale=st.sampled_from(["head", "block", "channel"]),
    ),
)
_LENGTH = st.one_of(st.integers(0, 3), st.sampled_from([63, 64, 65, 127, 128, 129, 200]))


@st.composite
def any_case(draw: st.DrawFn) -> QuantizeCase:
    """Of dense ones, both sequences have the same lengths."""
    lengths = draw(st.lists(st.tuples(_LENGTH, _LENGTH), max_size=3))
    dim = draw(st.sampled_from([1, 2, 4, 8]))
    packed, group, heads = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    return QuantizeCase(
        "any",
        draw(SCHEMES),
        tuple(lengths if packed else lengths[:1] * 2),
        (group * heads, heads),
        dim,
        draw(st.integers(1, 9)),
        packed=packed,
        memory=draw(st.sampled_from(["", "joint", "HND"])),
        turns=(2 * draw(st.integers(0, dim // 2)), draw(st.booleans())),
    )


# keys of which the centre is the mean of some
SAMPLED = [
    QuantizeCase("sampled", tw.Sage(smooth=("k", "v")), ((1, SAMPLED_FROM + 500),), (1, 1), 4, 4),
    QuantizeCase("sampled_exactly", tw.Sage2(), ((1, SAMPLED_FROM),), (1, 1), 4, 4),
    QuantizeCase(
        "sampled_packed",
        tw.Sage(rotate="hadamard"),
        ((1, SAMPLED_FROM - 1), (2, SAMPLED_FROM + 1)),
        (1, 1),
        4,
        4,
        packed=True,
    ),
]
