"""Registration of host memory with a GPU's driver, so that the GPU's copy engines read and write it directly.

Reference: CUDA Runtime API, "cudaHostRegister".
"""

from contextlib import suppress

import torch

PORTABLE, READ_ONLY = 0x01, 0x08  # driver_types.h: for every context of the process; without PROT_WRITE


def register(address: int, num_bytes: int, device: torch.device, *, is_read_only: bool = False) -> int:
    """Registers host memory with the driver of `device`. Returns the CUDA error code; 0 is success.

    Call `unregister` before the memory is unmapped: a later mapping at the same address is refused otherwise.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        code = int(cudart.cudaHostRegister(address, num_bytes, PORTABLE | (READ_ONLY if is_read_only else 0)))
        if code:
            # the runtime keeps the error for whoever asks next, which is the check behind torch's next launch
            with suppress(RuntimeError):
                torch.zeros(1, device=device)
    return code


def unregister(address: int, device: torch.device) -> None:
    """Ends a registration, when copies of the memory have ended."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
