"""The sampling of a model's `generation_config.json`, for requests that leave it out."""

from pathlib import Path

import msgspec
from msgspec import Struct
from transformers.utils.hub import cached_file

from ...cluster.errors import StartupError
from .body_types import ChatBody, CompletionBody, Fraction, Positive, RepetitionPenalty, Temperature, TopK
from .field_errors import UNREADABLE
from .response_bodies import ResponseBody

FILE = "generation_config.json"


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """The values of requests that leave them out. None: the API's own default."""

    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: Positive | None = None  # of a chat; a completion's default is the API's

    @property
    def given(self) -> dict[str, float]:
        """The values that are set, by name."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None}

    def fill(self, body: ChatBody | CompletionBody | ResponseBody) -> None:
        """Sets the fields that the body leaves out."""
        for name, value in self.given.items():
            if name != "max_new_tokens" and getattr(body, name, value) is None:
                setattr(body, name, value)


def load_sampling_defaults(model: str) -> SamplingDefaults:
    """The defaults of a model directory or hub id; none without the file.

    Raises StartupError for a file that cannot be read.
    """
    path = Path(model) / FILE
    if not Path(model).is_dir():
        found = cached_file(
            model,
            FILE,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is None:
            return SamplingDefaults()
        path = Path(found)
    try:
        return msgspec.json.decode(path.read_bytes(), type=SamplingDefaults)
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, *UNREADABLE) as error:
        remedy = "correct the file, or give --generation-config none"
        raise StartupError(f"{path}: cannot be used: {error}; {remedy}") from None
