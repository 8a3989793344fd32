"""Lists of integers to a device, all in one transfer."""

from __future__ import annotations

from collections.abc import Sequence

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
    host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    sent = host.to(device, non_blocking=True)
    return [sent[place] for place in places]
