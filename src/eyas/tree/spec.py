"""Names of tree shapes, as `--tree` takes them, and the named static trees.

`chain:K`, `static:NAME`, `dynamic:DEPTH,TOPK,NODES[,THRESHOLD]` and `shared:DEPTH,WIDTH,BUDGET[,PER_ROW[,THRESHOLD]]`,
whose budget is for the whole batch; `lookahead:W,N,G`, for that method only. With `auto` and `auto:chain`, a
controller chooses.

torch is imported only when a tree is made, because command lines check names before they know whether they need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from eyas.errors import UsageError
from eyas.plugins import Registry
from eyas.tree.bounds import check_sizes

if TYPE_CHECKING:
    from eyas.tree.draft_tree import TreeSpec
    from eyas.tree.static import Path

# EAGLE-1's published tree (arXiv 2401.15077): 25 nodes and the root.
_EAGLE1: tuple[Path, ...] = (
    *((i,) for i in range(4)),
    *((0, i) for i in range(3)),
    *((1, i) for i in range(2)),
    *((2, i) for i in range(2)),
    (3, 0),
    *((0, 0, i) for i in range(3)),
    *((0, 1, i) for i in range(2)),
    *((0, 2, i) for i in range(2)),
    (1, 0, 0),
    *((0, 0, 0, i) for i in range(3)),
    *((0, 0, 0, 0, i) for i in range(2)),
)

# Fifteen nodes, five deep, narrow: for machines on which a verification pass grows with its width.
_SLIM: tuple[Path, ...] = (
    (0,), (1,), (2,),
    (0, 0), (0, 1), (1, 0),
    (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip

# Medusa's published tree for 7B models (FasterDecoding's `mc_sim_7b_63`): 63 nodes, four deep.
_MEDUSA: tuple[Path, ...] = (
    *((i,) for i in range(10)),
    *((0, i) for i in range(10)),
    *((1, i) for i in range(7)),
    *((2, i) for i in range(3)),
    *((3, i) for i in range(2)),
    *((i, 0) for i in range(4, 10)),
    *((0, 0, i) for i in range(10)),
    *((0, 1, i) for i in range(3)),
    *((0, 2, i) for i in range(2)),
    *((0, i, 0) for i in range(3, 8)),
    *((1, 0, i) for i in range(2)),
    (2, 0, 0),
    *((0, 0, 0, i) for i in range(2)),
)

PRESETS: dict[str, tuple[Path, ...]] = {"eagle1": _EAGLE1, "mc_sim_7b_63": _MEDUSA, "slim": _SLIM}
"""The paths of `static:NAME` trees."""

_FORMS = (
    "chain:K, static:NAME, dynamic:DEPTH,TOPK,NODES[,THRESHOLD] or shared:DEPTH,WIDTH,BUDGET[,PER_ROW[,THRESHOLD]] "
    "(parts in brackets are optional); with `method=lookahead`: lookahead:W,N,G"
)


AUTO = ("auto", "auto:chain")
"""The names for which a controller chooses each round's tree."""


def is_auto(text: str | None) -> bool:
    """Whether a tree specification leaves the tree to a controller. Raises UsageError for unknown forms of `auto`."""
    if text is None or text.partition(":")[0] != "auto":
        return False
    if text not in AUTO:
        raise UsageError(f"unknown tree {text!r}: write {' or '.join(AUTO)}")
    return True


class MakeTree(Protocol):
    """What an entry point `eyas.trees` names: a function that makes a tree shape from the text after `NAME:`.

    It returns a `TreeSpec` (`eyas.tree.draft_tree`), whose `start` makes the `Growth` of one draft: that is given the
    logits of each level and says which tokens become nodes. `eyas.tree.dynamic` is an example. Raises UsageError for
    arguments that it doesn't take, naming those it does.
    """

    def __call__(self, arguments: str, /) -> TreeSpec:
        """The shape; `arguments` is empty if nothing follows the name."""


