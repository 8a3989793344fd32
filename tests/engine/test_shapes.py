"""Random weights in known shapes, and decoders by name."""

from __future__ import annotations

import pytest
import torch

from tilewise.core.errors import InputError, UnsupportedError
from tilewise.engine.models.config import ModelConfig
from tilewise.engine.models.decoder import Decoder
from tilewise.engine.models.load import decoder_of
from tilewise.engine.models.shapes import SHAPES, random_decoder

PARAMETERS = {"smollm2-135m": 134_515_008, "qwen3-0.6b": 596_049_920, "llama-3-8b": 8_030_261_248}  # as published


@pytest.mark.parametrize("shape", PARAMETERS)
def test_shapes_have_as_many_parameters_as_their_models(shape: str) -> None:
    decoder = Decoder(ModelConfig.of(SHAPES[shape]), dtype=torch.bfloat16, device="meta")
    assert sum(weight.numel() for weight in decoder.named().values()) == PARAMETERS[shape]


def test_a_seed_gives_the_same_weights_each_time() -> None:
    one, same, other = (random_decoder("tiny", dtype=torch.float32, seed=seed).named() for seed in (1, 1, 2))
    assert all(torch.equal(weight, same[name]) for name, weight in one.items())
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert not any(weight.isnan().any() for weight in one.values())
    assert float(one["model.layers.0.mlp.down_proj.weight"].std()) == pytest.approx(768**-0.5, rel=0.02)
    assert bool((one["model.norm.weight"] == 1).all())


def test_decoders_are_found_by_name() -> None:
    found = decoder_of("random:tiny", dtype="bfloat16", device="cpu", seed=3)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.embedding, random_decoder("tiny", dtype=torch.bfloat16, seed=3).embedding)


def test_names_that_are_not_known_are_refused() -> None:
    with pytest.raises(InputError, match="shape: got 'big'; expected tiny, smollm2-135m"):
        decoder_of("random:big", device="cpu")
    with pytest.raises(UnsupportedError, match="dtype: got 'half'"):
        decoder_of("random:tiny", dtype="half", device="cpu")
    with pytest.raises(InputError, match="model: got 7"):
        decoder_of(7, device="cpu")  # type: ignore[arg-type]
