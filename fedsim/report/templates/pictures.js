// Pictures: iterations, order, difference, and one image enlarged.
"use strict";
{
  const section = document.querySelector("#pictures");
  const tools = section?.querySelector(".tools");

  const setUpIterations = (progress) => {
    const told = tools.querySelector("output");
    const rows = [...section.querySelectorAll("tr[data-steps]")].map((row) => ({
      row,
      when: row.querySelector(".when"),
      lines: Number(row.dataset.lines),
      steps: row.dataset.steps.split(" ").map(Number),
    }));
    const show = () => {
      const share = Number(progress.value) / 100;
      for (const { row, when, lines, steps } of rows) {
        const end = steps[lines - 1];
        const line = steps.findLastIndex((step) => step <= share * end);
        const early = share < 1 && line >= 0;
        row.classList.toggle("early", early);
        row.style.setProperty("--m", early ? lines : 1);
        row.style.setProperty("--s", early ? line : 0);
        when.textContent = early ? `; after iteration ${steps[line]}` : "";
      }
      told.textContent = share < 1 ? `${progress.value}\u00a0% of the iterations; numbers are of the end` : "at the end";
    };
    progress.addEventListener("input", show);
    let playing = 0;
    tools.querySelector(".play").addEventListener("click", () => {
      clearInterval(playing);
      progress.value = 0;
      show();
      playing = setInterval(() => {
        progress.value = Number(progress.value) + 2;
        show();
        if (Number(progress.value) >= 100) clearInterval(playing);
      }, 80);
    });
  };

  const setUpOrder = (order) => {
    const victims = [...section.querySelectorAll(".victim")];
    const tables = victims.map((victim) => {
      const rows = [...victim.querySelectorAll("tr")].map((row) => ({ row, cells: [...row.querySelectorAll("td")] }));
      return { victim, rows, first: victim.querySelector(".original") };
    });
    const places = (rows, name, sign) => {
      const heads = rows[0].cells;
      const value = (cell) => {
        const text = cell.getAttribute(name);
        return text === null || text === "NaN" ? Infinity : sign * Number(text);
      };
      return [...heads.keys()].sort((a, b) => value(heads[a]) - value(heads[b]) || a - b);
    };
    order.addEventListener("change", () => {
      const metric = order.value;
      const sign = order.selectedOptions[0].dataset.better === "lower" ? 1 : -1;
      const name = `data-${metric}`;
      const best = new Map();
      for (const { victim, rows, first } of tables) {
        if (!first) continue;
        const found = metric ? places(rows, name, sign) : [...rows[0].cells.keys()];
        for (const { row, cells } of rows) row.append(...found.map((place) => cells[place]).filter(Boolean));
        best.set(victim, metric ? sign * Number(rows[0].cells[found[0]].getAttribute(name) ?? NaN) : 0);
      }
      const rank = (victim) => (Number.isNaN(best.get(victim) ?? NaN) ? Infinity : best.get(victim));
      const sorted = [...victims.keys()].sort((a, b) => rank(victims[a]) - rank(victims[b]) || a - b);
      const end = section.querySelector(".zoom");
      for (const place of sorted) end.before(victims[place]);
    });
  };

  const setUpZoom = (zoom) => {
    let at = null;
    const enlarged = (title, tile, ...extra) => {
      const figure = document.createElement("figure");
      const copy = document.createElement("span");
      const large = getComputedStyle(tile);
      const [width, height] = [parseFloat(large.width), parseFloat(large.height)];
      const factor = Math.max(1, Math.floor(Math.min(290, innerWidth - 80) / width));
      copy.className = tile.className;
      copy.setAttribute("role", "img");
      copy.setAttribute("aria-label", title);
      for (const name of ["--i", "--n", "--m", "--s"]) copy.style.setProperty(name, large.getPropertyValue(name));
      copy.style.setProperty("--w", `${factor * width}px`);
      copy.style.setProperty("--h", `${factor * height}px`);
      figure.classList.add(...extra);
      figure.append(copy, Object.assign(document.createElement("figcaption"), { textContent: title }));
      return figure;
    };
    const show = (tile) => {
      at = tile;
      const row = tile.closest("tr");
      const place = [...row.querySelectorAll("td")].indexOf(tile.closest("td"));
      const original = row.closest("table").querySelectorAll(".original .tile")[place];
      const early = row.classList.contains("early") ? ["early"] : [];
      const figures = [];
      if (original && original !== tile) figures.push(enlarged("original", original));
      figures.push(enlarged(tile.getAttribute("aria-label"), tile, ...early));
      if (original && original !== tile) figures.push(enlarged("difference: black where both are the same", tile, "difference", ...early));
      zoom.querySelector(".shown").replaceChildren(...figures);
      const caption = tile.parentElement.querySelector(".small")?.textContent ?? "";
      const victim = row.closest(".victim").querySelector("h3").textContent;
      zoom.querySelector(".told").textContent = [victim, tile.getAttribute("aria-label"), caption && `PSNR ${caption} dB`].filter(Boolean).join("; ");
      if (!zoom.open) zoom.showModal();
    };
    const neighbour = (tile, key) => {
      const row = tile.closest("tr");
      const tiles = [...row.querySelectorAll(".tile")];
      const place = tiles.indexOf(tile);
      const rows = [...row.closest("table").querySelectorAll("tr")];
      const other = { ArrowUp: -1, ArrowDown: 1 }[key];
      if (other) return rows[rows.indexOf(row) + other]?.querySelectorAll(".tile")[place];
      return { ArrowLeft: tiles[place - 1], ArrowRight: tiles[place + 1], Home: tiles[0], End: tiles.at(-1) }[key];
    };
    const go = (tile) => {
      at.tabIndex = -1;
      tile.tabIndex = 0;
      tile.focus();
      if (zoom.open) show(tile);
      at = tile;
    };
    for (const table of section.querySelectorAll(".grid")) {
      const tiles = table.querySelectorAll(".tile");
      for (const tile of tiles) tile.tabIndex = -1;
      if (tiles[0]) tiles[0].tabIndex = 0;
      for (const tile of tiles) tile.setAttribute("role", "button");
    }
    section.addEventListener("click", (event) => {
      const tile = event.target.closest(".grid .tile");
      if (tile) show(tile);
    });
    section.addEventListener("keydown", (event) => {
      const tile = zoom.open ? at : event.target.closest(".grid .tile");
      if (!tile || event.target.closest("button")?.matches(":not(.close)")) return;
      if (!zoom.open && (event.key === "Enter" || event.key === " ")) {
        event.preventDefault();
        show(tile);
        return;
      }
      const next = neighbour(tile, event.key);
      if (!next) return;
      event.preventDefault();
      at = tile;
      if (zoom.open) show(next);
      else go(next);
    });
    zoom.querySelector(".close").addEventListener("click", () => zoom.close());
    zoom.addEventListener("close", () => at?.focus());
  };

  if (tools) {
    tools.hidden = false;
    const progress = tools.querySelector(".progress");
    const order = tools.querySelector(".order");
    if (progress) setUpIterations(progress);
    if (order) setUpOrder(order);
    tools.querySelector(".difference")?.addEventListener("change", (event) => section.classList.toggle("difference", event.target.checked));
    setUpZoom(section.querySelector(".zoom"));
  }
}
