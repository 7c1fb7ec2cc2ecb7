"""The text model inside of a checkpoint that also reads images: its part of config.json and of the tensors.

Such a checkpoint has the class of a whole that names its text model's config, and tensors of both. Only text
is served, so the text model is what counts. Without torch: `baton plan` reads such configs, too.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ..errors import CheckpointError

TEXT_CONFIG = "text_config"
# The class of a whole -> the model type of its text model -> the class of that text model alone.
WHOLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
        "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM"},
        "Qwen2_5_VLForConditionalGeneration": {
            "qwen2_5_vl_text": "Qwen2ForCausalLM",
            "qwen2_5_vl": "Qwen2ForCausalLM",  # its first form, whose keys are those of the whole
        },
        "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    }
)
TIE_KEY = "tie_word_embeddings"
# Keys of the whole that hold for its text model.
SHARED_KEYS = ("eos_token_id", "quantization_config", "dtype", "torch_dtype")
IGNORE_KEYS = ("ignore", "modules_to_not_convert", "ignored_layers")  # of a quantisation: names of modules
# The beginnings of names inside of a whole, and what a text model alone has in their place.
BEGINNINGS = (("language_model.", ""), ("model.language_model.", "model."))
IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.", "visual.")
OTHER_PARTS = (*IMAGE_PARTS, *(f"model.{part}" for part in IMAGE_PARTS))


def is_whole(raw: Mapping[str, object]) -> bool:
    """Whether a parsed config.json is that of a checkpoint with more than a text model."""
    return _class_of(raw) in WHOLES


def text_config(raw: Mapping[str, object], source: Path) -> Mapping[str, object]:
    """The config of the text model alone: that of a whole with its text model's class, or `raw` itself.

    Raises CheckpointError, naming `source`, key, value and remedy, for a text model without a class here.
    """
    name = _class_of(raw)
    if name not in WHOLES:
        return raw
    text = raw.get(TEXT_CONFIG, raw)
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{source}: {TEXT_CONFIG} = {text!r}: an object is required here")
    model_type, known = text.get("model_type"), WHOLES[name]
    if model_type not in known:
        raise CheckpointError(
            f"{source}: {TEXT_CONFIG}.model_type = {model_type!r}: supported for {name} are "
            f"{', '.join(known)}; use a checkpoint of these"
        )
    shared = {key: raw[key] for key in SHARED_KEYS if raw.get(key) is not None}
    # either may say it, depending on the release that wrote the file
    ties = [each[TIE_KEY] for each in (raw, text) if each.get(TIE_KEY) is not None]
    if ties:
        shared[TIE_KEY] = True in ties or ties[0]
    return {**text, **_with_names(shared), "architectures": [known[str(model_type)]]}


def text_name(name: str) -> str:
    """The name of a tensor or module as in a text model alone."""
    for beginning, instead in BEGINNINGS:
        if name.startswith(beginning):
            return instead + name.removeprefix(beginning)
    return name


def _class_of(raw: Mapping[str, object]) -> str:
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _with_names(shared: Mapping[str, object]) -> dict[str, object]:
    """`shared` with the names of modules in its quantisation as in a text model alone."""
    quantisation = shared.get("quantization_config")
    if not isinstance(quantisation, Mapping):
        return dict(shared)
    lists = {key: quantisation[key] for key in IGNORE_KEYS if isinstance(quantisation.get(key), list)}
    renamed = {key: [text_name(x) if isinstance(x, str) else x for x in lists[key]] for key in lists}
    return {**shared, "quantization_config": {**quantisation, **renamed}}
