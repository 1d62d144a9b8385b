// Tables that are sorted by a click on a heading, and filtered by what stands in a column.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();

  const compare = (kind, column, sign) => (a, b) => {
    const [one, other] = [value(a, column), value(b, column)];
    if (kind === "text") return sign * one.localeCompare(other);
    const [x, y] = [one, other].map((text) => (text === "" ? NaN : Number(text)));
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y); // what has no number comes last
    return x === y ? 0 : sign * (x < y ? -1 : 1);
  };
  const sort = (column) => {
    const order = { undefined: "descending", descending: "ascending" }[heads[column].ariaSort ?? undefined];
    for (const head of heads) head.removeAttribute("aria-sort");
    if (order) heads[column].setAttribute("aria-sort", order);
    const sorted = order ? rows.toSorted(compare(heads[column].dataset.sort, column, order === "ascending" ? 1 : -1)) : rows;
    body.append(...sorted);
    table.classList.toggle("sorted", Boolean(order));
  };
  heads.forEach((head, column) => {
    if (!head.dataset.sort) return;
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent });
    button.addEventListener("click", () => sort(column));
    head.replaceChildren(button);
  });

  const filters = table.parentElement.previousElementSibling;
  const count = Object.assign(document.createElement("span"), { className: "small" });
  count.setAttribute("role", "status");
  const chosen = new Map();
  const filter = () => {
    for (const row of rows) row.hidden = [...chosen].some(([column, wanted]) => wanted && value(row, column) !== wanted);
    const shown = rows.filter((row) => !row.hidden).length;
    count.textContent = shown < rows.length ? `${shown} of ${rows.length} rows` : "";
    table.classList.toggle("filtered", shown < rows.length);
  };
  heads.forEach((head, column) => {
    const values = [...new Set(rows.map((row) => value(row, column)))];
    if (head.dataset.filter === undefined || values.length < 2) return;
    const select = document.createElement("select");
    select.append(new Option("all", ""), ...values.map((text) => new Option(text, text)));
    select.addEventListener("change", () => {
      chosen.set(column, select.value);
      filter();
    });
    const label = document.createElement("label");
    label.append(`${head.textContent} `, select);
    filters.append(label);
  });
  filters.append(count);
  filters.hidden = filters.children.length < 2;
}
