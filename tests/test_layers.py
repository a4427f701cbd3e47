"""Imports run one way, and nothing is imported by a name looked up from below."""

import ast
import collections
import pathlib
import re

import boostax

ROOT = pathlib.Path(boostax.__file__).parent
ARCHITECTURE = (pathlib.Path(__file__).parents[1] / "ARCHITECTURE.md").read_text()
# Each may import those before it; those between two signs know nothing of each other.
LAYERS = (
    "_core < order < precision reduce subspace model < accumulate freeze < train compat "
    "< layers states nnx < auditing explaining < config < testing"
)
RANK = {name: rank for rank, layer in enumerate(LAYERS.split("<")) for name in layer.split()}


def imported(path):
    """The modules of boostax that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("boostax"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("boostax"))


def test_imports_run_one_way():
    """But for the line by which ``train`` offers the names of ``layers``."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).with_suffix("").parts
        if len(name) > 1 or name[0] in ("explaining", "states"):
            for module in imported(path):
                ends = name[0], module.split(".")[1] if "." in module else ""
                found.setdefault(ends, []).append(f"{'/'.join(name)}: {module}")
    assert [["train/__init__: boostax.layers.*"]] == [
        lines
        for (room, other), lines in found.items()
        if other and room != other and not RANK.get(other, 99) < RANK[room]
    ]


def test_a_public_name_of_the_core_has_users_in_two_rooms_or_in_the_core():
    users, public = collections.defaultdict(set), set()
    for path in ROOT.rglob("*.py"):
        room, tree = path.relative_to(ROOT).parts[0], ast.parse(path.read_text())
        modules = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("boostax._core"):
                modules |= {alias.asname: alias.name for alias in node.names}
                for alias in node.names:
                    users[node.module.rpartition(".")[2], alias.name].add(room)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                users[modules.get(node.value.id, node.value.id), node.attr].add(room)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and room == "_core":
                users[path.stem, node.id].add(room)
        if room == "_core":
            public |= {(path.stem, x.name) for x in tree.body if hasattr(x, "name")}
    one = [x for x in public if x[1][0] != "_" and "_core" not in users[x] and len(users[x]) < 2]
    assert len(public) > 200 and not one


def test_the_drawing_of_the_packages_is_that_of_the_imports():
    """ARCHITECTURE.md names the order; packages that are not in it would be outside of it."""
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages | {"explaining", "states", "nnx"} == set(RANK)
    assert all(f"`{name}`" in ARCHITECTURE for name in packages)


def test_each_question_of_a_maintainer_has_at_most_three_files():
    rows = re.findall(r"(?m)^\| [^|]+\? \| (.*) \|$", ARCHITECTURE)
    for files in (re.findall(r"`(\w+/\w+\.\w+)`", row) for row in rows):
        assert 1 <= len(files) <= 3 and all((ROOT / x).is_file() for x in files)
    assert len(rows) == 5


def test_the_audit_knows_boostax_by_its_adapter_and_is_known_to_the_command_alone():
    """It could be lifted out; ``test_import.py`` does so."""
    assert {"auditing/adapter.py", "__init__.py", "__main__.py"} == {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        for name in imported(path)
        if name.startswith("boostax.auditing") != (path.parent.name == "auditing")
    }
    known = {x.rpartition(".")[0] for x in imported(ROOT / "auditing/adapter.py")}
    own = "_core.late _core.replicas _core.types accumulate.window train.step"
    assert known - {"boostax._core"} == {f"boostax.{name}" for name in own.split()}


def test_the_package_of_layers_is_known_to_one_file():
    others = [path for path in sorted(ROOT.rglob("*.py")) if path.parent.name != "layers"]
    known = [x for x in others if any(y.startswith("boostax.layers") for y in imported(x))]
    assert known == [ROOT / "train/__init__.py"]
    names = re.compile(r"scan_layers|\b(layers=|Layer(s|edOracle)\b)")
    below = [x for x in others if x.parent.name in ("_core", "precision", "reduce", "accumulate")]
    assert not [x for x in below if names.search(x.read_text())]


def test_only_what_loads_late_looks_modules_up_by_name():
    """A package's ``__init__`` by ``late``."""
    paths = [path for path in ROOT.rglob("*.py") if "import_module(" in path.read_text()]
    assert {str(path.relative_to(ROOT)) for path in paths} <= {"__init__.py", "_core/late.py"}
