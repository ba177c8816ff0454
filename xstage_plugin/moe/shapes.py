"""Expert shapes of published models, bundled by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xstage_plugin.bundled import bundled_folder, looks_like_file
from xstage_plugin.checks import positive_int, unknown_name
from xstage_plugin.errors import InvalidInputError
from xstage_plugin.toml_table import Table


@dataclass(frozen=True)
class ExpertShape:
    """The routed experts of one MoE layer.

    Attributes:
        key: bundled name, or the file stem.
        name: the model's own name.
        hidden, intermediate: of one routed expert; Linear-1 is hidden -> 2 * intermediate, Linear-2 intermediate -> hidden.
        experts: routed experts of the layer, over all ranks.
        topk: experts per token.
        source: where the figures come from.
        bundled: it came with the package, so that published times may speak of it.
    """

    key: str
    name: str
    hidden: int
    intermediate: int
    experts: int
    topk: int
    source: str
    bundled: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts", "topk"):
            positive_int(name, getattr(self, name))
        if self.topk > self.experts:
            raise InvalidInputError(f"topk is {self.topk}; expected at most the number of experts, {self.experts}")


def bundled_shapes() -> tuple[ExpertShape, ...]:
    """Every shape that comes with the package, in the order of its file."""
    table = Table.read(bundled_folder("models") / "expert_shapes.toml", "a list of expert shapes")
    return tuple(_shape(key, table.table(key), bundled=True) for key in table.keys())  # noqa: SIM118


def load_shape(name_or_file: str) -> ExpertShape:
    """The shape of a bundled name, or of a TOML file with name, hidden, intermediate, experts, topk.

    Raises:
        InvalidInputError: unknown name (near ones are suggested), or a file that does not hold a shape.
    """
    shapes = {shape.key: shape for shape in bundled_shapes()}
    if name_or_file.lower() in shapes:
        return shapes[name_or_file.lower()]
    if looks_like_file(name_or_file):
        path = Path(name_or_file)
        return _shape(path.stem, Table.read(path, "an expert shape file (TOML)"))
    raise unknown_name("model", name_or_file, shapes)


def _shape(key: str, table: Table, bundled: bool = False) -> ExpertShape:
    return table.build(
        lambda: ExpertShape(
            key=key,
            name=table.text("name", key),
            hidden=table.integer("hidden"),
            intermediate=table.integer("intermediate"),
            experts=table.integer("experts"),
            topk=table.integer("topk"),
            source=table.text("source", table.where),
            bundled=bundled,
        )
    )
