"""Each method of guessing counts what its formula says; all but one, which says so, give plain decoding's tokens."""

from __future__ import annotations

import itertools
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.core.errors import InputError
from tilewise.engine.decoding.tree import TreeBuilder
from tilewise.engine.decoding.verify import walk_reference
from tilewise.explain import guesses
from tilewise.explain.guesses.table_model import Output, TableModel, chain_forwards, plain, uniforms, verify
from tilewise.explain.guesses.words import Scene, forget, spelled

FOLDER = Path(guesses.__file__).parent
CHAPTER = Path(__file__).parents[2] / "docs" / "book" / "08_guess_then_check.md"
LOSSLESS = [name for name in guesses.ORDER if guesses.method(name).LOSSLESS]
SCENES = [
    dict(zip(("words", "letters", "count", "temperature", "seed"), sizes, strict=True))
    for sizes in (
        (2, 3, 1, 1.0, 0), (2, 3, 30, 1.0, 6), (5, 4, 9, 0.5, 2), (3, 3, 7, 0.0, 1), (7, 5, 13, 1.0, 4),
        (6, 6, 10, 2.0, 5), (20, 3, 40, 1.0, 7), (8, 4, 24, 1.0, 8), (8, 4, 24, 0.0, 8),
    )
]  # fmt: skip
PROMPT = [3, 1, 2, 1, 2]


def random_model(table: int, *, temperature: float = 1.0, seed: int = 0) -> TableModel:
    """Any token may follow any state, and lead to any other one."""
    states, vocabulary = 11, 5
    random = np.random.default_rng(table)
    moves = random.integers(0, states, (states, vocabulary))
    logits = 2 * random.standard_normal((states, vocabulary))
    return TableModel(logits, moves, temperature=temperature, seed=seed)


def right_somewhere(name: str, temperature: float, seed: int) -> dict[str, Any]:
    """Options with which a method is often right in `random_model(0)`, and often wrong."""
    target, other = (random_model(table, temperature=temperature, seed=seed) for table in (0, 1))
    other.logits = target.logits + 0.5 * other.logits
    near = TableModel(other.logits, target.moves, temperature=temperature, seed=seed)
    head = {
        (state, token): int((target if (state + token) % 3 else other).moves[state, token])
        for state in range(11)
        for token in range(4)
    }
    heads = guesses.method("block_heads").ideal
    return {
        "draft_model": {"draft": near, "length": 4},
        "block_heads": {"heads": heads(near, 3)},
        "head_tree": {"heads": heads(near, 3, 2)},
        "draft_tree": {"drafts": [near, other, random_model(2)], "length": 3},
        "feature_head": {"head": head, "length": 5},
        "prompt_copy": {"longest": 3, "length": 4},
        "ngram_window": {"start": [0, 1, 2, 3, 4, 0, 1], "n": 4, "most": 3},
    }[name]


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_tokens_are_those_of_plain_decoding(name: str, temperature: float) -> None:
    for seed, count in ((0, 1), (1, 7), (2, 60)):
        target, checked = (random_model(0, temperature=temperature, seed=seed) for _ in range(2))
        expected = plain(target, PROMPT, count)
        options = right_somewhere(name, temperature, seed)
        assert guesses.method(name).run(checked, PROMPT, count, **options) == expected
        assert target.forwards == target.rows == count
        assert checked.forwards <= count
    assert checked.forwards < count, "no guess was ever right: this tests nothing"


class Drifting(TableModel):
    """A broken twin: its noise belongs to the forward, as that of a generator would, and not to the position."""

    def choose(self, state: int, position: int) -> int:
        return super().choose(state, position + self.forwards)


@pytest.mark.parametrize("name", LOSSLESS)
def test_noise_that_does_not_belong_to_a_position_is_detected(name: str) -> None:
    model = random_model(0, temperature=1.5, seed=2)
    target, checked = (Drifting(model.logits, model.moves, temperature=1.5, seed=2) for _ in range(2))
    found = guesses.method(name).run(checked, PROMPT, 60, **right_somewhere(name, 1.5, 2))
    assert found != plain(target, PROMPT, 60)


def test_all_but_one_are_lossless() -> None:
    assert [name for name in guesses.ORDER if name not in LOSSLESS] == ["skeleton"]


