"""Cases of what stands beside attention: norms, softmax, gated units, rotation, losses, merged states."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

import tilewise as tw
from tools.fuzz import placed as places
from tools.fuzz.case import UNIT, Case, Tensors, largest
from tools.fuzz.draw import HALVES, Draw
from tools.fuzz.exact import numbers_of, turned

WIDTHS = (1, 2, 3, 7, 8, 31, 33, 64, 100, 127, 128, 129, 255, 256, 257, 512, 513, 1000)
WIDER = (2048, 4097, 8192, 16384, 20000)
ROWS = (0, 1, 2, 3, 5, 17, 64, 100)


def _width(draw: Draw) -> int:
    return draw.kernel(WIDTHS + (WIDER if draw.on_gpu else ()))


def norm(draw: Draw) -> Case:
    """rms_norm and layer_norm, with a residual, an offset and another dtype of the result."""
    dtype, width, rows = draw.dtype(), _width(draw), draw.one(ROWS)
    centred = draw.kernel((True, False))
    inputs = {"x": draw.matrix(rows, width, dtype)}
    if draw.kernel_chance(0.4):
        inputs["residual"] = draw.matrix(rows, width, dtype)
    if draw.kernel_chance(0.7):
        inputs["weight"] = draw.normal(width, dtype=draw.kernel((dtype, torch.float32 if dtype in HALVES else dtype)))
    if centred and draw.kernel_chance(0.6):
        inputs["bias"] = draw.normal(width, dtype=dtype)
    eps, offset = draw.one((1e-6, 1e-5, 0.1)), draw.one((0.0, 1.0)) if "weight" in inputs or draw.chance(0.1) else 0.0
    wide = draw.kernel_chance(0.2) and dtype in HALVES
    codes = draw.kernel(("fp8", "int8")) if not wide and draw.kernel_chance(0.2) else None
    out = torch.float32 if wide else None

    def library(x: Tensors) -> Tensors:
        given: dict[str, Any] = {
            "residual": x.get("residual"),
            "eps": eps,
            "offset": offset,
            "out_dtype": out,
            "quantize": codes,
        }
        if centred:
            found = tw.layer_norm(x["x"], x.get("weight"), x.get("bias"), **given)
        else:
            found = tw.rms_norm(x["x"], x.get("weight"), **given)
        parts = (found,) if isinstance(found, torch.Tensor) else found
        o = parts[0] if codes is None else numbers_of(parts[0], parts[1])
        return {"o": o, "s": parts[-1]} if "residual" in x else {"o": o}

    def plain(x: Tensors) -> Tensors:
        s = x["x"] + x["residual"] if "residual" in x else x["x"]
        if s.dtype == torch.float64 and "residual" in x:
            s = s + (s.to(dtype).double() - s).detach()  # the sum is rounded where it is stored
        y = s if s.dtype == torch.float64 else s.float()
        y = y - y.mean(-1, keepdim=True) if centred else y
        o = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()
        o = o * (x["weight"].to(o.dtype) + offset) if "weight" in x else o * (1 + offset) if offset else o
        o = o + x["bias"].to(o.dtype) if "bias" in x else o
        o = o if s.dtype == torch.float64 or wide else o.to(dtype)
        return {"o": o, "s": s} if "residual" in x else {"o": o}

    def floor(name: str, truth: Tensors) -> float:
        """Sums over rows, and what a row's gradient is scaled by, as large as 1 / sqrt(eps)."""
        if codes is not None and name == "o":  # half a step of a row's codes; e4m3 has three bits behind the point
            return (0.51 / 127 if codes == "int8" else 0.51 / 8) * largest(truth[name])
        if not name.startswith("d"):
            return 0.0
        by_rows = name in ("dweight", "dbias")
        return 4 * UNIT[dtype] * (1 + largest(truth[name])) * (math.sqrt(max(1, rows)) if by_rows else 1.0)

    grad = codes is None and draw.kernel_chance(0.6)
    leaves = tuple(inputs) if grad else ()
    text = (
        f"{'layer' if centred else 'rms'}_norm {rows} x {width} {dtype} {sorted(inputs)} {eps} {offset} {out} {codes}"
    )
    return Case(
        text, dtype, inputs, library, plain, leaves=leaves, into=("o", "s") if "residual" in inputs else ("o",),
        terms=max(width, rows, 1), floor=floor, repeats=draw.chance(0.3),
    )  # fmt: skip


