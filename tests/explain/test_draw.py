"""Pictures: right contents, the same bytes every time, clear errors, and the committed ones up to date."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import matplotlib
import numpy as np
import pytest

from tilewise.core.errors import InputError, MissingExtraError
from tilewise.explain import draw, ladder, roofline, timeline
from tilewise.formula import library
from tilewise.kv.allocator import PageAllocator
from tilewise.schedule.sharing import Group
from tilewise.schedule.worklist import WorkList

ROOT = Path(__file__).resolve().parents[2]


def causal_panel(size: int = 10, block: int = 4) -> draw.Panel:
    visible = np.tri(size, dtype=bool)
    return draw.Panel("causal", visible, draw.classify(visible, block, block))


def painted(axes, colour: str) -> float:
    """Area painted in `colour` by the masks' patches, in pairs (query, key)."""
    patches = [p for p in axes.patches if matplotlib.colors.to_hex(p.get_facecolor()) == colour and hasattr(p, "_path")]
    boxes = [patch.get_path().vertices.reshape(-1, 5, 2) for patch in patches]
    return sum(float(np.prod(box.max(axis=1) - box.min(axis=1), axis=1).sum()) for box in boxes)


def test_classify_by_definition() -> None:
    visible = np.random.default_rng(0).random((13, 9)) < 0.5
    visible[:4, :3], visible[4:8, 3:6] = True, False
    classes = draw.classify(visible, 4, 3)
    assert classes.shape == (4, 3)
    assert classes.dtype == np.int8
    assert (classes[0, 0], classes[1, 1]) == (draw.FULL, draw.EMPTY)
    with pytest.raises(InputError, match="visible"):
        draw.classify(np.ones(3), 1, 1)


def test_tiles_paints_every_pair_once() -> None:
    from tilewise.explain.draw import style

    panel = causal_panel()
    axes = draw.tiles([panel], 4, 4).axes[0]
    full = sum(
        panel.visible[4 * m : 4 * m + 4, 4 * n : 4 * n + 4].size for m, n in np.argwhere(panel.classes == draw.FULL)
    )
    assert painted(axes, style.FULL) == full
    assert painted(axes, style.PARTIAL) == panel.visible.sum() - full
    assert painted(axes, style.FULL) + painted(axes, style.PARTIAL_PALE) + painted(axes, style.EMPTY) == 100
    assert axes.get_xlabel() == "keys\nvisits 6 of 9 tiles, masks 3"


def test_query_numbers_the_visited_tiles() -> None:
    figure = draw.query(causal_panel(), 4, 4, 6)
    assert [text.get_text() for text in figure.axes[0].texts if text.get_text().isdigit()] == ["1", "2"]
    assert figure.axes[0].get_xlabel() == "its tile loads 2 of 3 key tiles; the query sees 7 keys"
    with pytest.raises(InputError, match="position"):
        draw.query(causal_panel(), 4, 4, 10)


def test_panel_of_a_formula() -> None:
    panel = draw.panel(library.window(3), seqlen_q=5, seqlen_k=8, block_m=2, block_n=2)
    i, j = np.arange(3, 8)[:, None], np.arange(8)
    np.testing.assert_array_equal(panel.visible, (j <= i) & (j > i - 3))
    np.testing.assert_array_equal(panel.classes, draw.classify(panel.visible, 2, 2))
    assert draw.mask(library.causal, seqlen_q=8, seqlen_k=8, block_m=4, block_n=4).axes[0].get_title(loc="left")
    with pytest.raises(InputError, match="seqlen"):
        draw.panel(library.causal, seqlen_q=5000, seqlen_k=8, block_m=2, block_n=2)


def test_roofline_points_lie_under_the_roof() -> None:
    point = roofline.estimate(roofline.Problem.decode(4096, num_heads_q=8, num_heads_kv=2), "H200")
    axes = draw.roofline({"decode": point}, measured={"decode": 2 * point.floor_seconds}).axes[0]
    dots = [line.get_xydata()[0] for line in axes.lines if line.get_marker() in ("o", "D")]
    assert dots[0] == pytest.approx([point.intensity, point.attainable / 1e12])
    assert dots[1] == pytest.approx([point.intensity, point.attainable / 2e12])
    other = roofline.estimate(roofline.Problem(64), "A100")
    with pytest.raises(InputError, match="one GPU"):
        draw.roofline({"a": point, "b": other})


