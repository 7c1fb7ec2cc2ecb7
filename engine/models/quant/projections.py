"""The projections of one model: in the form of its checkpoint, or plain where that ignores a module."""

from collections.abc import Sequence
from functools import partial

import torch

from ...errors import CheckpointError
from .config import Fp8Form, QuantConfig
from .experts import ExpertSizes, Fp8Experts, Int4Experts
from .fp8_projection import Fp8Projection
from .int4_projection import Int4Projection
from .projection import MakeProjection, Projection, StoredExperts, StoredProjection, StoredWeights


class Projections:
    """Makes the projections of a model of `config`, and remembers those that need a last step after loading.

    `is_invariant`: their products are batch-invariant.
    """

    def __init__(self, config: QuantConfig | None, *, is_invariant: bool = False) -> None:
        self.config = config
        self.is_invariant = is_invariant
        self._made: list[tuple[str, StoredWeights]] = []

    def under(self, prefix: str, plain: MakeProjection) -> MakeProjection:
        """The maker of the projections whose names begin with `prefix` ("model.layers.0.mlp.").

        `plain` makes those in the model's dtype. The maker raises CheckpointError if only some of the parts
        of a projection are quantised, or if their sizes do not fit the form.
        """
        return plain if self.config is None else partial(self._make, prefix, plain)

    def experts(self, prefix: str, sizes: ExpertSizes, device: torch.device | str) -> StoredExperts | None:
        """The experts of a layer whose names begin with `prefix` ("model.layers.0.mlp.experts."), in the form
        of the checkpoint; None if that keeps them in the model's dtype.

        Raises CheckpointError if only some of their matrices are quantised, or if their sizes do not fit the
        form.
        """
        if self.config is None:
            return None
        first, last = (f"{prefix}{number}." for number in (sizes.numbers[0], sizes.numbers[-1]))
        modules = [own + name for own in (first, last) for name in sizes.names]
        ignored = [name for name in modules if self.config.is_ignored(name)]
        if len(ignored) == len(modules):
            return None
        if ignored:
            raise _partly_ignored(ignored[0], [name for name in modules if name not in ignored])
        form = self.config.form
        made: StoredExperts
        if isinstance(form, Fp8Form):
            made = Fp8Experts(form, prefix, sizes, device=device, is_invariant=self.is_invariant)
        else:
            made = Int4Experts(form, prefix, sizes, device=device, is_invariant=self.is_invariant)
        self.remember(made, prefix)
        return made

    def remember(self, weights: StoredWeights, prefix: str = "") -> None:
        """Has `finish` bring other weights, named `prefix`, into the form of their kernels."""
        self._made.append((prefix, weights))

    @property
    def made(self) -> Sequence[tuple[str, StoredWeights]]:
        """All weights in the form of the checkpoint, with the beginnings of their names."""
        return self._made

    def finish(self) -> None:
        """Brings all loaded tensors into the form of the kernels. Raises CheckpointError for impossible
        values.
        """
        for _, weights in self._made:
            weights.finish()

    def stored(
        self,
        prefix: str,
        in_size: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> StoredProjection | None:
        """A projection as those of `under`, which its owner must finish; None if it is not quantised."""
        config = self.config
        if config is None:
            return None
        ignored = [name for name in parts if config.is_ignored(prefix + name)]
        if len(ignored) == len(parts):
            return None
        if ignored:
            raise _partly_ignored(prefix + ignored[0], [name for name in parts if name not in ignored])
        make = Fp8Projection if isinstance(config.form, Fp8Form) else Int4Projection
        made: StoredProjection = make(
            config.form,  # type: ignore[arg-type]
            prefix,
            in_size,
            parts,
            bias=bias,
            dtype=dtype,
            device=device,
            is_invariant=self.is_invariant,
        )
        return made

    def _make(
        self,
        prefix: str,
        plain: MakeProjection,
        in_size: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Projection:
        made = self.stored(prefix, in_size, parts, bias=bias, dtype=dtype, device=device)
        if made is None:
            return plain(in_size, parts, bias=bias, dtype=dtype, device=device)
        self.remember(made, prefix + next(iter(parts)))
        return made


def _partly_ignored(name: str, others: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"quantization_config ignores {name} but not {', '.join(others)}, which is one product here; use a "
        "checkpoint that quantises all or none of them"
    )