def softmax(draw: Draw) -> Case:
    """softmax and log_softmax along any dimension."""
    dtype, width, rows = draw.dtype(), _width(draw), draw.one(ROWS)
    dim, log = draw.kernel((-1, -1, 0)), draw.kernel((True, False))
    temperature = draw.one((1.0, 1.0, 0.7, 3.0))
    x = draw.matrix(rows, width, dtype) * 3
    inputs = {"x": x if dim == -1 else x.transpose(0, 1)}
    if draw.kernel_chance(0.4):
        mask = draw.flags(0.7, rows if draw.kernel_chance(0.5) else 1, width)
        inputs["mask"] = mask if dim == -1 else mask.transpose(0, 1)

    def library(x: Tensors) -> Tensors:
        run = tw.log_softmax if log else tw.softmax
        return {"o": run(x["x"], dim, mask=x.get("mask"), temperature=temperature)}

    def plain(x: Tensors) -> Tensors:
        s = x["x"] / temperature
        s = torch.where(x["mask"], s, -torch.inf) if "mask" in x else s
        empty = (s == -torch.inf).all(dim, keepdim=True)
        s = torch.where(empty, 0.0, s)
        if not log:
            return {"o": torch.where(empty, 0.0, torch.softmax(s, dim))}
        o = torch.log_softmax(s, dim)
        return {"o": torch.where(empty | (s == -torch.inf), -torch.inf, o)}

    grad = draw.kernel_chance(0.6)

    def floor(name: str, truth: Tensors) -> float:
        """The gradient is of o as it is stored: the sum over a row of what comes in is off by its rounding."""
        return 8 * UNIT[dtype] * math.sqrt(width) / temperature if name == "dx" else 0.0

    text = (
        f"{'log_' if log else ''}softmax {tuple(inputs['x'].shape)} along {dim} {dtype} {sorted(inputs)} {temperature}"
    )
    leaves = ("x",) if grad else ()
    return Case(text, dtype, inputs, library, plain, leaves=leaves, into=("o",), terms=width, floor=floor)


def glu(draw: Draw) -> Case:
    """swiglu, geglu and reglu, of two tensors or of one."""
    dtype, width, rows = draw.dtype(), _width(draw), draw.one(ROWS)
    kind, joined = draw.kernel(("silu", "gelu", "tanh", "relu")), draw.kernel((True, False))
    if joined:
        inputs = {"gate": draw.matrix(rows, 2 * width, dtype)}
    else:
        inputs = {name: draw.matrix(rows, width, dtype) for name in ("gate", "up")}

    def library(x: Tensors) -> Tensors:
        given = (x["gate"], x.get("up"))
        if kind in ("gelu", "tanh"):
            return {"o": tw.geglu(*given, approximate="none" if kind == "gelu" else "tanh")}
        return {"o": tw.swiglu(*given) if kind == "silu" else tw.reglu(*given)}

    def plain(x: Tensors) -> Tensors:
        gate, up = x["gate"].chunk(2, -1) if joined else (x["gate"], x["up"])
        if kind == "silu":
            gate = functional.silu(gate)
        elif kind == "relu":
            gate = functional.relu(gate)
        else:
            gate = functional.gelu(gate, approximate="none" if kind == "gelu" else "tanh")
        return {"o": gate * up}

    leaves = tuple(inputs) if draw.kernel_chance(0.7) else ()
    text = f"glu {kind} {rows} x {width} {dtype} {'joined' if joined else 'apart'}"
    return Case(text, dtype, inputs, library, plain, leaves=leaves, into=("o",), repeats=draw.chance(0.3))