def test_weights_outline_what_is_taken_and_say_how_much_it_holds() -> None:
    from tilewise.explain.draw import style

    held, taken = np.array([[0.75, 0.25], [0.0005, 0.9995]]), np.array([[True, False], [False, True]])
    axes = draw.weights({"one": (held, taken)}).axes[0]
    tiles, outlines = axes.collections[:4], axes.collections[4:]
    assert [matplotlib.colors.to_hex(outline.get_edgecolor()[0]) for outline in outlines] == [style.PARTIAL] * 2
    corners = [outline.get_paths()[0].vertices.min(0) for outline in outlines]
    np.testing.assert_allclose(corners, [[0.08, 0.08], [1.08, 1.08]])
    shades = [matplotlib.colors.to_hex(tile.get_facecolor()[0]) for tile in tiles]
    assert shades[0] == shades[3] == style.FULL
    assert shades[2] == style.PAPER != shades[1] != shades[0]
    assert axes.get_xlabel().endswith("50% of the tiles hold 87% of the weights")
    for wrong in ({}, {"one": (held, taken[:1])}):
        with pytest.raises(InputError):
            draw.weights(wrong)


def test_timeline_draws_every_span() -> None:
    trip = timeline.Trip.of(128, 128)
    figure = draw.timeline(trip, ["overlapped", "in turns"], tiles=3)
    for axes, schedule in zip(figure.axes, ("overlapped", "in turns"), strict=True):
        drawn = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches if bar.get_width())
        spans = sorted((span.begin, span.end) for span in timeline.simulate(trip, 3, schedule))
        np.testing.assert_allclose(drawn, spans)
    assert figure.axes[1].get_title(loc="left") == "in turns: 2,048 clocks a tile, products in 100% of them"
    with pytest.raises(InputError, match="schedules"):
        draw.timeline(trip, [])


