"""Hold the first page that the site's own search finds to what one looks for.

``python docs/search.py build/site`` prints the first page of each query, found by the programs that
the site has for a browser, and fails if it is another one.
"""

import json
import pathlib
import sys

from pyright import node

FIRST = {
    "checkpoint": "docs/saving",
    "resume": "docs/saving",
    "orbax": "docs/saving",
    "skip bad steps": "docs/cards/loss_scaling",
    "NaN": "docs/cards/loss_scaling",
    "FSDP": "docs/placements",
    "ZeRO": "docs/placements",
    "MultiSteps": "docs/coming_from/optax",
    "accumulate": "docs/cards/accumulate",
    "NNX": "docs/loops/nnx",
    "freeze": "docs/cards/freezing",
}
# What the programs use of a browser.
BROWSER = """
"use strict";
const { readFileSync } = require("fs"), { createContext, runInContext } = require("vm");
const [site, queries] = process.argv.slice(1);
const document = { getElementById: () => null };
const page = createContext({
  document, _: (text) => text, _ready() {}, _removeChildren() {}, SPHINX_HIGHLIGHT_ENABLED: false,
});
page.window = page;
const run = (text) => runInContext(text, page);
for (const name of ["_static/language_data", "_static/searchtools", "searchindex"])
  run(readFileSync(`${site}/${name}.js`, "utf8"));
for (const query of JSON.parse(queries)) {
  const found = run(`Search._performSearch(...Search._parseQuery(${JSON.stringify(query)}))`);
  console.log(found.pop()?.[0] ?? "nothing");
}
"""


def first_pages(site: pathlib.Path, queries: list[str]) -> list[str]:
    """Return the first page of each query."""
    how = {"capture_output": True, "text": True, "check": True}
    done = node.run("node", "-e", BROWSER, "--", str(site), json.dumps(queries), **how)
    return str(done.stdout).split()


if __name__ == "__main__":
    found = first_pages(pathlib.Path(sys.argv[1]), list(FIRST))
    for (query, page), first in zip(FIRST.items(), found, strict=True):
        print(f"{query}: {first}" + ("" if first == page else f", not {page}"))
    sys.exit(found != list(FIRST.values()))