@pytest.mark.parametrize("name", guesses.ORDER)
@pytest.mark.parametrize("sizes", SCENES, ids=str)
def test_forwards_are_those_of_the_closed_form(name: str, sizes: dict[str, Any]) -> None:
    report = guesses.play(name, **sizes)
    assert report.forwards == report.predicted
    assert report.tokens == sizes["count"] * sizes["letters"]
    assert report.same or name == "skeleton"
    assert report.ok
    assert "WRONG" not in guesses.as_text([report])


def test_a_wrong_count_and_wrong_tokens_are_shown() -> None:
    report = guesses.play("draft_tree", count=3)
    for changes in ({"forwards": report.forwards + 1}, {"same": False}):
        wrong = guesses.Report(**{**vars(report), **changes})
        assert not wrong.ok
        assert "WRONG" in guesses.as_text([wrong])
    assert guesses.Report(**{**vars(report), "same": False, "lossless": False}).ok


class Scripted(TableModel):
    """A draft that knows a text, and is wrong at some of its places."""

    def __init__(self, text: Sequence[int], right: Sequence[bool], start: int) -> None:
        super().__init__(np.zeros((1, 1)), np.zeros((1, 1), dtype=np.int64))
        self.text, self.right, self.start = text, right, start

    def forward(self, texts: Sequence[Sequence[int]]) -> list[Any]:
        (text,) = texts
        place = len(text) - self.start
        token = self.text[place] if place < len(self.text) else 0
        return [Output(token if place < len(self.right) and self.right[place] else (token + 1) % 5, 0)]


