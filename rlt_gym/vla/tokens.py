"""Which of a VLA's tokens somebody reads."""

import torch

from rlt_gym.vla.base import TOKEN_KINDS, VLAOutput


def select_tokens(output: VLAOutput, kinds: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Keep the valid tokens of the wanted kinds, moved to the front in their order, so that pads and holes change nothing.

    :param output: What the VLA gave.
    :param kinds: Wanted kinds, or ``("all",)``.
    :return: Tokens float32 (B, N, H), zero where there is none, and mask bool (B, N); N = most tokens in a row.
    :raises ValueError: If a row has no such token.
    """
    mask = output.mask
    if "all" not in kinds:
        wanted = torch.zeros_like(mask)
        for kind in kinds:
            wanted |= output.kind == TOKEN_KINDS[kind]
        mask = mask & wanted
    counts = mask.sum(dim=1)
    if int(counts.min()) == 0:
        raise ValueError(f"Row {int(counts.argmin())} has no valid token of the kinds {kinds}; choose other kinds.")
    tokens = output.tokens
    if bool((mask == mask[:1]).all()):  # the usual case: the same places in every row
        tokens = tokens if bool(mask[0].all()) else tokens[:, mask[0]]
        return tokens.float(), mask[:, mask[0]]
    order = torch.argsort(~mask, dim=1, stable=True)[:, : int(counts.max())]
    mask = mask.gather(1, order)
    tokens = tokens.gather(1, order[..., None].expand(-1, -1, tokens.shape[2])).float()
    # a VLA may leave anything in places that are not valid, also NaN
    return tokens.masked_fill(~mask[..., None], 0.0), mask
