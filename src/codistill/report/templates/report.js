"use strict";

// A box shows and hides the lines that its value selects; a box without a value switches all others of its form.
function show(box) {
  if (box.value) {
    for (const line of document.querySelectorAll(box.value)) line.classList.toggle("hidden", !box.checked);
  }
}

for (const form of document.querySelectorAll(".switches")) {
  const boxes = [...form.querySelectorAll("input")];
  form.addEventListener("change", ({ target }) => {
    if (!target.value) for (const box of boxes) box.checked = target.checked;
    for (const box of boxes) {
      if (!box.value) box.checked = boxes.every((other) => !other.value || other.checked);
      show(box);
    }
  });
  boxes.forEach(show); // a browser may have kept the boxes as they were
}

// A click on a heading sorts the table by its column; another click reverses the order.
for (const head of document.querySelectorAll("th")) {
  head.addEventListener("click", () => {
    const body = head.closest("table").tBodies[0];
    const rising = head.ariaSort !== "ascending";
    const cell = (row) => row.cells[head.cellIndex];
    const number = (row) => (isNaN(cell(row).dataset.by) ? -Infinity : Number(cell(row).dataset.by));
    const byText = (a, b) => cell(a).textContent.localeCompare(cell(b).textContent, undefined, { numeric: true });
    const byNumber = (a, b) => number(a) - number(b) || 0; // two that are missing are equal
    const rows = [...body.rows].sort(head.classList.contains("left") ? byText : byNumber);
    body.append(...(rising ? rows : rows.reverse()));
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
  });
}
