// Draws a chart from its Vega-Lite JSON when it comes near the screen. Until then, and if scripts
// are off or drawing fails, its PNG is shown.
"use strict";

const OPTIONS = {
  renderer: "svg",
  actions: { export: true, source: false, compiled: false, editor: false },
};

async function draw(figure) {
  const picture = figure.querySelector("img");
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const stage = document.createElement("div");
  stage.hidden = true;
  figure.append(stage);
  try {
    await vegaEmbed(stage, { description: picture.alt, ...spec }, OPTIONS);
    stage.querySelector("summary").ariaLabel = "Save this chart";
    const drawing = stage.querySelector("svg.marks");
    drawing.style.setProperty("--chart-width", `${drawing.width.baseVal.value}px`);
    picture.hidden = true;
    stage.hidden = false;
    figure.dataset.drawn = "yes";
  } catch (error) {
    stage.remove();
    figure.dataset.drawn = "no";
    console.error("A chart could not be drawn:", error);
  }
}

const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        watcher.unobserve(entry.target);
        draw(entry.target);
      }
    }
  },
  { rootMargin: "800px" },
);

for (const figure of document.querySelectorAll("figure.chart")) watcher.observe(figure);
