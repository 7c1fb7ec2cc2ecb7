"""The optimizers of a run: AdamW for every weight, or Muon for the matrices inside a drafter."""

import torch

ADAMW, MUON = "adamw", "muon"
NAMES = (ADAMW, MUON)
BETAS = (0.9, 0.95)
MOMENTUM = 0.95
# an output projection has a row per token, and the row of a rare token sees few gradients
OUTPUTS = ("lm_head.weight",)


class Optimizers:
    """The optimizers that together update every parameter of `module` once.

    Muon (arXiv 2502.16982) makes the update of a matrix orthogonal and scales it to the size of AdamW's, so
    that one learning rate serves both. Vectors and output projections are AdamW's.
    """

    def __init__(self, module: torch.nn.Module, name: str, lr: float) -> None:
        named = list(module.named_parameters())
        matrices = [p for key, p in named if name == MUON and p.dim() == 2 and key not in OUTPUTS]
        others = [p for key, p in named if name != MUON or p.dim() != 2 or key in OUTPUTS]
        self._all: list[torch.optim.Optimizer] = []
        if matrices:
            self._all.append(
                torch.optim.Muon(
                    matrices, lr=lr, weight_decay=0.0, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
                )
            )
        if others:
            is_fused = others[0].device.type == "cuda"
            self._all.append(torch.optim.AdamW(others, lr=lr, betas=BETAS, weight_decay=0.0, fused=is_fused))

    def step(self, rate: float) -> None:
        """Updates all parameters from their gradients at learning rate `rate`."""
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for optimizer in self._all:
            optimizer.zero_grad(set_to_none=True)

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The tensors that are kept for `parameter` between steps; empty before the first one."""
        return next((one.state[parameter] for one in self._all if parameter in one.state), {})

    def restore(self, parameter: torch.nn.Parameter, state: dict[str, torch.Tensor]) -> None:
        """Makes `state` that of `parameter`."""
        for one in self._all:
            if any(parameter is own for group in one.param_groups for own in group["params"]):
                one.state[parameter] = state
