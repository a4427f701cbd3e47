"""Change one line of a file of the library, drawn by a seed, and see that quick tests notice.

``python tests/mutate.py gate 3 7`` works in a copy of the checkout: it prints three changes, of the
seeds from 7, and the test that fails of each, and ends with an error where one survives. ``all``
in the place of a file draws the file, too. With ``--fast`` as the first argument ``make test-fast``
decides alone.
"""

import ast
import difflib
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
# By file the tests that are run first; then all quick ones.
FILES = {
    "_core/gate": "test_loss_scale test_compat test_accumulate test_errors test_contract",
    "accumulate/window": "test_accumulate test_errors test_contract test_pair_laws test_fuzz",
    "reduce/feedback": "test_compressed test_errors test_contract test_singa_modes",
    "train/oracle": "test_train_step test_errors test_mapped_losses test_carried test_on_mesh",
    "reduce/quantized": "test_compressed test_wire_bytes test_errors test_contract",
    "freeze/scheduled": "test_freeze test_freeze_groups test_migrate test_errors test_contract",
    "subspace/dim_reduce": "test_dim_reduce test_subspace_train test_errors test_contract",
    "reduce/pairwise": "test_adasum test_adasum_travel test_errors test_contract",
    "precision/loss_scale": "test_loss_scale test_errors test_contract",
    "precision/store": "test_store test_errors test_contract",
}
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or,
    ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def changed(node):
    """Return a node in the place of this one, or ``None`` where there is nothing to change."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        return ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        return ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(SWAPS[type(node.op)](), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.IfExp):
        return ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return ast.Constant(node.value + 1)
    where = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "where"
    if where and len(node.args) == 3:
        return ast.Call(node.func, [node.args[0], *node.args[:0:-1]], node.keywords)
    return None


def places(tree):
    """List what can be changed on one line: no text, type, check or annotation."""
    found, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.AnnAssign, ast.arguments)):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue
        said = [*getattr(node, "decorator_list", []), getattr(node, "returns", None)]
        stack += [x for x in ast.iter_child_nodes(node) if x not in said]
        if getattr(node, "lineno", 0) == getattr(node, "end_lineno", 1) and changed(node):
            found.append(node)
    return sorted(found, key=lambda node: (node.lineno, node.col_offset, node.end_col_offset))


def mutant(text, seed):
    """Return the program with one place changed."""
    node = random.Random(seed).choice(places(ast.parse(text)))
    lines = text.encode().splitlines(keepends=True)
    line = lines[node.lineno - 1]
    new = b"(" + ast.unparse(changed(node)).encode() + b")"
    lines[node.lineno - 1] = line[: node.col_offset] + new + line[node.end_col_offset :]
    return b"".join(lines).decode()


def killer(checkout, command):
    """Return the first test that fails, or ``None``."""
    run = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    failed = [x for x in run.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else None if run.returncode == 0 else run.stdout[-300:]


def nearest(path):
    """Return the test files that name most of what a file of the library defines."""
    if path in FILES:
        return FILES[path].split()
    tree = ast.parse((ROOT / f"boostax/{path}.py").read_text())
    words = [path.rpartition("/")[2], *(x.name for x in tree.body if hasattr(x, "name"))]
    tests = {x.stem: x.read_text() for x in sorted((ROOT / "tests").glob("test_*.py"))}
    rare = {word: 1 / (1 + sum(text.count(word) for text in tests.values())) for word in words}
    score = {k: sum(x * text.count(word) for word, x in rare.items()) for k, text in tests.items()}
    return sorted(tests, key=score.get, reverse=True)[:5]


def commands(path, fast):
    """Return the commands that judge a change: the nearest tests, the fast ones, all."""
    if fast:
        return [["make", "-s", "-o", ".venv/.ready", "test-fast", "OPTIONS=-x -p no:cacheprovider"]]
    # A test may run a program of its own, which takes the changed copy, too.
    pytest = ["env", "PYTHONPATH=.", sys.executable, *"-m pytest -x -q -p no:cacheprovider".split()]
    rest = [*pytest, "-n", "2", "--dist", "loadfile", "tests"]
    return [[*pytest, *[f"tests/{name}.py" for name in nearest(path)]], [*rest, "--fast"], rest]


def drawn(seed):
    """Return a file of the library, drawn in proportion to what can be changed in it."""
    files = sorted((ROOT / "boostax").rglob("*.py"))
    sizes = [len(places(ast.parse(file.read_text()))) for file in files]
    (file,) = random.Random(seed).choices(files, sizes)
    return file.relative_to(ROOT / "boostax").with_suffix("").as_posix()


def main(name, draws, first=0, fast=False):
    with tempfile.TemporaryDirectory() as room:
        checkout = pathlib.Path(room) / "boostax"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        (checkout / ".venv").symlink_to(sys.prefix)
        survivors = 0
        for seed in range(first, first + draws):
            path = drawn(seed) if name == "all" else next(x for x in FILES if x.endswith(name))
            target = checkout / "boostax" / f"{path}.py"
            text = target.read_text()
            target.write_text(mutant(text, seed))
            diff = difflib.unified_diff(text.splitlines(), target.read_text().splitlines(), n=0)
            print(f"{path}, seed {seed}:", *list(diff)[3:], sep="\n  ", flush=True)
            found = next(filter(None, (killer(checkout, x) for x in commands(path, fast))), None)
            survivors += found is None
            print(f"  {found or 'SURVIVES'}", flush=True)
            target.write_text(text)
    sys.exit(f"{survivors} of {draws} survive" if survivors else 0)


if __name__ == "__main__":
    arguments = [x for x in sys.argv[1:] if x != "--fast"]
    main(arguments[0], *map(int, arguments[1:]), fast="--fast" in sys.argv)
