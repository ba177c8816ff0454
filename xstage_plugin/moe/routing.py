"""How tokens spread over experts: balanced, skewed by a power law, or read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from xstage_plugin.checks import not_negative, positive_int
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.files import read_json, read_text

DEFAULT_SKEW = 0.5


@dataclass(frozen=True)
class Routing:
    """Share of the routed (token, expert) pairs that each expert gets.

    Attributes:
        label: one phrase for people.
        shares: one per expert, sum 1 (all 0 where nothing is routed).
        used: share of the topk slots that hold an expert; the rest is padding (-1).
    """

    label: str
    shares: tuple[float, ...]
    used: float = 1.0


def balanced_routing(experts: int) -> Routing:
    """Every expert gets the same number of tokens."""
    positive_int("experts", experts)
    return Routing("balanced", (1.0 / experts,) * experts)


def skewed_routing(experts: int, topk: int, skew: float = DEFAULT_SKEW) -> Routing:
    """Zipf: the j-th most popular expert gets a share in proportion to j**-skew, at most 1/topk (every token once).

    Popular experts are spread over the ranks by a fixed stride, as a placement balancer would.

    Raises:
        InvalidInputError: ``skew`` is negative or not finite.
    """
    positive_int("experts", experts)
    not_negative("skew", skew)
    weights = np.arange(1, experts + 1, dtype=float) ** -skew
    shares = _capped(weights / weights.sum(), 1.0 / topk)
    stride = next(step for step in range(max(1, round(experts * 0.618)), 2 * experts + 2) if gcd(step, experts) == 1)
    placed = np.empty(experts)
    placed[np.arange(experts) * stride % experts] = shares
    return Routing(f"skewed (Zipf exponent {skew:g})", tuple(float(share) for share in placed))


def routing_from_counts(counts: Sequence[float], experts: int, label: str) -> Routing:
    """Routing in proportion to tokens per expert.

    Raises:
        InvalidInputError: not one count per expert, or a count that is negative or not finite.
    """
    if len(counts) != experts:
        raise InvalidInputError(f"{label}: {len(counts)} counts; expected one for each of {experts} experts")
    for index, count in enumerate(counts):
        not_negative(f"{label}: count of expert {index}", count)
    total = float(sum(counts))
    return Routing(f"counts of {label}", tuple(float(count) / total if total else 0.0 for count in counts))


def routing_from_ids(ids: np.ndarray, experts: int, topk: int, label: str) -> Routing:
    """Routing of topk ids, shape (tokens, topk), -1 where a slot holds no expert.

    Raises:
        InvalidInputError: another shape, an id outside -1 .. experts - 1, or one token with the same expert twice.
    """
    if ids.ndim != 2 or ids.shape[1] != topk or not len(ids):
        raise InvalidInputError(f"{label}: ids have shape {ids.shape}; expected (tokens, {topk})")
    if ids.dtype.kind not in "iu" and not (np.isfinite(ids).all() and (ids == np.floor(ids)).all()):
        raise InvalidInputError(f"{label}: an id is not a whole number; expected -1 to {experts - 1}")
    outside = (ids < -1) | (ids >= experts)
    if outside.any():
        row, slot = np.argwhere(outside)[0]
        raise InvalidInputError(f"{label}: id {ids[row, slot]:g} of token {row} is outside -1 to {experts - 1}")
    ids = ids.astype(np.int64)
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        row, slot = np.argwhere(twice)[0]
        raise InvalidInputError(f"{label}: token {row} names expert {ordered[row, slot]} twice; expected distinct ids")
    counts = np.bincount(ids[ids >= 0], minlength=experts)
    used = float(counts.sum() / ids.size)
    shares = counts / counts.sum() if counts.sum() else counts.astype(float)
    return Routing(f"topk ids of {label}", tuple(float(share) for share in shares), used)


def read_routing(path: Path, experts: int, topk: int) -> Routing:
    """Routing from a file: one count per expert, or topk ids of one token a row (-1 = padding).

    Formats: ``.npy``, ``.json`` (a list, or a list of lists), else text with one row a line, separated by commas or
    blanks. A list of ``experts`` numbers, in one row or one column, is counts; anything else is ids.

    Raises:
        InvalidInputError: unreadable, or neither counts nor ids for this layer.
    """
    values = _read_array(path)
    flat = values.reshape(-1) if values.ndim == 1 or 1 in values.shape[:2] else None
    is_ids = values.ndim == 2 and values.shape[1] == topk and len(values.reshape(-1)) != experts
    if flat is not None and not is_ids:
        return routing_from_counts([float(value) for value in flat], experts, str(path))
    return routing_from_ids(values, experts, topk, str(path))


def _capped(shares: np.ndarray, cap: float) -> np.ndarray:
    """``shares`` with none above ``cap``; what is cut goes to the others in proportion."""
    shares = shares.copy()
    for _ in range(len(shares)):
        over = shares > cap * (1 + 1e-12)
        if not over.any():
            break
        excess = float((shares[over] - cap).sum())
        shares[over] = cap
        below = shares < cap
        if not below.any():
            break
        shares[below] += excess * shares[below] / shares[below].sum()
    return np.minimum(shares, cap) if cap * len(shares) >= 1 else shares


def _read_array(path: Path) -> np.ndarray:
    expected = "expected one count per expert, or one row of topk ids a token"
    if path.suffix == ".npy":
        try:
            values = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            raise InvalidInputError(f"{path}: no such file; expected a routing file") from None
        except (OSError, ValueError, EOFError) as error:
            raise InvalidInputError(f"{path}: not a numpy array file ({str(error).splitlines()[0]}); {expected}") from None
    else:
        document: Any = read_json(path, "routing file") if path.suffix == ".json" else _read_rows(path)
        try:
            values = np.array(document)
        except (ValueError, OverflowError):
            raise InvalidInputError(f"{path}: rows of unequal length; {expected}") from None
    if values.ndim not in (1, 2) or values.dtype.kind not in "iuf" or not values.size:
        raise InvalidInputError(f"{path}: holds no list of numbers; {expected}")
    return np.asarray(values)


def _read_rows(path: Path) -> list[list[float]]:
    rows = []
    for number, line in enumerate(read_text(path, "routing file").splitlines(), start=1):
        fields = line.replace(",", " ").split()
        try:
            row = [float(field) for field in fields]
        except ValueError:
            raise InvalidInputError(f"{path}: line {number} is {line.strip()!r:.40}; expected numbers") from None
        if row:
            rows.append(row)
    return rows
