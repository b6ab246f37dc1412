// Zoom and names of the timeline. Without this script the page shows the whole iteration.
(() => {
  const svg = document.getElementById("bars"), axis = document.getElementById("axis"), tip = document.getElementById("tip");
  const box = svg.viewBox.baseVal, whole = box.width, seconds = Number(svg.dataset.seconds);
  let from = 0, to = whole;

  const told = (s) => {
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
      if (Math.abs(s) >= scale) return `${Number((s / scale).toPrecision(4))} ${unit}`;
    return s ? `${Number((s * 1e9).toPrecision(3))} ns` : "0 s";
  };
  const at = (event) => {
    const frame = svg.getBoundingClientRect();
    return from + (to - from) * Math.min(1, Math.max(0, (event.clientX - frame.left) / frame.width));
  };
  const view = (a, b) => {
    const span = Math.min(whole, Math.max(b - a, whole / 5000));
    from = Math.min(Math.max(0, a), whole - span);
    to = from + span;
    svg.setAttribute("viewBox", `${from} 0 ${span} ${box.height}`);
    const ticks = Array.from({ length: 7 }, (_, i) => i / 6);
    axis.replaceChildren(...ticks.map((part) => {
      const tick = document.createElement("span");
      tick.style.left = `${100 * part}%`;
      tick.textContent = told(seconds * (from + part * span) / whole);
      return tick;
    }));
  };
  const scaled = (factor, middle = (from + to) / 2) => view(middle - (middle - from) * factor, middle + (to - middle) * factor);

  document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () =>
    ({ in: () => scaled(0.5), out: () => scaled(2), all: () => view(0, whole) })[button.dataset.zoom]()));
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; // a plain wheel scrolls the page
    event.preventDefault();
    const turn = event.deltaY || event.deltaX;
    if (event.shiftKey) view(from + turn * (to - from) / 800, to + turn * (to - from) / 800);
    else scaled(Math.exp(turn / 300), at(event));
  }, { passive: false });

  let start = null;
  svg.addEventListener("pointerdown", (event) => { start = at(event); });
  window.addEventListener("pointerup", (event) => {
    if (start === null) return;
    const end = at(event);
    if (Math.abs(end - start) > (to - from) / 200) view(Math.min(start, end), Math.max(start, end));
    start = null;
  });
  svg.addEventListener("dblclick", () => view(0, whole));

  svg.addEventListener("pointermove", (event) => {
    const bar = event.target;
    tip.hidden = bar.tagName !== "rect";
    if (tip.hidden) return;
    const lane = bar.parentNode, index = Array.prototype.indexOf.call(lane.children, bar) - 1;
    const unit = seconds / whole, x = bar.x.baseVal.value, width = bar.width.baseVal.value;
    tip.textContent = index < 0 ? `${lane.dataset.lane}\nwaiting` :
      `${lane.dataset.lane}\n${lane.dataset.n.split(" ")[index].replaceAll("_", " ")}: ${told(width * unit)}, from ${told(x * unit)}`;
    tip.style.left = `${Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 16}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  view(0, whole);
})();
