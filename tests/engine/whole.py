"""What holds between any two steps of an engine, and what is left when all requests have ended."""

from __future__ import annotations

from collections.abc import Callable

import torch

import tilewise as tw
from tilewise.engine import Engine
from tilewise.engine.models.decoder import Attend, Decoder, Norms
from tilewise.engine.request import Sample, State

_RELATIVE = 1e-5  # of the largest magnitude: sums in float32 are taken in another order


def check_whole(engine: Engine) -> None:
    """Bookkeeping of scheduler, pages and device agrees."""
    assert engine.pages.violations() == []
    scheduler, samples = engine.scheduler, samples_of(engine)
    running, waiting = ([each for each in samples if each.state is state] for state in (State.RUNNING, State.WAITING))
    assert set(scheduler.running) == set(running)
    assert scheduler.num_waiting == len(waiting)
    queued = [each for _, each in scheduler._waiting if each.state is State.WAITING]
    assert len(queued) == len(set(queued))
    assert set(queued) == set(waiting)
    slots = [each.slot for each in running]
    assert sorted([*slots, *scheduler._slots]) == list(range(engine.config.max_running))
    parts = [part for each in running if each.sequence is not None for part in each.sequence.parts]
    assert set(engine.pages.allocator.sequences) == set(parts)
    for each in samples:
        assert (each.sequence is None) == (each.slot < 0) == (each.state is not State.RUNNING)
        assert (each.finish_reason is None) == (each.state is not State.FINISHED)
    for each in running:
        assert each.sequence is not None
        assert each.sequence.length == each.computed <= each.launched <= each.most
        assert each.seated <= each.turn
        if each.seated == each.turn:  # else the next step sends its tokens
            assert engine.runner._tokens[each.slot, : len(each.tokens)].tolist() == each.tokens


def check_empty(engine: Engine) -> None:
    """Nothing is left of any request, but what the prefix cache knows, which is right."""
    assert not engine.has_unfinished
    assert not engine._under_way
    check_whole(engine)
    allocator = engine.pages.allocator
    assert allocator.sequences == ()
    assert allocator.num_used == 0
    assert allocator.num_free + allocator.num_cached == allocator.num_pages
    assert sorted(engine.scheduler._slots) == list(range(engine.config.max_running))
    check_prefixes(engine)


def check_pages(engine: Engine, sample: Sample) -> None:
    """Keys and values of a running sample are those of a prompt that has its tokens."""
    assert sample.sequence is not None
    known = sample.tokens[: sample.computed]
    for number, part in enumerate(sample.sequence.parts):
        full = {index: page for index, page in enumerate(part.pages) if index >= part.dropped}
        _compare(engine, known, number, full)


def check_prefixes(engine: Engine) -> None:
    """Keys and values of all pages that the prefix cache knows are those of the tokens that it knows them by."""
    prefixes = engine.pages._prefixes
    for last in [] if prefixes is None else prefixes._by_key.values():
        if last.children:
            continue
        chain, entry = [], last
        while entry is not None:
            chain.insert(0, entry)
            entry = entry.parent
        tokens = [token for each in chain for token in each.tokens]
        _compare(engine, tokens, last.extra, {n: each.page for n, each in enumerate(chain) if each.page is not None})


def samples_of(engine: Engine) -> list[Sample]:
    """Those of all requests that have not ended, or whose end nobody was told."""
    return [sample for request in engine._requests.values() for sample in request.samples]


def _compare(engine: Engine, tokens: list[int], number: int, pages: dict[int, int]) -> None:
    """Compare pages of a group of layers, by their index in a sequence, with keys and values computed at once."""
    size, group = engine.pages.page_size, engine.pages.groups[number]
    wanted = _computed(engine, tokens)
    for place, layer in enumerate(group.layers):
        for memory, want in zip(engine.pages.pool.pages(place), wanted[layer], strict=True):
            assert isinstance(memory, torch.Tensor)
            for index, page in pages.items():
                own = want[index * size : (index + 1) * size]
                error = (memory[page, : len(own)] - own).abs().max() if len(own) else torch.zeros(())
                assert error <= _RELATIVE * want.abs().max(), f"layer {layer}, page {index} of {tokens}"


def attend_of(
    decoder: Decoder,
    length: int,
    kept: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    stored: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Attend:
    """Attention of one whole sequence without pages; rotated keys, and values, of each layer go to `kept`, and are read
    as `stored` gives them.
    """
    config = decoder.config
    rope = tw.Rope(*decoder.rope_tables(length), torch.arange(length))

    def attend(layer: int, qkv: torch.Tensor, norms: Norms) -> torch.Tensor:
        q, k, v = torch.split(qkv, [config.num_heads, config.num_heads_kv, config.num_heads_kv], 1)
        if norms[0] is not None:
            q, k = (tw.rms_norm(x, weight, eps=config.norm_eps) for x, weight in zip((q, k), norms, strict=True))
        q, k = (tw.rope(x, rope=rope) for x in (q, k))
        if kept is not None:
            kept.append((k, v.clone()))
        if stored is not None:
            k, v = stored(k), stored(v)
        window = config.windows[layer]
        mask = tw.causal if window is None else tw.window(window)
        return tw.attention(q[None], k[None], v[None], mask=mask)[0]

    return attend


@torch.no_grad()
def _computed(engine: Engine, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys, rotated, and values of each layer."""
    decoder = engine.decoder
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    if tokens:
        decoder.hidden(torch.tensor(tokens), attend_of(decoder, len(tokens), found))
    return found or [(torch.zeros(0), torch.zeros(0))] * decoder.config.num_layers