def test_shares_have_a_bar_for_every_row_of_tiles() -> None:
    work = WorkList.build([1, 1, 1], [100, 900, 300], heads_q=4, heads_kv=2, programs=5)
    axes = draw.shares(work).axes[0]
    drawn = [(bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert sum(width for *_, width in drawn) == work.work
    for program in range(5):
        assert sum(width for y, _, width in drawn if y == program) == np.diff(work.starts)[program]
    with pytest.raises(InputError, match="programs"):
        draw.shares(WorkList.build([1], [9], heads_q=1, heads_kv=1, programs=161))


def test_the_legend_of_shares_names_requests_pale_bars_and_the_line() -> None:
    def legend(**more: object) -> list[str]:
        work = WorkList.build([1] * 8, [900] * 8, heads_q=4, heads_kv=2, programs=5, **more)  # type: ignore[arg-type]
        (found,) = draw.shares(work).legends
        return [text.get_text() for text in found.get_texts()]

    plain, shared = legend(), legend(groups=[Group(0, 8, 12)], together=2)
    assert plain == [*(f"request {n}" for n in range(5)), "request 5, …", "pale: part of a row, merged"]
    assert shared == [*plain, "end of shared prefixes"]


def test_shares_of_prefixes_come_first() -> None:
    work = WorkList.build([1] * 3, [900] * 3, heads_q=4, heads_kv=2, programs=5, groups=[Group(0, 3, 12)], together=2)
    assert work.prefixes is not None
    bars = [(bar.get_x(), bar.get_width(), bar.get_alpha()) for bar in draw.shares(work).axes[0].patches]
    before = [(x, width, alpha) for x, width, alpha in bars if x < max(np.diff(work.prefixes.starts))]
    assert sum(width for _, width, _ in before) == work.prefixes.work == 2 * 2 * 12
    assert sum(width for _, width, _ in bars) == work.prefixes.work + work.work
    assert {alpha for *_, alpha in bars} == {0.45}, "all are merged"


def test_pages_are_numbered_filled_and_coloured_by_who_shares_them() -> None:
    allocator = PageAllocator(num_pages=6, page_size=4)
    prompt = allocator.create()
    allocator.append(prompt, 6)
    (fork,) = allocator.fork(prompt)
    allocator.append(fork, 1)  # a copy of the second page
    axes = draw.pages(allocator, ["prompt", "fork"]).axes[0]
    texts = {(round(t.get_position()[0]), t.get_position()[1]): t.get_text() for t in axes.texts}
    assert [texts[x, y] for y in (0, 1) for x in (0, 1)] == [str(p) for s in (prompt, fork) for p in s.pages]
    assert [texts[x, 2.5] for x in range(6)] == [str(page) for page in range(6)]
    filled = {(round(b.get_x() + 0.45), round(b.get_y() + 0.4, 1)): b for b in axes.patches if b.get_facecolor()[3]}
    assert {at: round(bar.get_width() / 0.9, 2) for at, bar in filled.items() if at[1] < 2} == {
        (0, 0): 1.0, (1, 0): 0.5, (0, 1): 1.0, (1, 1): 0.75,
    }  # fmt: skip
    first, second = (filled[x, 0].get_facecolor() for x in (0, 1))
    assert filled[0, 1].get_facecolor() == filled[0, 2.5].get_facecolor() == first != second
    assert axes.get_title(loc="left") == "3 pages used, 1 of them shared, 0 cached, 3 free"
    with pytest.raises(InputError, match="names"):
        draw.pages(allocator, ["prompt"])
    with pytest.raises(InputError, match="pages"):
        draw.pages(PageAllocator(num_pages=41, page_size=1))


def test_errors_have_a_line_for_each_series_in_each_panel() -> None:
    panels = {"a": {"int8": {"block": 0.1, "token": 0.01}, "fp8": {"block": 0.3}}, "b": {"int8": {"block": 1.0}}}
    figure = draw.errors(panels, xlabel="who")
    for axes, (title, series) in zip(figure.axes, panels.items(), strict=True):
        assert axes.get_title(loc="left") == title
        assert [list(line.get_ydata()) for line in axes.lines] == [list(found.values()) for found in series.values()]
        assert axes.get_yscale() == "log"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["int8", "fp8"]
    with pytest.raises(InputError, match="panels"):
        draw.errors({}, xlabel="who")


def test_lengths_are_where_they_are() -> None:
    axes = draw.lengths({"one": {128: 0.1, 512: 0.4}, "fresh": {128: 0.1}}).axes[0]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[128, 0.1], [512, 0.4]], [[128, 0.1]]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["128", "512"]
    with pytest.raises(InputError, match="series"):
        draw.lengths({})


def test_histograms_of_codes_say_how_many_are_used() -> None:
    counts = [0] * 15
    counts[7], counts[3], counts[0] = 9980, 19, 1
    axes = draw.codes({"one": counts, "two": counts, "three": counts}, largest=7).axes
    assert axes[0].get_title(loc="left") == "one: 2 of 15"
    (filled,) = axes[0].collections
    assert filled.get_paths()[0].vertices[:, 1].max() == pytest.approx(0.998)
    assert not axes[3].axison
    with pytest.raises(InputError, match="one"):
        draw.codes({"one": counts})


def test_codes_stand_beside_their_function() -> None:
    values, errors = draw.steps(
        [0, 1], [2.0, 4.0], {"near": [2.0, 5.0], "far": [1.0, 4.0]}, xlabel="x", ylabel="y"
    ).axes
    assert [line.get_ydata().tolist() for line in values.lines] == [[2.0, 4.0], [2.0, 5.0], [1.0, 4.0]]
    assert [line.get_ydata().tolist() for line in errors.lines[:2]] == [[0.0, 25.0], [-50.0, 0.0]]
    with pytest.raises(InputError, match="far"):
        draw.steps([0, 1], [2.0, 4.0], {"far": [1.0]}, xlabel="x", ylabel="y")
    with pytest.raises(InputError, match="found"):
        draw.steps([0, 1], [2.0, 4.0], {}, xlabel="x", ylabel="y")


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_files_are_deterministic(tmp_path: Path, suffix: str) -> None:
    first = draw.save(draw.tiles([causal_panel()], 4, 4), tmp_path / f"a.{suffix}").read_bytes()
    second = draw.save(draw.tiles([causal_panel()], 4, 4), tmp_path / f"b.{suffix}").read_bytes()
    assert first == second
    assert b"<dc:date>" not in first


def test_house_style_ignores_and_leaves_the_callers_settings(tmp_path: Path) -> None:
    expected = draw.save(draw.ladder([ladder.climb("split_kv")]), tmp_path / "a.svg").read_bytes()
    with matplotlib.rc_context({"font.size": 31, "svg.hashsalt": "other", "axes.facecolor": "red"}):
        assert draw.save(draw.ladder([ladder.climb("split_kv")]), tmp_path / "b.svg").read_bytes() == expected
        assert matplotlib.rcParams["font.size"] == 31


def test_bad_input(tmp_path: Path) -> None:
    panel = causal_panel()
    with pytest.raises(InputError, match="classes"):
        draw.tiles([panel], 5, 4)
    with pytest.raises(InputError, match="panels"):
        draw.tiles([], 4, 4)
    with pytest.raises(InputError, match="path"):
        draw.save(draw.tiles([panel], 4, 4), tmp_path / "a.jpeg")
    with pytest.raises(InputError, match="reports"):
        draw.ladder([])


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=re.escape("tilewise[draw]")):
        draw.tiles([causal_panel()], 4, 4)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_pictures", ROOT / "tools" / "draw_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_pictures_are_up_to_date(tool: ModuleType, tmp_path: Path) -> None:
    assert set(tool.DRAWN) <= {path.name for path in tool.PICTURES.iterdir()}
    for fresh in tool.write(tmp_path):
        committed = (tool.PICTURES / fresh.name).read_bytes()
        if f"Matplotlib v{matplotlib.__version__}".encode() not in committed:
            pytest.skip("the committed pictures come from another version of matplotlib")
        assert fresh.read_bytes() == committed, f"{fresh.name} is stale: run tools/draw_pictures.py"
