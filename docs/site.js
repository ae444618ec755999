// What scrolls sideways takes the keyboard, and has a name that is read aloud.
addEventListener("load", () => setTimeout(() => {
  const scrolls = document.querySelectorAll(".md-typeset__scrollwrap, .loop-figure, pre > code");
  scrolls.forEach((part, i) => {
    if (part.scrollWidth <= part.clientWidth) return;
    part.tabIndex = 0;
    if (part.tagName !== "CODE") Object.entries({ role: "region", "aria-label": `wide part ${i + 1}` }).forEach(([k, v]) => part.setAttribute(k, v));
  });
  document.querySelectorAll(".md-code__nav").forEach((nav, i) => nav.setAttribute("aria-label", `code ${i + 1}`));
}, 50));