@pytest.mark.parametrize(("every", "length", "count"), [(1, 3, 10), (4, 3, 40), (5, 2, 33), (7, 6, 7), (9, 20, 50)])
def test_a_draft_that_is_wrong_at_every_kth_place(every: int, length: int, count: int) -> None:
    draft_model, target = guesses.method("draft_model"), random_model(0)
    text = plain(target, PROMPT, count)
    right = [(n + 1) % every > 0 for n in range(count)]
    target.forwards = 0
    found = draft_model.run(target, PROMPT, count, draft=Scripted(text, right, len(PROMPT)), length=length)
    full, rest = divmod(count, every)
    assert found == text
    assert target.forwards == full * -(-every // (length + 1)) + -(-rest // (length + 1))
    assert target.forwards == draft_model.closed_form(right, length)


@pytest.mark.parametrize(("a", "length"), [(0.8, 3), (0.5, 5), (0.0, 2), (1.0, 4)])
def test_the_expected_tokens_of_a_forward(a: float, length: int) -> None:
    """By all patterns of right and wrong guesses, each with its probability."""
    text, total = plain(random_model(0), PROMPT, length + 1), 0.0
    for pattern in itertools.product([True, False], repeat=length):
        guess = [token if ok else (token + 1) % 5 for token, ok in zip(text, pattern, strict=False)]
        total += np.prod([a if ok else 1 - a for ok in pattern]) * len(verify(random_model(0), PROMPT, [guess]).tokens)
    assert total == pytest.approx(guesses.method("draft_model").expected(a, length), abs=1e-12)
    assert total == pytest.approx(guesses.method("head_tree").expected([a] * length), abs=1e-12)
    if a < 1:
        assert total == pytest.approx((1 - a ** (length + 1)) / (1 - a), abs=1e-12)


def test_the_expected_tokens_of_a_forward_with_heads_of_different_quality() -> None:
    rates, text, total = (0.9, 0.6, 0.3), plain(random_model(0), PROMPT, 4), 0.0
    for ranks in itertools.product(range(3), repeat=3):  # the rank of the right token in each head; heads name two
        share = np.prod([(1 - a) if rank == 2 else a / 2 for rank, a in zip(ranks, rates, strict=True)])
        heads = [[(token + 1) % 5, (token + 2) % 5] for token in text[:3]]
        for head, token, rank in zip(heads, text, ranks, strict=False):
            head[rank : rank + 1] = [token] if rank < 2 else []
        total += share * len(verify(random_model(0), PROMPT, list(itertools.product(*heads))).tokens)
    assert total == pytest.approx(guesses.method("head_tree").expected(rates), abs=1e-12)


def test_how_often_draws_with_the_same_noise_agree() -> None:
    logits = 2 * np.random.default_rng(3).standard_normal((2, 6))
    p, q = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    noise = -np.log(-np.log(np.stack([uniforms(9, n, 6) for n in range(4000)])))
    share = float(((np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)).mean())
    expected = guesses.method("draft_model").agreement(p, q)
    assert abs(share - expected) < 4 * (expected * (1 - expected) / 4000) ** 0.5
    least = 1 - np.abs(p - q).sum() / 2
    assert least / (2 - least) <= expected <= least
    assert guesses.method("draft_model").agreement(p, p) == pytest.approx(1)


def test_noise_belongs_to_seed_and_position_and_is_uniform() -> None:
    many = np.stack([uniforms(1, n, 50) for n in range(200)])
    assert (many > 0).all()
    assert (many < 1).all()
    assert abs(many.mean() - 0.5) < 4 * (1 / 12 / many.size) ** 0.5
    assert (uniforms(1, 5, 50) == many[5]).all()
    assert len({float(uniforms(seed, n, 1)[0]) for seed in range(20) for n in range(20)}) == 400


def test_draws_follow_the_probabilities() -> None:
    model = random_model(0, temperature=1.3)
    drawn = np.bincount([model.choose(4, n) for n in range(3000)], minlength=5) / 3000
    p = model.probabilities[4]
    assert (np.abs(drawn - p) < 4 * (p * (1 - p) / 3000) ** 0.5 + 1e-3).all()


def test_equal_beginnings_share_rows_and_a_forward_is_one() -> None:
    target = random_model(0)
    text = plain(target, PROMPT, 4)
    target.forwards = target.rows = 0
    wrong = (text[2] + 1) % 5
    found = verify(target, PROMPT, [[*text[:2], wrong], text[:3], [], text[:1]], [[1, 2], [3]])
    assert (found.tokens, target.forwards, target.rows) == (text, 1, 1 + 4 + 2)
    assert found.state == target.state([*PROMPT, *text[:3]])
    assert found.beside == [random_model(0).forward([each])[0].token for each in ([1, 2], [3])]


def test_the_engine_accepts_the_same_guesses() -> None:
    random, longest = np.random.default_rng(0), 0
    for _ in range(40):
        target, tree = random_model(0), TreeBuilder(PROMPT[-1])
        right = plain(target, PROMPT, 4)
        guess = [[token if random.random() < 0.7 else int(random.integers(5)) for token in right] for _ in range(3)]
        chosen = [target.forward([PROMPT])[0].token]
        for each in guess:
            node = 0
            for n, token in enumerate(each, 1):
                node = tree.add(node, token)
                chosen += [target.forward([[*PROMPT, *each[:n]]])[0].token] * (len(tree) - len(chosen))
        found = verify(target, PROMPT, guess)
        assert target.rows - target.forwards + 1 == len(tree)
        assert walk_reference(tree.tree(), chosen)[1] == found.tokens
        longest = max(longest, len(found.tokens))
    assert longest == 5


def test_several_drafts_reach_as_far_as_the_best_one() -> None:
    scene, module = Scene(count=30), guesses.method("draft_tree")
    knows = [forget(scene.target(), (w for w in range(8) if w not in own), 4) for own in ({0, 1, 2}, {2, 3, 4, 5})]
    forwards = []
    for drafts in (knows[:1], knows[1:], knows):
        target = scene.target()
        assert module.run(target, scene.prompt, scene.tokens, drafts=drafts, length=3) == scene.answer
        forwards.append(target.forwards)
    assert forwards[2] < min(forwards[:2])


def test_a_tree_of_heads_with_one_token_each_is_a_block() -> None:
    scene = Scene()
    reports = []
    for name in ("block_heads", "head_tree"):
        target, module = scene.target(), guesses.method(name)
        heads = guesses.method("block_heads").ideal(target, 3)
        reports.append((module.run(target, scene.prompt, scene.tokens, heads=heads), target.forwards, target.rows))
    assert reports[0] == reports[1]


def test_a_head_that_knows_everything_fills_every_chain() -> None:
    scene = Scene(count=20)
    target = scene.target()
    head = {(state, token): int(to) for (state, token), to in np.ndenumerate(target.moves)}
    guesses.method("feature_head").run(target, scene.prompt, scene.tokens, head=head, length=7)
    assert target.forwards == 1 + -(-(scene.tokens - 1) // 8)


def test_a_window_makes_what_a_copy_does_not_find() -> None:
    """A prompt with all letters, in another order than words have them."""
    scene = Scene(words=6, letters=4, count=6)
    prompt = [*reversed(range(24)), 0]
    answer = plain(scene.target(), prompt, scene.tokens)
    copied, ahead = scene.target(), scene.target()
    assert guesses.method("prompt_copy").run(copied, prompt, 24, longest=2, length=3) == answer
    options = guesses.method("ngram_window").example(scene)[0]
    assert guesses.method("ngram_window").run(ahead, prompt, 24, **options) == answer
    assert ahead.forwards == 6 + 4 - 1 < copied.forwards
    assert ahead.rows >= 24 * 3  # a window of seven columns and three levels


def test_a_skeleton_writes_another_text_of_whole_words() -> None:
    scene, module = Scene(count=12), guesses.method("skeleton")
    options = module.example(scene)[0]
    answer = module.run(scene.target(), scene.prompt, scene.tokens, **options)
    words = [answer[n : n + 4] for n in range(0, 48, 4)]
    assert all(word == [*range(word[0], word[0] + 4)] and word[0] % 4 == 0 for word in words)
    assert [word[0] // 4 for word in words] != scene.firsts


def test_the_model_of_the_scene_writes_words() -> None:
    scene = Scene(words=5, letters=3, count=50)
    text = [*scene.prompt, *scene.answer]
    assert {0, 1, 2} <= {*text} <= {*range(15)}
    assert all(after == letter + 1 for letter, after in itertools.pairwise(text) if letter % 3 < 2)
    assert all(after % 3 == 0 for letter, after in itertools.pairwise(text) if letter % 3 == 2)
    assert [word * 3 for word in scene.firsts] == [
        letter for letter in text[len(scene.prompt) - 1 :] if letter % 3 == 0
    ][:50]
    follow = [spelled(5, 3, table=table).probabilities[2] for table in range(2)]
    assert all(row.sum() == pytest.approx(1) for row in follow)
    assert np.abs(follow[0] - follow[1]).max() > 0.01


@pytest.mark.parametrize("name", guesses.ORDER)
def test_a_method_is_short(name: str) -> None:
    assert len(Path(guesses.method(name).__file__).read_text().splitlines()) <= 60


def test_the_chapter_quotes_the_programs() -> None:
    """What is not run in the chapter stands in a program, but for its indentation."""
    sources = ["\n".join(line.strip() for line in path.read_text().splitlines()) for path in FOLDER.glob("*.py")]
    quoted = re.findall(r"<!-- not run -->\n```python\n(.*?)```", CHAPTER.read_text(), re.DOTALL)
    assert len(quoted) >= 8
    for block in quoted:
        text = "\n".join(line.strip() for line in block.splitlines())
        assert any(text in source for source in sources), block


def test_the_table_of_the_chapter_is_what_the_program_prints() -> None:
    assert f"```text\n{guesses.as_text([guesses.play(name) for name in guesses.ORDER])}\n```" in CHAPTER.read_text()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", ["", *guesses.ORDER])
def test_runs_as_a_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = f".{Path(guesses.method(name).__file__).stem}" if name else ""
    runpy.run_module(f"tilewise.explain.guesses{module}", run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == (2 if name else 9)
    assert "WRONG" not in printed


def test_bad_input() -> None:
    with pytest.raises(InputError, match="method"):
        guesses.method("g1_draft_model")
    for name, value in {"words": 1, "letters": 2, "count": 0, "temperature": -1.0, "seed": -1}.items():
        with pytest.raises(InputError, match=name):
            guesses.play("prompt_copy", **{name: value})
    with pytest.raises(InputError, match="moves"):
        TableModel(np.zeros((2, 3)), np.zeros((3, 3), dtype=np.int64))
    with pytest.raises(InputError, match="temperature"):
        TableModel(np.zeros((2, 3)), np.zeros((2, 3), dtype=np.int64), temperature=-1.0)


def test_runs_of_right_places() -> None:
    assert chain_forwards([], 3) == 0
    assert chain_forwards([False] * 5, 3) == 5
    assert chain_forwards([True] * 8, 3) == 2
    assert chain_forwards([True] * 8, 0) == 8
