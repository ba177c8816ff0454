"""How tokens spread over experts: balanced, skewed by a power law, or read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from xstage_plugin.checks import not_negative, positive_int, shown
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.files import read_json, read_text

DEFAULT_SKEW = 0.5
MOST_EXPERTS = 2**16


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
    positive_int("experts", experts, MOST_EXPERTS)
    return Routing("balanced", (1.0 / experts,) * experts)


def skewed_routing(experts: int, topk: int, skew: float = DEFAULT_SKEW) -> Routing:
    """Zipf: the j-th most popular expert gets a share in proportion to j**-skew, at most 1/topk (every token once).

    Popular experts are spread over the ranks by a fixed stride, as a placement balancer would.

    Raises:
        InvalidInputError: ``skew`` is negative or not finite.
    """
    positive_int("experts", experts, MOST_EXPERTS)
    not_negative("skew", skew)
    weights = np.arange(1, experts + 1, dtype=float) ** -skew
    shares = _capped(weights / weights.sum(), 1.0 / topk)
    stride = next(step for step in range(max(1, round(experts * 0.618)), 2 * experts + 2) if gcd(step, experts) == 1)
    placed = np.empty(experts)
    placed[np.arange(experts) * stride % experts] = shares
    return Routing(f"skewed (Zipf exponent {skew:g})", tuple(float(share) for share in placed))


def routing_from_counts(counts: Sequence[float], experts: int, topk: int, label: str) -> Routing:
    """Routing in proportion to tokens per expert.

    Raises:
        InvalidInputError: not one count per expert, or a count that is negative or not finite.
    """
    if len(counts) != experts:
        raise InvalidInputError(f"{label}: {len(counts)} counts; expected one for each of {experts} experts")
    for index, count in enumerate(counts):
        not_negative(f"{label}: count of expert {index}", count)
    total = float(sum(counts))
    shares = tuple(float(count) / total if total else 0.0 for count in counts)
    # A token names an expert once, so a share above 1/topk says that slots were left empty.
    return Routing(f"counts of {label}", shares, min(1.0, 1 / (topk * max(shares))) if total else 0.0)


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

    Formats: ``.npy`` and ``.json``, where a list of numbers is counts and a list of lists is ids; else text with one row a
    line, separated by commas or blanks, where one number a line (or a single line) is counts and rows of topk numbers are
    ids.

    Raises:
        InvalidInputError: unreadable, neither counts nor ids for this layer, or text that could be either.
    """
    if path.suffix in (".npy", ".json"):
        values = _read_array(path)
    else:
        values = _numbers(path, _read_rows(path))
        single = values.ndim == 2 and 1 in values.shape
        could_be_ids = values.ndim == 2 and values.shape[1] == topk
        if single and could_be_ids and values.size == experts:
            raise InvalidInputError(
                f"{path}: {values.size} numbers could be counts or ids of this layer; give them as .json, where a list is "
                "counts and a list of lists is ids"
            )
        if single and not could_be_ids:
            values = values.reshape(-1)
    if values.ndim == 1:
        return routing_from_counts([float(value) for value in values], experts, topk, str(path))
    return routing_from_ids(values, experts, topk, str(path))


def _capped(shares: np.ndarray, cap: float) -> np.ndarray:
    """``shares`` (sum 1) with none above ``cap``; what is cut goes to the others in proportion, or evenly where they are 0."""
    shares = shares.copy()
    for _ in range(len(shares)):
        over = shares > cap * (1 + 1e-12)
        below = shares < cap
        if not over.any() or not below.any():
            break
        excess = float((shares[over] - cap).sum())
        shares[over] = cap
        weights = shares[below] if shares[below].sum() > excess * 1e-12 else np.ones(int(below.sum()))
        shares[below] += excess * weights / weights.sum()
    return shares


def _read_array(path: Path) -> np.ndarray:
    if path.suffix == ".json":
        return _numbers(path, read_json(path, "a routing file"))
    try:
        return _numbers(path, np.load(path, allow_pickle=False))
    except InvalidInputError:
        raise
    except FileNotFoundError:
        raise InvalidInputError(f"{path}: no such file; expected a routing file") from None
    except Exception as error:  # numpy's reader raises whatever its parsers do
        raise InvalidInputError(f"{path}: not a numpy array file ({type(error).__name__}); {EXPECTED}") from None


EXPECTED = "expected one count per expert, or one row of topk ids a token"


def _numbers(path: Path, document: Any) -> np.ndarray:
    """A list of numbers or of rows of numbers as an array of one or two dimensions."""
    if not isinstance(document, np.ndarray):
        rows = document if isinstance(document, list) else None
        flat = [value for row in rows or [] for value in (row if isinstance(row, list) else [row])]
        if not flat or not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in flat):
            raise InvalidInputError(f"{path}: holds no list of numbers; {EXPECTED}")
        try:
            document = np.array(rows, dtype=float if any(isinstance(value, float) for value in flat) else np.int64)
        except (ValueError, OverflowError):
            raise InvalidInputError(f"{path}: rows of unequal length, or a number too large; {EXPECTED}") from None
    if document.ndim not in (1, 2) or document.dtype.kind not in "iuf" or not document.size:
        raise InvalidInputError(f"{path}: holds no list of numbers; {EXPECTED}")
    return np.asarray(document)


def _read_rows(path: Path) -> list[list[float]]:
    rows = []
    for number, line in enumerate(read_text(path, "a routing file").splitlines(), start=1):
        fields = line.split(",") if "," in line else line.split()
        try:
            row = [float(field) for field in fields]
        except ValueError:
            raise InvalidInputError(f"{path}: line {number} is {shown(line.strip())}; expected numbers") from None
        if row:
            rows.append(row)
    return rows
