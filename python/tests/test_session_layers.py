"""How the layers of a model are found and named, and what a policy makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from session_models import Block, Chain, Gpt, gpt, hooks_on
from torch import nn

import ebbtide.torch
from ebbtide import SettingError, _stats
from ebbtide._layers import find_layers, matches
from ebbtide.torch._layers import KIND


def small() -> nn.Module:
    """A block with something inside."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Chain(Named(), Named()), Chain(Named(), Named(), Named())
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_blocks_of_a_module_list() -> None:
    assert find_layers(KIND, Gpt(3)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_encoder_and_decoder_count_and_the_linears_of_a_head_do_not() -> None:
    names = [
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.layers.0",
        "decoder.layers.1",
        "decoder.layers.2",
    ]
    assert find_layers(KIND, TwoTowers()) == names


def test_stages_are_looked_into() -> None:
    stages = nn.ModuleList([nn.Sequential(Named(), Named()), nn.Sequential(Named(), Named())])
    assert find_layers(KIND, stages) == ["0.0", "0.1", "1.0", "1.1"]


def test_plain_containers_are_layers_if_nothing_inside_is_repeated() -> None:
    assert find_layers(KIND, nn.ModuleList([small(), small()])) == ["0", "1"]


def test_a_model_that_is_a_sequential() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), Named(), Named(), nn.LayerNorm(4), nn.Linear(4, 5))
    assert find_layers(KIND, model) == ["1", "2"]


def test_linears_are_layers_if_there_is_nothing_larger() -> None:
    assert find_layers(KIND, nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == ["0", "2"]


def test_only_the_outermost_blocks_count() -> None:
    assert find_layers(KIND, nn.ModuleList([Chain(Named(), Named()), Chain(Named(), Named())])) == ["0", "1"]


def test_torch_own_encoder() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)
    assert find_layers(KIND, model) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("blocks.*", "blocks.10", True),
        ("blocks.*", "blocks.1.norm", False),
        ("blocks.[01]", "blocks.1", True),
        ("**.norm", "blocks.1.norm", True),
        ("**.norm", "norm", True),
        ("blocks.**", "blocks.1.norm", True),
        ("*", "blocks.1", False),
        ("blocks.?", "blocks.10", False),
    ],
)
def test_patterns_match_part_by_part(pattern: str, name: str, found: bool) -> None:
    assert matches(pattern, name) is found


def policy_of(model: nn.Module, *args: Any, **settings: Any) -> dict[str, str]:
    with ebbtide.torch.session(model, *args, **settings) as s:
        return dict(s.policy)


def test_g9_one_word_keeps_the_last_layer() -> None:
    kept = {"blocks.0": "swap", "blocks.1": "swap", "blocks.2": "keep"}
    assert policy_of(Gpt(3)) == kept
    assert policy_of(Gpt(3), "recompute")["blocks.2"] == "keep"


def test_g9_a_policy_that_names_the_last_layer_decides() -> None:
    assert policy_of(Gpt(2), {"blocks.1": "swap"}) == {"blocks.0": "keep", "blocks.1": "swap"}


def test_the_last_pattern_that_matches_decides() -> None:
    policy = {"blocks.*": "swap", "blocks.1": "recompute"}
    assert policy_of(Gpt(3), policy) == {"blocks.0": "swap", "blocks.1": "recompute", "blocks.2": "swap"}


def test_a_policy_may_name_modules_that_were_no_layers() -> None:
    assert policy_of(Gpt(2), {"blocks.0": "swap", "head": "swap"}) == {
        "blocks.0": "swap",
        "blocks.1": "keep",
        "head": "swap",
    }


def test_include_and_exclude_by_layer() -> None:
    assert policy_of(Gpt(4), include="blocks.[012]", exclude=["blocks.1"]) == {
        "blocks.0": "swap",
        "blocks.1": "keep",
        "blocks.2": "swap",
        "blocks.3": "keep",
    }


