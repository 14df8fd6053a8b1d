"""Kinds of trained drafters, which read hidden states of one target, by the `config.json` beside their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Words in the names of architectures and model types, in lower case and without separators, and the kind. A word that
# is part of another one comes after that.
_WORDS = {
    "peagle": "P-EAGLE",
    "eagle3": "EAGLE-3",
    "eagle": "EAGLE",
    "medusa": "Medusa",
    "hydra": "Hydra",
    "mlpspeculator": "MLP speculator",
    "dspark": "DSpark",
    "dflash2": "DFlash 2",
    "dflash": "DFlash",
    "gemma4assistant": "Gemma 4's assistant",
    "gemma4unifiedassistant": "Gemma 4's assistant",
    "museglimmerassistant": "Muse Glimmer's assistant",
    "mtp": "MTP",
}
# Keys that only the config of a trained drafter has, and its kind. With a first key, a file may have a last one, too.
_KEYS = {
    "ptd_token_id": "P-EAGLE",
    "markov_rank": "DSpark",
    "selector_rank": "DFlash 2",
    "medusa_num_heads": "Medusa",
    "medusa_num_layers": "Medusa",
    "hydra_num_heads": "Hydra",
    "dflash_config": "DFlash",
    "eagle_config": "EAGLE-3",
    "eagle_aux_hidden_state_layer_ids": "EAGLE-3",
}
# Kinds whose names are also used for other kinds, which are told apart by a key.
_REFINED = {"EAGLE-3": {"P-EAGLE"}, "DFlash": {"DSpark", "DFlash 2"}}

# What is nearest to a kind that cannot be used.
_NEAREST = {
    "EAGLE": "an EAGLE-3 drafter of the same target",
    "Hydra": "Medusa's heads for the same target",
    "MLP speculator": "Medusa's heads for the same target",
    "Muse Glimmer's assistant": "a DFlash drafter of the same target",
    "Speculators' mtp": 'the layer in the files of the original model ("mtp"), or in a folder as mlx-vlm writes it',
}


def nearest_to(kind: str) -> str:
    """What can be used in place of a kind that cannot, for messages."""
    return _NEAREST.get(kind, "a small language model of the same vocabulary")


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The kind of trained drafter that a config.json, with whatever values, describes; None for none."""
    speculator = config.get("speculators_model_type")
    architectures = config.get("architectures")
    names = [config.get("model_type"), speculator, *(architectures if isinstance(architectures, list) else ())]
    spelled = " ".join(name.lower() for name in names if isinstance(name, str)).replace("-", "").replace("_", "")
    if speculator == "mtp":
        return "Speculators' mtp"  # whose weights have other names
    inner = config.get("dflash_config")
    keys = {*config, *(inner if isinstance(inner, Mapping) else ())}
    by_key = next((kind for key, kind in _KEYS.items() if key in keys), None)
    by_name = next((kind for word, kind in _WORDS.items() if word in spelled), None)
    if by_name is not None:
        return by_key if by_key in _REFINED.get(by_name, ()) else by_name
    if by_key is not None:
        return by_key
    return None if speculator is None else f"Speculators' {speculator}"
