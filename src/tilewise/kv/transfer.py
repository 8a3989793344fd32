"""Numbers to a device, without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_ALIGNED = 4  # numbers: 16 bytes, as kernels like pointers


def send_lists(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Each list as an int32 tensor on the device: parts of one tensor, whose transfer the host does not wait for."""
    values: list[int] = []
    places = []
    for each in lists:
        places.append(slice(len(values), len(values) + len(each)))
        values += each
        values += [0] * (-len(values) % _ALIGNED)
    sent = send(values, torch.int32, device)
    return [sent[place] for place in places]


def send(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these values on the device."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
