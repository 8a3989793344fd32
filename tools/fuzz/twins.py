"""Faults put into the library on purpose, each of which must be reported: `check` runs them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

import tilewise as tw
from tilewise.adapters import fastvideo, spas_sage_attn
from tilewise.kv import PagePool
from tools.fuzz.case import FLOATS, Case, Tensors
from tools.fuzz.draw import IN_A_ROW, Draw, Name
from tools.fuzz.judge import judge
from tools.fuzz.kinds import KINDS, kind_of

TRIES = 30
Change = Callable[[list[Any], dict[str, Any]], None]


@dataclass(frozen=True)
class Twin:
    """A fault: how a case gets it, or what of the library is replaced while a case runs."""

    name: str
    kinds: tuple[str, ...]
    into: Callable[[Case], Case] = lambda case: case
    around: Callable[[], AbstractContextManager[Any]] = ExitStack


# faults of results --------------------------------------------------------------------------------------------------


def _one_element(case: Case) -> Case:
    """One number of the first result moves, by less than a result is large; of few bits by more."""
    share = 0.02 if case.rough is None else 0.5

    def library(x: Tensors) -> Tensors:
        results = case.library(x)
        name = next(iter(results))
        wrong = results[name].clone().contiguous()
        if wrong.numel():
            flat = wrong.view(-1)
            places = flat.isfinite().nonzero()
            if len(places):
                place = places[len(places) // 2, 0]
                flat[place] = flat[place] + share * (1 + flat[flat.isfinite()].abs().max())
        return results | {name: wrong}

    return replace(case, library=library)


def _no_gradient(case: Case) -> Case:
    """The first input gets none."""

    def library(x: Tensors) -> Tensors:
        first = case.leaves[:1]
        return case.library({name: y.detach() if name in first else y for name, y in x.items()})

    return replace(case, library=library)


def _half_a_gradient(case: Case) -> Case:
    """The gradient of the first result reaches the last input at half its size."""

    def library(x: Tensors) -> Tensors:
        last = case.leaves[-1:]
        return case.library({name: (y + y.detach()) / 2 if name in last else y for name, y in x.items()})

    return replace(case, library=library)


def _writes(case: Case) -> Case:
    """An input changes that should not."""

    def library(x: Tensors) -> Tensors:
        results = case.library(x)
        for name, y in x.items():
            if name not in case.changed and y.dtype in FLOATS and y.numel():
                y.detach()[(0,) * y.ndim] = 7.0
                break
        return results

    return replace(case, library=library)


def _numbers_alone(case: Case) -> Case:
    """Infinities and NaN count as numbers."""

    def library(x: Tensors) -> Tensors:
        return case.library({name: y.nan_to_num() if y.dtype in FLOATS else y for name, y in x.items()})

    return replace(case, library=library)


# faults of arguments ------------------------------------------------------------------------------------------------


def _other(place: Any, name: str, change: Change) -> Callable[[], AbstractContextManager[Any]]:
    """What has this name there is called with arguments that `change` has altered in place."""

    @contextmanager
    def around() -> Iterator[None]:
        original = getattr(place, name)

        def broken(*args: Any, **given: Any) -> Any:
            altered = list(args)
            change(altered, given)
            return original(*altered, **given)

        with patch.object(place, name, broken):
            yield

    return around


CALLERS = ("tilewise.ops.attention", "tilewise.ops.attention.selected", "tilewise.ops.attention.selected_pages")


def _calls(change: Change) -> Callable[[], AbstractContextManager[Any]]:
    """Every call of attention, whoever makes it."""

    @contextmanager
    def around() -> Iterator[None]:
        with ExitStack() as stack:
            for module in CALLERS:
                stack.enter_context(_other(import_module(module), "make_call", change)())
            yield

    return around


def _wrong_scale(args: list[Any], given: dict[str, Any]) -> None:
    scale = given.get("scale")
    given["scale"] = 1.5 * (args[0].shape[-1] ** -0.5 if scale is None else scale)


def _hidden_diagonal(args: list[Any], given: dict[str, Any]) -> None:
    hidden, mask = tw.mask(lambda b, h, i, j: i != j), given.get("mask")
    given["mask"] = hidden if mask is None else hidden & mask


def _stale_lengths(args: list[Any], given: dict[str, Any]) -> None:
    layout = given.get("layout")
    if isinstance(layout, tw.Paged):
        given["layout"] = replace(layout, seqlens_k=(layout.seqlens_k - 1).clamp(min=0))


def _wrong_page(args: list[Any], given: dict[str, Any]) -> None:
    layout = given.get("layout")
    if (
        isinstance(layout, tw.Paged)
        and isinstance(layout.block_table, torch.Tensor)
        and layout.block_table.shape[1] > 1
    ):
        table = layout.block_table.clone()
        table[:, 1] = table[:, 0]
        given["layout"] = replace(layout, block_table=table)


def _set(**values: Any) -> Change:
    return lambda args, given: given.update(values)


def _scaled_argument(place: int, factor: float) -> Change:
    def change(args: list[Any], given: dict[str, Any]) -> None:
        args[place] = args[place] * factor

    return change


def _rolled(place: int, dim: int = 0) -> Change:
    def change(args: list[Any], given: dict[str, Any]) -> None:
        args[place] = args[place].roll(1, dim)

    return change


_smoothed = _set(label_smoothing=0.05)


def _flipped_pairs(args: list[Any], given: dict[str, Any]) -> None:
    args[2] = args[2].flip(1).contiguous()


def _other_rotation(args: list[Any], given: dict[str, Any]) -> None:
    args[1] = -args[1]


def _nothing_at(place: int) -> Change:
    """None of the rows of this argument."""

    def change(args: list[Any], given: dict[str, Any]) -> None:
        args[place] = args[place][:0]

    return change


def _wider_windows(args: list[Any], given: dict[str, Any]) -> None:
    args[2] = tuple((frames + 2, *others) for frames, *others in args[2])


PAGES = (
    "paged", "shared", "encoded", "channels", "planned", "kv_cache", "selected_pages", "selected_tokens", "flash_cache",
    "flashinfer_paged",
)  # fmt: skip
ATTENTION = (
    "dense", "packed", "selected", "codes", "infinite", "compiled", "sdpa", "flash", "flex",
    "flashinfer_ragged", "sage", "transformers", "sliding_tiles", "video_blocks", "sparge", *PAGES,
)  # fmt: skip
BACKWARD = (
    "dense", "packed", "selected", "codes_gradients", "norm", "softmax", "glu", "rope", "cross_entropy",
    "linear_cross_entropy", "merge", "sdpa", "flash", "flex", "transformers", "sliding_tiles", "video_blocks",
)  # fmt: skip
UNTOUCHED = ("copy_pages", "codes_gradients")  # without inputs that may be written, or none before a backward reads it
GIVEN_TILES = "block_sparse_sage2_attn_cuda"
ON_PAGES = import_module("tilewise.ops.attention.selected_pages")
TWINS = (
    Twin("one wrong element", tuple(KINDS), into=_one_element),
    Twin("an input is written", tuple(kind for kind in KINDS if kind not in UNTOUCHED), into=_writes),
    Twin("a dropped gradient", BACKWARD, into=_no_gradient),
    Twin("half a gradient", BACKWARD, into=_half_a_gradient),
    Twin("a wrong scale", ATTENTION, around=_calls(_wrong_scale)),
    Twin("a mask without its diagonal", ATTENTION, around=_calls(_hidden_diagonal)),
    Twin("a stale length", PAGES, around=_calls(_stale_lengths)),
    Twin("a page read twice", ("paged", "shared", "encoded", "channels", "planned"), around=_calls(_wrong_page)),
    Twin("a wrong eps", ("norm",), around=_other(tw, "rms_norm", _set(eps=0.3))),
    Twin("no offset", ("norm",), around=_other(tw, "layer_norm", _set(offset=0.01))),
    Twin("a wrong temperature", ("softmax",), around=_other(tw, "softmax", _set(temperature=1.1))),
    Twin("a shifted logarithm", ("softmax",), around=_other(tw, "log_softmax", _scaled_argument(0, 1.1))),
    Twin("another gate", ("glu",), around=_other(tw, "swiglu", _scaled_argument(0, 1.02))),
    Twin("angles the other way", ("rope", "kv_write"), around=_other(tw, "Rope", _other_rotation)),
    Twin("targets of neighbours", ("cross_entropy",), around=_other(tw, "cross_entropy", _rolled(1))),
    Twin("some smoothing", ("linear_cross_entropy",), around=_other(tw, "linear_cross_entropy", _smoothed)),
    Twin("states of neighbours", ("merge",), around=_other(tw, "merge_states", _rolled(1, -1))),
    Twin("slots of neighbours", ("kv_write",), around=_other(tw, "kv_write", _rolled(4))),
    Twin("copies the other way", ("copy_pages",), around=_other(tw, "copy_pages", _flipped_pairs)),
    Twin("keys written elsewhere", ("flash_cache",), around=_other(tw, "kv_write", _rolled(4))),
    Twin("pages that stay shared", ("kv_cache",), around=_other(PagePool, "copy", _nothing_at(1))),
    Twin("open pages without their keys", ("kv_cache",), around=_other(PagePool, "open", _nothing_at(1))),
    Twin("the worst pages", ("selected_pages",), around=_other(ON_PAGES, "PageChoice", _scaled_argument(0, -1.0))),
    Twin("scores of other dimensions", ("selected_tokens",), around=_other(ON_PAGES, "Prediction", _rolled(2, 2))),
    Twin("infinities are numbers", ("infinite",), into=_numbers_alone),
    Twin("another softcap", ("transformers",), around=_other(tw, "softcap", _scaled_argument(0, 1.3))),
    Twin("wider windows", ("sliding_tiles",), around=_other(fastvideo, "_mask", _wider_windows)),
    Twin("blocks of neighbours", ("video_blocks",), around=_other(fastvideo, "block_sparse_attn", _rolled(3, -1))),
    Twin("tiles of neighbours", ("sparge",), around=_other(spas_sage_attn, GIVEN_TILES, _rolled(3, -1))),
)  # fmt: skip


def of_kind(kind: str, number: int, device: str) -> Callable[[], Case]:
    """Builds the case of this kind and number, for the check."""
    draw = Draw(Name(f"twins {kind}", 0, number * IN_A_ROW), device, small=True)
    kind_of(draw)
    return lambda: KINDS[kind][1](draw)


def is_found(twin: Twin, kind: str, device: str = "cpu") -> bool:
    """Whether some case that is right without the fault is reported with it, by its numbers."""
    for number in range(TRIES):
        with twin.around():
            broken = judge(lambda n=number: twin.into(of_kind(kind, n, device)()))  # type: ignore[misc]
        if broken.verdict != "failed" or broken.text.startswith("raised"):
            continue
        if judge(of_kind(kind, number, device)).verdict == "ok":
            return True
    return False


def check(device: str = "cpu", kinds: tuple[str, ...] = tuple(KINDS)) -> list[str]:
    """The faults that nothing noticed."""
    pairs = [(twin, kind) for twin in TWINS for kind in twin.kinds if kind in kinds]
    return [f"{twin.name} in {kind}" for twin, kind in pairs if not is_found(twin, kind, device)]
