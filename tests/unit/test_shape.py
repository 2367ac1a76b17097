"""Families that are not counted by hand: planned where they are like one that is, refused where not."""

import pytest
from transformers import GPT2Config, GraniteConfig, OlmoeConfig

from tonnage.errors import ConfigError
from tonnage.models.shape import measured_architecture

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 2, "architectures": ["x"]}


def test_a_family_like_a_known_one_has_its_shape(tmp_path):
    GraniteConfig(**SMALL).save_pretrained(tmp_path)
    found = measured_architecture(str(tmp_path))
    attention, mlp = 64 * (64 + 32 + 32 + 64), 3 * 64 * 96
    assert (found.model_type, found.num_layers, found.vocab) == ("granite", 2, 128)
    assert found.num_parameters - found.embedding_parameters - found.head_parameters == 2 * (attention + mlp + 2 * 64) + 64


def test_a_mixture_of_experts_is_measured_too(tmp_path):
    OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2).save_pretrained(tmp_path)
    assert measured_architecture(str(tmp_path)).num_experts == 4


def test_a_family_built_otherwise_is_refused(tmp_path):
    GPT2Config(n_layer=2, n_embd=64, n_head=4).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="gpt2 is built unlike"):
        measured_architecture(str(tmp_path))
