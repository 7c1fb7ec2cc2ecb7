"""Which layers of a model have a window, by its config.json, with the rules of its class in transformers.

Without torch: `baton plan` counts the KV of windows, too.
"""

from .config_reader import ConfigReader

SLIDING, FULL = "sliding_attention", "full_attention"
EVERY_LAYER = ("mistral", "mixtral", "phi3")  # a window is that of every layer
MIXED = ("gemma2", "gemma3_text", "gpt_oss")  # some layers have a window, by `layer_types` or a pattern


def layer_windows(reader: ConfigReader, family: str) -> tuple[int, ...]:
    """The window of each layer; empty if no layer has one."""
    num_layers, kinds = reader.count("num_hidden_layers"), _layer_types(reader)
    if family in EVERY_LAYER:
        if kinds and len(set(kinds)) > 1:
            raise reader.error("layer_types", "all layers of this architecture are of one kind; correct it")
        has_window = reader.raw.get("sliding_window") is not None
        return (reader.count("sliding_window"),) * num_layers if has_window else ()
    if family in MIXED:
        step = reader.count("sliding_window_pattern", 6) if family == "gemma3_text" else 2
        kinds = kinds or tuple(SLIDING if (layer + 1) % step else FULL for layer in range(num_layers))
    elif not kinds and reader.flag("use_sliding_window", False) and reader.raw.get("sliding_window"):
        kinds = _switched(reader, family, num_layers)
    elif SLIDING in kinds and not (
        reader.flag("use_sliding_window", False) and reader.raw.get("sliding_window")
    ):
        raise reader.error("layer_types", "sliding_attention needs use_sliding_window and sliding_window")
    if SLIDING not in kinds:
        return ()
    window = reader.count("sliding_window")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _switched(reader: ConfigReader, family: str, num_layers: int) -> tuple[str, ...]:
    """The kinds of layers where `use_sliding_window` is on: by `max_window_layers` in Qwen, by rotation in
    SmolLM3.
    """
    if family == "smollm3":
        unturned = unturned_layers(reader)
        return tuple(SLIDING if layer in unturned else FULL for layer in range(num_layers))
    if family == "qwen3_moe":
        return (SLIDING,) * num_layers
    first = reader.count("max_window_layers", 28) if reader.raw.get("max_window_layers") != 0 else 0
    return tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))


def _layer_types(reader: ConfigReader) -> tuple[str, ...]:
    """The checked `layer_types`; empty if absent."""
    kinds, num_layers = reader.raw.get("layer_types") or [], reader.count("num_hidden_layers")
    if not isinstance(kinds, list) or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise reader.error("layer_types", f"supported are {FULL} and {SLIDING}; correct it")
    if kinds and len(kinds) != num_layers:
        raise reader.error(
            "layer_types",
            f"{len(kinds)} entries for num_hidden_layers = {num_layers}; give one for each layer",
        )
    return tuple(str(kind) for kind in kinds)


def unturned_layers(reader: ConfigReader) -> frozenset[int]:
    """The layers of a SmolLM3 whose q and k are not rotated."""
    num_layers, listed = reader.count("num_hidden_layers"), reader.raw.get("no_rope_layers")
    if listed is None:
        interval = reader.count("no_rope_layer_interval", 4)
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % interval == 0)
    if (
        not isinstance(listed, list)
        or len(listed) < num_layers
        or any(value not in (0, 1) for value in listed)
    ):
        raise reader.error("no_rope_layers", f"a list of {num_layers} zeros and ones is required here")
    return frozenset(layer for layer in range(num_layers) if not listed[layer])