def parse_tree(text: str) -> TreeSpec:
    """The tree shape that `text` names. Raises UsageError, which lists the accepted forms."""
    read_tree(text)
    name, _, arguments = text.partition(":")
    return TREES[name](arguments)


def make_static(arguments: str) -> TreeSpec:
    """A named static tree."""
    from eyas.tree.static import StaticTree

    return StaticTree(PRESETS[arguments])


def make_chain(arguments: str) -> TreeSpec:
    """A chain of K tokens."""
    from eyas.tree.static import StaticTree

    return StaticTree.chain(*read_tree(f"chain:{arguments}").sizes)


def make_lookahead(arguments: str) -> TreeSpec:
    """The tree of lookahead decoding: W, N and G."""
    from eyas.tree.lookahead import LookaheadTree

    return LookaheadTree(*read_tree(f"lookahead:{arguments}").sizes)


def make_dynamic(arguments: str) -> TreeSpec:
    """A dynamic tree: depth, top k, nodes, and a threshold."""
    from eyas.tree.dynamic import DynamicTree

    named = read_tree(f"dynamic:{arguments}")
    depth, top_k, nodes = named.sizes
    return DynamicTree(depth, top_k, nodes, named.threshold)


def make_shared(arguments: str) -> TreeSpec:
    """A tree whose budget is the whole batch's: depth, width, budget, the most per row, and a threshold."""
    from eyas.tree.shared import SharedTree

    named = read_tree(f"shared:{arguments}")
    depth, width, budget, *per_row = named.sizes
    return SharedTree(depth, width, budget, per_row[0] if per_row else None, named.threshold)


def _wrong(_: str, found: Any) -> str | None:
    return None if callable(found) else f"it is a {type(found).__name__}, not a function that makes a tree shape"


TREES: Registry[MakeTree] = Registry(
    "eyas.trees",
    {name: f"{__name__}:make_{name}" for name in ("chain", "static", "dynamic", "shared", "lookahead")},
    _wrong,
    reserved=("auto",),
)
"""All tree shapes by name. Other packages' shapes are entry points `eyas.trees`."""


class TreeName(NamedTuple):
    """The parts of a tree name such as `dynamic:5,4,15`."""

    kind: str
    sizes: tuple[int, ...]
    """The integers, in the order of the name."""
    threshold: float


def read_tree(text: str) -> TreeName:
    """Read and check the name of a tree without making it. Raises UsageError, which lists the accepted forms.

    Of another package's shape only the name is checked.
    """
    kind, _, rest = text.partition(":")
    if kind not in TREES.own and kind in TREES:
        return TreeName(kind, (), 0.0)
    if kind == "static":
        if rest not in PRESETS:
            raise UsageError(f"unknown static tree {rest!r}: known are {', '.join(sorted(PRESETS))}")
        return TreeName(kind, (), 0.0)
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    names = _SIZES.get(kind, ())
    fewest = min(3, len(names))
    sizes = tuple(int(number) for number in numbers[: len(names)] if number.is_integer())
    most = len(names) + (kind in _WITH_THRESHOLD)
    if not names or len(sizes) != min(len(numbers), len(names)) or not fewest <= len(numbers) <= most:
        further = "".join(f", {name}:..." for name in TREES.plugins)
        raise UsageError(f"unknown tree {text!r}: write {_FORMS}{further}")
    threshold = numbers[len(names)] if len(numbers) > len(names) else 0.0
    check_sizes(kind, threshold, **dict(zip(names, sizes, strict=False)))
    return TreeName(kind, sizes, threshold)


_SIZES = {
    "chain": ("length",), "dynamic": ("depth", "top_k", "nodes"), "shared": ("depth", "width", "budget", "per_row"),
    "lookahead": ("window", "ngram", "guesses"),
}  # fmt: skip
"""Kind of tree -> the meanings of the integers in its name."""
_WITH_THRESHOLD = ("dynamic", "shared")
"""The kinds whose integers a threshold may follow."""
