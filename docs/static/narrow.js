// On a phone show a table of text as blocks.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const columns = [...table.querySelectorAll("thead th")].map((th) => th.textContent);
    const cells = [...table.querySelectorAll("td")];
    const prose = table.textContent.length > 20 * cells.length;
    if (!prose || columns.length < 3 || window.innerWidth > 736) continue;
    table.classList.add("narrow");
    for (const row of table.tBodies[0].rows)
      [...row.cells].forEach((cell, i) => (cell.dataset.column = columns[i]));
  }
});
