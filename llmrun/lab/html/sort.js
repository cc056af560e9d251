"use strict";
for (const head of document.querySelectorAll("thead th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  button.onclick = () => {
    const body = head.closest("table").tBodies[0], column = head.cellIndex;
    const sign = head.ariaSort === "ascending" ? -1 : 1, cell = row => row.cells[column];
    for (const other of head.parentNode.cells) other.ariaSort = "none";
    head.ariaSort = sign > 0 ? "ascending" : "descending";
    const number = row => parseFloat(cell(row).dataset.v ?? "Infinity");
    body.append(...[...body.rows].sort((a, b) =>
      sign * (number(a) - number(b) || cell(a).innerText.localeCompare(cell(b).innerText))));
  };
}
