"""Arguments of `sample` and `combine_shards` that are wrong are named, before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.errors import InputError, UnsupportedError

GOOD = torch.zeros(2, 70)
INTS = torch.zeros(2, dtype=torch.int32)
WORDS = torch.zeros(2, 3, dtype=torch.int32)


def penalties(**other: Any) -> dict[str, Any]:
    given = {"history": torch.zeros(2, 5, dtype=torch.int32), "prompt_lengths": INTS, "lengths": INTS + 5}
    return {"penalties": tw.Penalties(**(given | {"presence": 0.5} | other))}


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "logits_list": ({"logits": [1.0]}, "logits", "list"),
    "logits_vector": ({"logits": GOOD[0]}, "logits", "(70,)"),
    "logits_empty": ({"logits": GOOD[:, :0]}, "logits", "(2, 0)"),
    "logits_double": ({"logits": GOOD.double()}, "logits", "torch.float64"),
    "temperature_negative": ({"temperature": -0.1}, "temperature", "-0.1"),
    "temperature_nan": ({"temperature": float("nan")}, "temperature", "nan"),
    "temperature_bool": ({"temperature": True}, "temperature", "True"),
    "temperature_row": ({"temperature": torch.tensor([1.0, -2.0])}, "temperature", "-2.0"),
    "temperature_nan_row": ({"temperature": torch.tensor([1.0, torch.nan])}, "temperature", "nan"),
    "temperature_shape": ({"temperature": torch.ones(3)}, "temperature", "(3,)"),
    "temperature_scalar": ({"temperature": torch.tensor(1.0)}, "temperature", "()"),
    "temperature_double": ({"temperature": torch.ones(2).double()}, "temperature", "float64"),
    "temperature_elsewhere": ({"temperature": torch.ones(2, device="meta")}, "temperature", "meta"),
    "top_k_float": ({"top_k": 5.0}, "top_k", "5.0"),
    "top_k_negative": ({"top_k": -1}, "top_k", "-1"),
    "top_k_row": ({"top_k": INTS - 1}, "top_k", "-1"),
    "top_k_long": ({"top_k": INTS.long()}, "top_k", "int64"),
    "top_p_large": ({"top_p": 1.5}, "top_p", "1.5"),
    "top_p_row": ({"top_p": torch.tensor([0.5, 2.0])}, "top_p", "2.0"),
    "min_p_negative": ({"min_p": -0.5}, "min_p", "-0.5"),
    "seeds_missing": ({"seeds": None}, "seeds", "None"),
    "seeds_float": ({"seeds": 1.0}, "seeds", "1.0"),
    "seeds_large": ({"seeds": 2**64}, "seeds", "18446744073709551616"),
    "seeds_int": ({"seeds": INTS}, "seeds", "int32"),
    "positions_missing": ({"positions": None}, "positions", "None"),
    "positions_float": ({"positions": torch.zeros(2)}, "positions", "float32"),
    "penalties_dict": ({"penalties": {}}, "penalties", "dict"),
    "history_long": (penalties(history=torch.zeros(2, 5).long()), "history", "int64"),
    "history_rows": (penalties(history=torch.zeros(3, 5).int(), lengths=torch.zeros(3).int(),
                               prompt_lengths=torch.zeros(3).int()), "history", "(3, 5)"),
    "lengths_far": (penalties(lengths=INTS + 6), "lengths", "6"),
    "lengths_shape": (penalties(lengths=INTS[:1]), "lengths", "(1,)"),
    "prompt_longer": (penalties(prompt_lengths=INTS + 3, lengths=INTS + 2), "prompt_lengths", "longer"),
    "request_far": (penalties(request=INTS + 2), "request", "2"),
    "request_long": (penalties(request=INTS.long()), "request", "int64"),
    "repetition_0": (penalties(repetition=0.0), "repetition", "0.0"),
    "repetition_row": (penalties(repetition=torch.tensor([1.0, 0.0])), "repetition", "0.0"),
    "presence_inf": (penalties(presence=float("inf")), "presence", "inf"),
    "frequency_text": (penalties(frequency="1"), "frequency", "'1'"),
    "bias_tensor": ({"bias": GOOD}, "bias", "Tensor"),
    "bias_tokens_long": ({"bias": (WORDS.long(), GOOD[:, :3])}, "bias tokens", "int64"),
    "bias_shapes": ({"bias": (WORDS, GOOD)}, "bias values", "(2, 70)"),
    "bias_nan": ({"bias": (WORDS, GOOD[:, :3] + torch.nan)}, "bias values", "NaN"),
    "bias_inf": ({"bias": (WORDS, GOOD[:, :3] + torch.inf)}, "bias values", "+inf"),
    "allowed_bool": ({"allowed": GOOD.bool()}, "allowed", "(2, 70)"),
    "allowed_words": ({"allowed": WORDS[:, :2]}, "allowed", "(2, 2)"),
    "mask_of_far": ({"allowed": (WORDS, INTS + 2)}, "mask_of", "2"),
    "mask_of_shape": ({"allowed": (WORDS, INTS[:1])}, "mask_of", "(1,)"),
    "first_token_negative": ({"first_token": -1}, "first_token", "-1"),
    "first_token_far": ({"first_token": 2**31}, "first_token", "2147483648"),
    "logprobs_many": ({"logprobs": 71}, "logprobs", "71"),
    "logprobs_bool": ({"logprobs": True}, "logprobs", "True"),
    "logprobs_of": ({"logprobs_of": "all"}, "logprobs_of", "'all'"),
    "impl": ({"impl": "other"}, "impl", "other"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    arguments, what, got = BAD[name]
    with pytest.raises(InputError) as caught:
        tw.sample(**({"logits": GOOD, "seeds": 1, "positions": 2} | arguments))
    assert caught.value.name == what
    assert got in str(caught.value.got)
    assert all((caught.value.expected, caught.value.hint))


def test_greedy_rows_need_neither_seeds_nor_positions() -> None:
    assert tw.sample(GOOD, temperature=0).tokens.tolist() == [0, 0]
    with pytest.raises(InputError, match="seeds"):
        tw.sample(GOOD, temperature=torch.zeros(2))


def test_shards_must_match() -> None:
    values, tokens = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    for bad in ((values[0], tokens[0]), (values.double(), tokens), (values, tokens.int()), (values, tokens[:, :2])):
        with pytest.raises(InputError):
            tw.combine_shards(*bad)


def test_kernels_need_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="an NVIDIA GPU"):
        tw.sample(GOOD, temperature=0, impl="triton")


def test_no_gradient_passes() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    assert not any(part.requires_grad for part in tw.sample(x, temperature=0, logprobs=2) if part is not None)
