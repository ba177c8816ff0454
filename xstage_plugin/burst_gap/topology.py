"""Who stores to whom in a calibration run. Pure; GPUs are indices into the list that the user gave."""

from __future__ import annotations

from xstage_plugin.errors import InvalidInputError

LOCAL = "local"
TOPOLOGIES = ("one-way", "both-ways", "incast", "all-to-all")


def available_topologies(num_gpus: int) -> tuple[str, ...]:
    """The topologies that differ on so many GPUs: with two, incast is one-way and all-to-all is both-ways."""
    return TOPOLOGIES[:2] if num_gpus == 2 else TOPOLOGIES if num_gpus > 2 else ()


def stores_to(topology: str, num_gpus: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(source, its destinations) for each source of ``topology``; ``local`` is GPU 0 to its own memory.

    Raises:
        InvalidInputError: not a topology of so many GPUs.
    """
    if topology == LOCAL:
        return ((0, (0,)),)
    if topology not in available_topologies(num_gpus):
        known = ", ".join(available_topologies(num_gpus)) or "none"
        raise InvalidInputError(f"topology is {topology!r}; with {num_gpus} GPUs expected one of: {known}")
    others = {gpu: tuple(peer for peer in range(num_gpus) if peer != gpu) for gpu in range(num_gpus)}
    if topology == "one-way":
        return ((0, (1,)),)
    if topology == "both-ways":
        return ((0, (1,)), (1, (0,)))
    if topology == "incast":
        return tuple((gpu, (0,)) for gpu in others[0])
    # Each source starts with another destination, so that the producers of all sources spread over all links.
    return tuple((gpu, tuple((gpu + step) % num_gpus for step in range(1, num_gpus))) for gpu in range(num_gpus))
