// Tells the values of a chart under the mouse, a finger or the arrow keys.
"use strict";
for (const chart of document.querySelectorAll(".chart")) {
  const svg = chart.querySelector(":scope > svg");
  const places = [...svg.querySelectorAll(".stop, .mark")];
  const readout = chart.querySelector(".readout");
  let at = -1;
  const show = (place) => {
    places[at]?.classList.remove("at");
    at = place;
    places[at]?.classList.add("at");
    readout.textContent = places[at]?.querySelector("title").textContent ?? "";
  };
  const steps = {
    ArrowRight: () => Math.min(at + 1, places.length - 1),
    ArrowLeft: () => Math.max(at - 1, 0),
    Home: () => 0,
    End: () => places.length - 1,
    Escape: () => -1,
  };
  svg.addEventListener("pointermove", (event) => {
    const place = places.indexOf(event.target.closest(".stop, .mark"));
    if (place !== at && place >= 0) show(place);
  });
  svg.addEventListener("pointerleave", () => show(-1));
  svg.addEventListener("blur", () => show(-1));
  svg.addEventListener("focusin", (event) => {
    const mark = event.target.querySelector?.(":scope > .mark");
    if (mark) show(places.indexOf(mark));
  });
  svg.addEventListener("keydown", (event) => {
    if (!(event.key in steps)) return;
    event.preventDefault();
    show(steps[event.key]());
  });
}
