"""Which calls over pages may compute prefixes that requests share once, and what that saves and costs."""

from __future__ import annotations

from tilewise.core.dispatch import untraced
from tilewise.formula.structure import parse
from tilewise.formula.walk import symbols
from tilewise.ops.attention.configs import padded
from tilewise.ops.attention.problem import Call
from tilewise.ops.attention.variant import CAUSAL
from tilewise.schedule.sharing import saves

REQUESTS = 1024  # of a batch, that the plan sees at a time
# implementations that share: the least and the most rows of queries of a tile of theirs, and the most values of o
TILES = {"triton_paged": (16, 64, 8192), "hopper_decode": (64, 128, 16384)}
_LOOKED = 2048  # tokens: who does not save by then does not


def may_share(call: Call) -> bool:
    """Whether requests of the call may share prefixes."""
    return call.share_prefixes and unshared(call) is None


def most_rows(call: Call, name: str = "triton_paged") -> int:
    """Rows of queries of a tile, at most, of an implementation."""
    _least, most, values = TILES[name]
    return max(16, min(most, values // padded(max(call.head_dim, call.head_dim_v))))


def rows_of_shared_tile(call: Call, name: str) -> int:
    """As many as a tile may have, so that few tiles read a prefix, but no more than the batch has."""
    rows = call.batch * call.rows_q * call.group
    return min(most_rows(call, name), max(TILES[name][0], 1 << (rows - 1).bit_length()))


def requests_of_tile(call: Call, rows: int) -> int:
    """Requests whose queries fit so many rows, a power of two."""
    return 1 << (rows // (call.rows_q * call.group)).bit_length() - 1


def unshared(call: Call) -> str | None:
    """Why a paged call can share no prefix; None where it can."""
    rows = call.rows_q * call.group
    if call.packed:
        return "queries are packed"
    if not 2 <= call.batch <= REQUESTS:
        return f"there are {call.batch} requests, not 2 to {REQUESTS}"
    if 2 * rows > most_rows(call):
        return f"a request has {rows} query rows per KV head, above {most_rows(call) // 2}"
    if call.mask is not None and call.mask.text != CAUSAL:
        return "the mask is not causal"
    if call.score is not None and _looks_at_queries(call.score.text):
        return "the score formula looks at the request or the query's position"
    return None


@untraced
def _looks_at_queries(text: str) -> bool:
    return not {"b", "i"}.isdisjoint(symbols(parse(text).root))


def bytes_of(call: Call) -> tuple[int, int]:
    """(of a token's keys and values, of a request's partial results, written and read)."""
    token = sum(x.shape[-1] * x.element_size() for x in (call.k, call.v))
    if call.scales is not None:
        of_key, of_value = (scale.element_size() for scale in call.scales[:2])
        if call.keys_by_channel:  # a page's scales and least numbers
            of_key = 2 * call.head_dim * of_key // call.k.shape[1]
        token += of_key + of_value
    return call.num_heads_kv * token, 2 * call.rows_q * call.num_heads_q * (call.head_dim_v + 1) * 4


def remark(call: Call, name: str) -> str:
    """What sharing prefixes comes to in a call that an implementation runs."""
    if not call.share_prefixes:
        return ""
    if name not in TILES:
        return "; share_prefixes changes nothing here"
    reason = unshared(call)
    if reason is not None:
        return f"; shares no prefix: {reason}"
    together = requests_of_tile(call, rows_of_shared_tile(call, name))
    return (
        f"; shares prefixes of neighbours in a launch before, {together} requests to a tile, where keys saved are more "
        f"bytes than partial results: two requests {_least_tokens(call)}"
    )


def _least_tokens(call: Call) -> str:
    """From how many tokens on two requests share a prefix."""
    token, part = bytes_of(call)
    for tokens in range(1, _LOOKED):
        if saves(2, tokens, together=2, token_bytes=token, part_bytes=part):
            return f"from {tokens} tokens on"
    return "never"
