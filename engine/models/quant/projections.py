"""The projections of one model: in the form of its checkpoint, or plain where that ignores a module."""

from functools import partial

import torch

from ...errors import CheckpointError
from .config import Fp8Form, QuantConfig
from .fp8_projection import Fp8Projection
from .int4_projection import Int4Projection
from .projection import MakeProjection, Projection, StoredProjection, StoredWeights


class Projections:
    """Makes the projections of a model of `config`, and remembers those that need a last step after loading.
    """

    def __init__(self, config: QuantConfig | None) -> None:
        self.config = config
        self._made: list[StoredWeights] = []

    def under(self, prefix: str, plain: MakeProjection) -> MakeProjection:
        """The maker of the projections whose names begin with `prefix` ("model.layers.0.mlp.").

        `plain` makes those in the model's dtype. The maker raises CheckpointError if only some of the parts
        of a projection are quantised, or if their sizes do not fit the form.
        """
        return plain if self.config is None else partial(self._make, self.config, prefix, plain)

    def remember(self, weights: StoredWeights) -> None:
        """Has `finish` bring other weights into the form of their kernels."""
        self._made.append(weights)

    def finish(self) -> None:
        """Brings all loaded tensors into the form of the kernels. Raises CheckpointError for impossible
        values.
        """
        for projection in self._made:
            projection.finish()

    def _make(
        self,
        config: QuantConfig,
        prefix: str,
        plain: MakeProjection,
        in_size: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Projection:
        ignored = [name for name in parts if config.is_ignored(prefix + name)]
        if len(ignored) == len(parts):
            return plain(in_size, parts, bias=bias, dtype=dtype, device=device)
        if ignored:
            others = ", ".join(name for name in parts if name not in ignored)
            raise CheckpointError(
                f"quantization_config ignores {prefix}{ignored[0]} but not {others}, which is one product "
                "here; use a checkpoint that quantises all or none of them"
            )
        made: StoredProjection
        if isinstance(config.form, Fp8Form):
            made = Fp8Projection(config.form, prefix, in_size, parts, bias=bias, dtype=dtype, device=device)
        else:
            made = Int4Projection(config.form, prefix, in_size, parts, bias=bias, dtype=dtype, device=device)
        self._made.append(made)
        return made
