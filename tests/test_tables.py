"""Every table of a page is that of its record, and no measured number stands beside one."""

import re

import harness
import pytest
import tables

# Written whole by a benchmark from its record; tests/test_results.py holds it to that.
WRITTEN = {"compilers"}
PAGES = [page for page in tables.pages() if page.stem not in WRITTEN]
# Sections of these titles state measurements, and so does every block that links to a record.
MEASURING = re.compile(r"#+ (?:Measured.*|What it costs|Cost|When .*do(?:es)? not pay)\n")
CODE = re.compile(r"^ *```.*?^ *```$|`+[^`]+`+|(?<=\])\([^)\s]+\)|<!-- .*?-->", re.S | re.M)
MEASURED = re.compile(r"\d\.\d|\d%|± ")
# Numbers that are none of a record: the verdicts' rule, and another paper's.
GIVEN = ("10% of time", "10% more time", "MLSys 2022")


def relative(page):
    return str(page.relative_to(tables.ROOT))


def measured(text):
    """The blocks that state measurements, without tables that are generated and without code."""
    found = []
    for section in re.split(r"^(?=#+ )", tables.TABLE.sub("", text), flags=re.M):
        blocks = section.split("\n\n")
        if not MEASURING.match(section):
            blocks = [block for block in blocks if "benchmarks/results/" in block]
        found += [CODE.sub("", block) for block in blocks]
    return found


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_table_is_that_of_its_record(page):
    """After a benchmark: ``python benchmarks/tables.py --write``."""
    assert tables.rewritten(page.read_text(), page) == page.read_text()


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_no_measured_number_is_written_by_hand(page):
    lines = [x.strip() for block in measured(page.read_text()) for x in block.splitlines()]
    assert not [x for x in lines if MEASURED.search(x) and not any(given in x for given in GIVEN)]


TEMPLATE = """<!-- table: toy > A Table
| form | accuracy | time | of plain |
| {form} | {right ± s.e. : .1%} | {time : ms .0f} | {time ÷ plain & 3 : .2f} |
| all | {boostax > right : +.1f} | {toy > Other > a > b} | |
rows: plain & 3; boostax & 3
-->
"""
TABLE = f"""| form | accuracy | time | of plain |
|---|---|---|---|
| plain | 98.0 ± 0.1% | 800 | 1.00 |
| boostax | {tables.MINUS}1.9 ± 0.0% | 1000 | 1.25 |
| all | 0.0 | {tables.EMPTY} | |

From [toy](results/toy.md).
"""
ROWS = [
    {"form": "plain", "seeds": 3, "time": 0.8, "right": 0.98, "s.e.": 0.001},
    {"form": "boostax", "seeds": 3, "time": 1.0, "right": -0.019, "s.e.": 0.0},
]


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page beside a record of two rows, which stands in the place of all others."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    sections = [("A Table", ROWS), ("Other", [{"a": "a", "b": None}])]
    harness.report("toy", "Toy", sections, [])
    assert harness.sections_of("toy") == dict(sections)
    return tmp_path / "page.md"


def test_a_table_that_disagrees_is_written_anew(page):
    right = f"Before.\n\n{TEMPLATE}{TABLE}<!-- end of table -->\n\nBehind.\n"
    assert tables.rewritten(right.replace("1.25", "1.3"), page) == right
    assert tables.rewritten(right, page) == right


ERRORS = [
    ("toy > A", "other > A", "no such record"),
    ("A Table", "Tale", r"one section must have 'Tale', got \[\]"),
    ("boostax & 3", "boost & 3", r"one row must be \['boost', '3'\], got 0"),
    ("plain & 3; ", "plain & 4; ", "got 0"),
    ("{time :", "{tine :", "columns must be of"),
    ("ms .0f", "miles .0f", "a unit must be one of"),
    ("{form}", "{form : .1f}", "the cell is 'plain'"),
    ("toy > Other", "x > toy > Other", "must be given"),
    ("-->", "-- >", "a template must end"),
]


@pytest.mark.parametrize("old, new, error", ERRORS)
def test_what_leads_nowhere_is_an_error(page, old, new, error):
    text = f"{TEMPLATE.replace(old, new, 1)}{TABLE}<!-- end of table -->\n"
    with pytest.raises(tables.TableError, match=error):
        tables.rewritten(text, page)


# Tables whose rows set a record beside its rival: which of their cells quote it, which the rival.
ALL = 2, (2, 3, 4)
SET_BESIDE = {
    "| | measured | boostax | instead | record |": (2, (3,)),
    "| | wins where | measured | loses where | what costs nothing instead | record |": ALL,
}
QUOTED = re.compile(rf"<!-- table:\n({'|'.join(map(re.escape, SET_BESIDE))})\n(.*?)\n-->", re.S)
QUOTING = [page for page in PAGES if QUOTED.search(page.read_text())]
# Counts of compiled programs have no error; ratios of clocks are of one run, the rival beside.
EXACT = ("MB ", "bytes ", "FLOPs ", "temp ", "memory", "v5e", "CPU", "H100")
CLOCKS = ("ms", "time", "window / ", "effective step / ", "with compiling / ")


def quotes(line, cells):
    """Paths of records in some cells of a row."""
    found = [cell for i in cells for cell in tables.CELL.findall(line.strip("|").split("|")[i])]
    return [tuple(cell.split(" : ")[0].split(" > ")) for cell in found]


def unfair(lines, ours, instead):
    """What rows lack that quote a record: the rival of the same table, or the error."""
    found, rivals = [], []
    for line in lines:
        if line.strip("|").split("|")[instead[-1]].strip() != "the same":
            rivals = quotes(line, instead)
        for path in quotes(line, [ours]):
            beside = [other for other in rivals if other[:2] == path[:2]]
            # Pairs and points are beside the rival that the row of the record names.
            named = path[1] == "Pairs" or "points" in path[-1]
            if not named and all(other[2] == path[2] for other in beside):
                found.append(f"no rival from {path[:2]}")
            if "±" not in path[-1] and not path[-1].startswith(EXACT + CLOCKS):
                found.append(f"no error of {path}")
    return found


@pytest.mark.parametrize("page", QUOTING, ids=relative)
def test_a_row_that_quotes_a_record_quotes_its_rival_and_its_error(page):
    for header, rows in QUOTED.findall(page.read_text()):
        assert rows and unfair(rows.splitlines(), *SET_BESIDE[header]) == []


def test_the_front_pages_have_such_rows():
    assert {page.stem for page in QUOTING} >= {"README", "parity", "sceptic"}