def rope(draw: Draw) -> Case:
    """Queries and keys turned, into new tensors, in place, or out of one tensor with values."""
    dtype, sizes = draw.dtype(), places.heads(draw, same=True)
    dim = max(2, sizes.dim // 2 * 2)
    how = draw.kernel(("new", "new", "in place", "joined"))
    batch, rows = draw.one((1, 2, 3)), draw.length() if draw.chance(0.95) else 0
    lead, tokens = ((batch, rows), batch * rows) if draw.kernel_chance(0.6) else ((rows,), rows)
    pairs = draw.kernel((dim // 2, max(1, dim // 4)))
    angles = draw.normal(60, pairs, factor=2.0)
    inputs = {"cos": angles.cos(), "sin": angles.sin(), "positions": draw.integers(60, tokens)}
    memory = draw.kernel(("plain", "heads first", "padded"))
    counts = {"qkv": sizes.q + 2 * sizes.kv} if how == "joined" else {"q": sizes.q, "k": sizes.kv}
    made = {name: draw.rows((*lead, n, dim), dtype, memory) for name, n in counts.items()}
    interleaved = draw.kernel((True, False))

    def library(x: Tensors) -> Tensors:
        turning = tw.Rope(x["cos"], x["sin"], x["positions"], interleaved)
        if how == "joined":
            return dict(zip("qkv", tw.rope_qkv(x["qkv"], sizes.q, sizes.kv, rope=turning), strict=True))
        q, k = tw.rope(x["q"], x["k"], rope=turning, inplace=how == "in place")
        return {"q": q, "k": k}

    def plain(x: Tensors) -> Tensors:
        parts = (
            dict(zip("qkv", torch.split(x["qkv"], [sizes.q, sizes.kv, sizes.kv], -2), strict=True))
            if how == "joined"
            else x
        )

        def turn(y: torch.Tensor) -> torch.Tensor:
            flat = y.reshape(tokens, y.shape[-2], dim)
            return turned(flat, x["cos"], x["sin"], x["positions"], interleaved).reshape(y.shape)

        found = {"q": turn(parts["q"]), "k": turn(parts["k"])}
        return found | ({"v": parts["v"]} if how == "joined" else {})

    leaves = tuple(made) if how != "in place" and draw.kernel_chance(0.6) else ()
    into = ("q", "k", "v") if how == "joined" else ("q", "k")
    text = f"rope {how} {lead} {counts} of {dim}, {pairs} pairs {dtype} {memory} interleaved {interleaved}"
    changed = ("q", "k") if how == "in place" else ()
    return Case(text, dtype, inputs | made, library, plain, leaves=leaves, into=into, changed=changed)


def _loss(logits: torch.Tensor, target: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    kept = target != options["ignore_index"]
    lse, smooth = torch.logsumexp(wide, -1), options["label_smoothing"]
    chosen = wide.gather(-1, torch.where(kept, target, 0)[..., None])[..., 0]
    loss = lse - (1 - smooth) * chosen - smooth * wide.mean(-1) + options["z_loss"] * lse.square()
    loss = torch.where(kept, loss, 0.0)
    if options["reduction"] == "none":
        return loss
    return loss.sum() if options["reduction"] == "sum" else loss.sum() / kept.sum()


def _targets(draw: Draw, tokens: int, classes: int) -> tuple[torch.Tensor, dict[str, Any]]:
    options: dict[str, Any] = {
        "ignore_index": draw.kernel((-100, -1)),
        "label_smoothing": draw.kernel((0.0, 0.0, 0.1)),
        "z_loss": draw.kernel((0.0, 0.0, 1e-3)),
        "reduction": draw.kernel(("mean", "sum", "none")),
    }
    target = draw.integers(classes, tokens, dtype=torch.int64)
    return torch.where(draw.flags(0.2, tokens), options["ignore_index"], target), options


def cross_entropy(draw: Draw) -> Case:
    """The loss of logits."""
    dtype, tokens, classes = draw.dtype(), draw.one(ROWS), max(2, _width(draw))
    target, options = _targets(draw, tokens, classes)
    inputs = {"logits": draw.matrix(tokens, classes, dtype), "target": target}
    return Case(
        f"cross_entropy {tokens} x {classes} {dtype} {options}",
        dtype,
        inputs,
        lambda x: {"loss": tw.cross_entropy(x["logits"], x["target"], **options)},
        lambda x: {"loss": _loss(x["logits"], x["target"], options)},
        leaves=("logits",) if draw.kernel_chance(0.8) else (),
        into=("loss",),
        terms=classes * max(1, tokens),
    )


def linear_cross_entropy(draw: Draw) -> Case:
    """The loss of a linear layer's logits, which are never all there."""
    dtype, tokens, classes = draw.dtype(), draw.one(ROWS), draw.kernel((2, 3, 33, 100, 257, 1000))
    hidden, chunk, softcap = (
        draw.kernel((1, 8, 33, 64, 128)),
        draw.one((None, 1, 7, 64)),
        draw.kernel((None, None, 5.0)),
    )
    target, options = _targets(draw, tokens, classes)
    inputs = {
        "x": draw.matrix(tokens, hidden, dtype),
        "weight": draw.normal(classes, hidden, dtype=dtype, factor=hidden**-0.5),
        "target": target,
    }
    if draw.kernel_chance(0.4):
        inputs["bias"] = draw.normal(classes, dtype=dtype)

    def plain(x: Tensors) -> Tensors:
        logits = functional.linear(x["x"], x["weight"], x.get("bias"))
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        return {"loss": _loss(logits, x["target"], options)}

    def library(x: Tensors) -> Tensors:
        given: dict[str, Any] = {"bias": x.get("bias"), "softcap": softcap, "chunk": chunk, **options}
        return {"loss": tw.linear_cross_entropy(x["x"], x["weight"], x["target"], **given)}

    many = 1 if options["reduction"] == "mean" else max(1, tokens)

    def floor(name: str, truth: Tensors) -> float:
        """Logits and their gradients are rounded before they are multiplied, and sums once for each chunk."""
        reach = 3.0 * largest(inputs["x"]) if name == "dweight" else 3.0
        return 8 * UNIT[dtype] * math.sqrt(many) * reach * (1 if name != "loss" else math.sqrt(many))

    leaves = tuple(name for name in inputs if name != "target") if draw.kernel_chance(0.8) else ()
    text = f"linear_cross_entropy {tokens} x {hidden} x {classes} {dtype} chunk {chunk} softcap {softcap} {options}"
    terms = hidden * classes * max(1, tokens)
    return Case(text, dtype, inputs, library, plain, leaves=leaves, into=("loss",), terms=terms, floor=floor)


def merge(draw: Draw) -> Case:
    """States over parts of the keys joined: as tensors of their own, stacked, or ragged."""
    dtype, dim, count = draw.dtype(), draw.dim(), draw.one((1, 2, 3, 5))
    batch, rows, heads = draw.one((1, 2)), draw.one((0, 1, 3, 17, 64)), draw.kernel((1, 2, 5))
    how = draw.kernel(("apart", "stacked", "ragged"))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ends = draw.sums([draw.one((0, 1, 2, 5)) for _ in range(rows)])
    states = int(ends[-1])
    shape = (states, heads, dim) if how == "ragged" else (count, batch, rows, heads, dim)
    lse_shape = (heads, states) if how == "ragged" else (count, batch, heads, rows)
    o = draw.rows(shape, dtype, draw.kernel(("plain", "padded")))
    lse = draw.normal(*lse_shape, dtype=wide, factor=4.0)
    lse = torch.where(draw.flags(0.1, *lse_shape), -torch.inf, lse)
    inputs = {"o": o, "lse": lse} | ({"ends": ends} if how == "ragged" else {})

    def library(x: Tensors) -> Tensors:
        if how == "apart":
            found = tw.merge(*zip(x["o"].unbind(), x["lse"].unbind(), strict=True))
        else:
            found = tw.merge_states(x["o"], x["lse"], indptr=x.get("ends"))
        return {"merged": found[0], "lse": found[1]}

    def joined(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of (states, ..., rows, heads, dim) and (states, ..., heads, rows)."""
        if not len(o):
            return o.new_zeros(o.shape[1:]), lse.new_full(lse.shape[1:], -torch.inf)
        empty = (lse == -torch.inf).all(0)
        safe = torch.where(empty, 0.0, lse)
        total = torch.where(empty, -torch.inf, torch.logsumexp(safe, 0))
        weights = torch.where(empty, 0.0, torch.softmax(safe, 0)).transpose(-1, -2)[..., None]
        return (o.to(weights.dtype) * weights).sum(0).to(o.dtype), total

    def plain(x: Tensors) -> Tensors:
        if how != "ragged":
            merged, total = joined(x["o"], x["lse"])
            return {"merged": merged, "lse": total}
        found = []
        for a, b in zip(ends.tolist(), ends.tolist()[1:], strict=False):
            one, all_lse = joined(x["o"][a:b][:, None], x["lse"].t()[a:b][..., None])
            found.append((one[0], all_lse[:, 0]))
        if not found:
            return {"merged": x["o"].new_zeros(0, heads, dim), "lse": x["lse"].new_zeros(heads, 0)}
        return {"merged": torch.stack([o for o, _ in found]), "lse": torch.stack([lse for _, lse in found], -1)}

    leaves = ("o", "lse") if draw.kernel_chance(0.6) else ()

    def floor(name: str, truth: Tensors) -> float:
        """The gradient of lse is a difference of products over a head, of o as it is stored."""
        reach = 3.0 * largest(truth["merged"]) * math.sqrt(dim)
        return 4 * UNIT[dtype] * reach if name == "dlse" else 0.0

    text = f"merge {how} {tuple(shape)} {dtype}"
    into = ("merged", "lse")
    return Case(text, dtype, inputs, library, plain, leaves=leaves, into=into, terms=dim, floor=floor)