def test_layers_named_by_patterns() -> None:
    assert policy_of(Gpt(3), layers="blocks.*.qkv") == {
        "blocks.0.qkv": "swap",
        "blocks.1.qkv": "swap",
        "blocks.2.qkv": "keep",
    }


def test_one_block_used_many_times_is_swapped_in_every_call() -> None:
    block = Named()
    assert policy_of(Chain(block, block, block)) == {"layers.0": "swap"}


NO_EFFECT: list[tuple[str, dict[str, Any], str]] = [
    ("layers", {"layers": "block.*"}, "matches none"),
    ("no layers", {"layers": []}, "names no layer"),
    ("policy", {"policy": {"blocks.9": "swap"}}, "'blocks.9' of policy matches none"),
    ("a module as a layer", {"layers": [nn.ReLU()]}, "layers= has ReLU()"),
    ("a number as layers", {"layers": 3}, "layers= has 3, a int"),
    ("empty policy", {"policy": {}}, "decides nothing"),
    ("word", {"policy": "swop"}, "did you mean 'swap'"),
    ("word of a pattern", {"policy": {"blocks.0": "off"}}, "'off' is no policy"),
    ("pattern of a policy", {"policy": {0: "swap"}}, "is no pattern"),
    ("pattern that a later one covers", {"policy": {"blocks.0": "keep", "blocks.*": "swap"}}, "decides nothing"),
    ("no text", {"policy": 3}, "3 is no policy"),
    ("include", {"include": "bloks.0"}, "did you mean blocks.0"),
    ("exclude", {"exclude": ["blocks.0", "blocks.7"]}, "'blocks.7' of exclude matches none"),
    ("all but the last excluded", {"exclude": "blocks.[012]"}, "include= and exclude= leave out all"),
    ("only the last included", {"include": "blocks.3"}, "include= and exclude= leave out all"),
    (
        "all that a policy names excluded",
        {"policy": {"blocks.0": "swap"}, "exclude": "blocks.0"},
        "leave out all that it names, blocks.0",
    ),
    ("empty include", {"include": []}, "is empty"),
    ("a size as include", {"include": 4096}, "min_bytes="),
    (
        "layers in layers",
        {"layers": ["blocks.1", "blocks.*.norm1"]},
        "blocks.1.norm1 is inside of the layer blocks.1",
    ),
]


@pytest.mark.parametrize(("settings", "text"), [case[1:] for case in NO_EFFECT], ids=[case[0] for case in NO_EFFECT])
def test_c17_a_setting_without_effect_is_an_error(settings: dict[str, Any], text: str) -> None:
    model = gpt()
    open_before = len(_stats._sources)
    with pytest.raises(SettingError) as caught:
        ebbtide.torch.session(model, **settings)
    assert text in str(caught.value)
    assert caught.value.hint and str(caught.value).endswith(caught.value.hint)
    assert "\n" not in str(caught.value)
    assert (hooks_on(model), len(_stats._sources)) == (0, open_before)


def test_c17_a_model_without_layers() -> None:
    with pytest.raises(SettingError, match=r"no repeated blocks.*layers="):
        ebbtide.torch.session(nn.LSTM(4, 4))


def test_c17_a_single_layer_would_stay() -> None:
    with pytest.raises(SettingError, match=r"the last layer \(layers.0\) is kept.*policy={'layers.0': 'swap'}"):
        ebbtide.torch.session(Chain(Named(), nn.ReLU()), layers="layers.0")


def test_a_layer_that_holds_another_one_by_a_second_name() -> None:
    block = Block()
    model = Chain(nn.Sequential(block), block)
    with pytest.raises(SettingError, match="is inside of the layer"):
        ebbtide.torch.session(model, layers=["layers.0", "layers.0.0"])


def test_what_a_policy_names_wins_over_found_layers_around_it() -> None:
    model = nn.ModuleList([Chain(Named(), Named()), Chain(Named(), Named()), Chain(Named())])
    assert policy_of(model, {"[01].layers.0": "swap"}) == {
        "0.layers.0": "swap",
        "1.layers.0": "swap",
        "2": "keep",
    }
