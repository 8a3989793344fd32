"""Attention in few bits: what its implementations share, and the gradients of all of them.

A call's queries, keys and values become codes (`ops.quantize`), and a kernel multiplies these.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewise.layouts import Dense, Packed
from tilewise.ops.attention.gradient import Gradients
from tilewise.ops.attention.problem import Call, signature_of
from tilewise.ops.attention.table import choose
from tilewise.ops.attention.torch_op import run_backward, run_forward
from tilewise.ops.quantize import codes_of
from tilewise.quant.blocks import Quantized


def encoded(call: Call, impl: str | None = None) -> Quantized:
    """The codes of a call's queries, keys and values, made before or now, by an implementation of `quantize_qkv`."""
    if call.codes is not None:
        return call.codes
    assert call.scheme is not None
    layout = Dense() if call.cu_seqlens_q is None else Packed(call.cu_seqlens_q, call.cu_seqlens_k)
    with torch.no_grad():
        return codes_of(call.q, call.k, call.v, call.scheme, layout, impl=impl)


def backward(call: Call, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Gradients in the precision of the call, straight through the rounding to codes (Bengio et al., "Estimating or
    Propagating Gradients Through Stochastic Neurons", 2013): those of exact attention over the numbers that codes stand
    for, by the implementation that such a call has.

    Under a mask alone its probabilities are those that the codes had: centred keys give scores that differ by the
    queries' biases, which lse is rid of. What a formula, a sink, a gradient of lse or centred queries make of means
    no such shift describes: then these numbers have a forward of their own.
    """
    x = encoded(call)
    shifted = call.score is None and call.sink is None and dlse is None and x.q_mean is None
    q, k, v = x.whole(call.q.dtype, centred_keys=shifted)
    signature = signature_of(q, k, v, call.mask, call.score, call.packed)
    exact = replace(call, q=q, k=k, v=v, scheme=None, signature=signature)
    row = choose(exact, None)
    if not shifted:
        o, lse = run_forward(row, exact)
    elif x.q_bias is not None:
        lse = lse - call.scale * x.q_bias
    return run_backward(row, exact, o, lse, do, dlse)
