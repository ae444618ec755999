"use strict";
// Fills the page from the JSON that `report.py` made. Text of a run is only ever set as text, never as markup.
const {written, live, runs, figures, plan} = JSON.parse(document.getElementById("data").textContent);
const first = runs[0], one = runs.length === 1;

// --- elements and numbers ---

const SVG = new Set(["svg", "line", "circle", "title"]);

/** An element with attributes and children; "onclick" and the like are listeners; null, undefined and false are left out. */
function h(tag, attributes = {}, ...children) {
  const drawn = SVG.has(tag);
  const element = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

/** A number in about four digits; "–" if there is none. What is not finite is text already. */
function number(x) {
  if (x === null || x === undefined) return "–";
  if (typeof x === "string") return x;
  if (Number.isInteger(x)) return x.toLocaleString("en");
  const size = Math.abs(x);
  return size < 0.001 ? x.toExponential(1) : x.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 3);
}
const reward = (x, digits = 3) => typeof x === "number" ? x.toFixed(digits) : x ?? "–";
const known = values => (values || []).filter(value => value !== null);
const sum = values => values.reduce((a, b) => a + b, 0);
const mean = values => values.length ? sum(values) / values.length : null;
const median = values => values.length ? [...values].sort((a, b) => a - b)[values.length >> 1] : null;
const ascending = values => [...new Set(values)].sort((a, b) => a - b);
const grouped = (items, name) => items.reduce((groups, item) => {
  if (!groups.has(item[name])) groups.set(item[name], []);
  groups.get(item[name]).push(item);
  return groups;
}, new Map());
const color = run => `var(--run-${run % 6})`;

/** Adds a section to the page and to its navigation. */
function section(id, title, note, ...children) {
  document.querySelector("nav ul").append(h("li", {}, h("a", {href: `#${id}`}, title)));
  const heading = h("h2", {id: `${id}-title`}, title);
  document.querySelector("main").append(
    h("section", {id, "aria-labelledby": `${id}-title`}, heading, h("p", {class: "note"}, note), children));
}
/** A table that scrolls by itself where the screen is too narrow. */
function table(label, heads, rows, attributes = {}) {
  const row = ([name, ...cells]) => h("tr", {}, h("th", {scope: "row"}, name), cells.map(cell => h("td", {}, cell)));
  const head = h("tr", {}, heads.map(name => h("th", {scope: "col"}, name)));
  return h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": label, ...attributes},
    h("table", {}, h("thead", {}, head), h("tbody", {}, rows.map(row))));
}
const name = (run, i) => h("li", {style: `--color: ${color(i)}`}, run.name);
const names = () => one ? null : h("ul", {class: "key"}, runs.map(name));

// --- overview ---

const done = run => Math.max(...run.metrics.iteration);
const total = (run, ...metrics) => sum(metrics.flatMap(metric => known(run.metrics[metric])));
/** The median over iterations; the first is left out, because it compiles. */
function typical(run, metric) {
  const values = known(run.metrics[metric]);
  return median(values.length > 1 ? values.slice(1) : values);
}
/** The first and the last value of an evaluated metric, and the last one's standard error. */
function change(run, metric) {
  const values = known(run.metrics[metric]), error = known(run.metrics[`${metric}/standard_error`]).at(-1);
  if (!values.length) return ["–", "not evaluated yet"];
  const shown = values.length > 1 ? `${number(values[0])} → ${number(values.at(-1))}` : number(values[0]);
  return [shown, error === undefined ? "" : `± ${number(error)}, one standard error`];
}
/** Key figures of a run: name, value, note. */
function facts(run) {
  const strict = Object.keys(run.metrics).find(metric => /^eval\/.*\/strict$/.test(metric));
  const recent = known(run.metrics["fidelity/spearman"]).slice(-5);
  const seconds = typical(run, "seconds"), rate = typical(run, "images_per_second/explore");
  const failures = Object.keys(run.metrics).filter(metric => metric.startsWith("reward_failures/"));
  const failed = failures.length ? `; ${number(total(run, ...failures))} pictures without a score` : "";
  return [
    ["Held-out reward", ...change(run, "eval/reward")],
    ...strict ? [["Strict success, held-out", ...change(run, strict)]] : [],
    ["Rank fidelity", number(mean(recent)), `Spearman over kept, mean of the last ${recent.length}`],
    ["An iteration", seconds === null ? "–" : `${number(seconds)} s`, rate && `${number(rate)} pictures a second explored`],
    ["Skipped", number(total(run, "skipped_micro_batches")), "micro-batches with a loss that is not finite"],
    ["Not finite", number(total(run, "nonfinite_rewards")), `rewards${failed}`],
  ];
}
/** The setting in which held-out figures were measured. */
function setting() {
  const say = ({facts: {evaluation}}) => evaluation ? `Held-out: ${evaluation}; averaged policy.` :
    "How held-out figures were measured is in the configuration.";
  const same = new Set(runs.map(say)).size === 1;
  return same ? say(first) : "Held-out figures of these runs were measured in different settings: see the configuration.";
}
function overview() {
  const tile = ([name, value, note]) => h("div", {}, h("dt", {}, name), h("dd", {class: "value"}, value), h("dd", {}, note));
  if (one) return section("overview", "Overview", setting(), h("dl", {class: "tiles"}, facts(first).map(tile)));
  const titles = [...new Set(runs.flatMap(run => facts(run).map(([name]) => name)))];
  const cell = (run, title) => {
    const [, value, note] = facts(run).find(([name]) => name === title) || ["", "–", ""];
    return [value, note?.startsWith("±") && h("div", {class: "muted"}, note.split(",")[0])];
  };
  const row = (run, i) => [h("span", {style: `color: ${color(i)}`}, run.name),
    `${done(run)} of ${run.config["train.iterations"]}`, ...titles.map(title => cell(run, title))];
  const heads = ["Run", "Iterations", ...titles];
  section("overview", "Overview", setting(), table("Key figures", heads, runs.map(row), {style: "white-space: nowrap"}));
}

// --- curves, drawn by matplotlib; here they learn to be read ---

function curve({metric, title, svg, axis: [x0, x1, left, right], lines}) {
  const plot = h("div"), readout = h("output"), rule = h("line", {class: "now", y1: 8, visibility: "hidden"});
  plot.innerHTML = svg;  // matplotlib's, which escapes text
  const drawing = plot.firstElementChild, {width, height} = drawing.viewBox.baseVal;
  rule.setAttribute("y2", height - 22);
  drawing.append(rule);
  const iterations = ascending(lines.flatMap(line => line.x)), last = iterations.length - 1;
  let at = last;
  const value = (line, iteration) => {
    const i = line.x.findLastIndex(x => x <= iteration);
    if (i < 0) return [];
    const whose = one ? "" : `${runs[line.run].name} `, error = line.error.length ? ` ± ${number(line.error[i])}` : "";
    return `${whose}${number(line.y[i])}${error}`;
  };
  const show = (index, visible) => {
    at = Math.max(0, Math.min(last, index));
    const x = left + (iterations[at] - x0) / (x1 - x0) * (right - left);
    const place = {x1: x, x2: x, visibility: visible ? "visible" : "hidden"};
    for (const [attribute, to] of Object.entries(place)) rule.setAttribute(attribute, to);
    readout.textContent = `Iteration ${iterations[at]}: ${lines.flatMap(line => value(line, iterations[at])).join(", ")}`;
  };
  const summary = lines.map(line => `${runs[line.run].name}: from ${number(line.y[0])} to ${number(line.y.at(-1))}`).join("; ");
  const picture = h("div", {
    role: "img", tabindex: 0, "aria-label": `${title}. ${summary}. Arrow keys read the values.`,
    onkeydown: event => {
      const step = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
      if (!step) return;
      event.preventDefault();
      show(at + step, true);
    },
    onpointermove: event => {
      const area = drawing.getBoundingClientRect(), x = (event.clientX - area.left) / area.width * width;
      const distance = iteration => Math.abs(iteration - x0 - (x - left) / (right - left) * (x1 - x0));
      show(iterations.reduce((best, iteration, i) => distance(iteration) < distance(iterations[best]) ? i : best, 0), true);
    },
    onpointerleave: () => show(last, false),
    onblur: () => show(last, false),
  }, plot);
  show(last, false);
  return h("figure", {"data-metric": metric}, h("h3", {}, title), picture, h("figcaption", {}, readout));
}
function curves(id, title, note, ...before) {
  const drawn = figures.filter(figure => figure.section === id);
  if (drawn.length) section(id, title, note, ...before, names(), h("div", {class: "curves"}, drawn.map(curve)));
}

const PHASES = {encode: 35, sync: 55, explore: 100, regenerate: 70, targets: 45, update: 20};  // and their shades, % of the accent
/** The median seconds of each phase as one bar per run, all on one scale. */
function phases() {
  const recorded = Object.keys(PHASES).filter(phase => runs.some(run => typical(run, `seconds/${phase}`)));
  const seconds = runs.map(run => recorded.map(phase => typical(run, `seconds/${phase}`) || 0));
  const longest = Math.max(...seconds.map(sum)) || 1;
  const shade = phase => `--color: color-mix(in srgb, var(--accent) ${PHASES[phase]}%, var(--paper))`;
  return h("div", {class: "phases"}, runs.map((run, r) => {
    const bars = recorded.map((phase, i) => h("span", {style: `flex: ${seconds[r][i]} 0 0; ${shade(phase)}`}));
    const share = s => Math.round(100 * s / (sum(seconds[r]) || 1));
    const said = recorded.map((phase, i) =>
      h("li", {style: shade(phase)}, `${phase} ${number(seconds[r][i])} s, ${share(seconds[r][i])} %`));
    const bar = h("div", {class: "bar", "aria-hidden": "true", style: `width: ${100 * sum(seconds[r]) / longest}%`}, bars);
    return [one ? null : h("h3", {}, run.name), bar, h("ul", {class: "key"}, said)];
  }));
}

// --- pictures ---

function picture({src, prompt}, what) {
  const image = h("img", {src, alt: `${what}: ${prompt}`});
  image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth <= 64));
  return h("span", {class: "picture"}, image);
}
/** The verifier's mark: told by its shape, and by a word for those who cannot see it. */
function mark(right) {
  if (right === null || right === undefined) return null;
  const [kind, sign, word] = right ? ["yes", "✓", " right"] : ["no", "✗", " wrong"];
  return h("span", {class: kind}, sign, h("span", {class: "hidden"}, word));
}
/** A slider over the iterations in `choices`, at the last one, and a line that says which is shown. */
function slider(id, choices, say, show) {
  const out = h("output", {for: id}), last = choices.length - 1;
  const input = h("input", {type: "range", id, min: 0, max: last, value: last, disabled: !last, oninput: () => update()});
  const update = () => {
    const choice = choices[input.value];
    out.textContent = say(choice);
    input.setAttribute("aria-valuetext", say(choice));
    show(choice);
  };
  return {controls: h("div", {class: "controls"}, h("label", {class: "wide", for: id}, "Iteration", input), out), update};
}
/** A choice among the runs, if there are several. */
function chooser(chosen, show) {
  if (one) return null;
  const options = runs.map((run, i) => h("option", {value: i, selected: i === chosen}, run.name));
  return h("label", {}, "Run", h("select", {onchange: event => show(Number(event.target.value))}, options));
}

function seeds() {
  const pictured = runs.filter(run => run.grids.length), shown = h("div");
  if (!pictured.length) return;
  const gridAt = (run, iteration) => run.grids.findLast(grid => grid.iteration <= iteration) || run.grids[0];
  const verdict = grid => {
    const marks = grid.cells.map(cell => cell.right).filter(right => right !== null);
    return marks.length ? `: ${sum(marks.map(Number))} of ${marks.length} right` : "";
  };
  const told = grid => `, ${grid.size} pixels${verdict(grid)}`;
  const say = i => (i ? `after iteration ${i}` : "before training") + (one ? told(gridAt(first, i)) : "");
  const cells = of => of.map((cell, i) => h("div", {}, picture(cell, `seed ${i + 1}`), mark(cell.right)));
  const show = iteration => shown.replaceChildren(...pictured.flatMap(run => {
    const grid = gridAt(run, iteration), prompts = [...grouped(grid.cells, "prompt")];
    const heading = h("h3", {class: "run", style: `color: ${color(runs.indexOf(run))}`}, run.name + told(grid));
    const blocks = prompts.map(([prompt, of]) => h("div", {}, h("h3", {}, prompt), h("div", {class: "row"}, cells(of))));
    return [...one ? [] : [heading], h("div", {class: "prompts"}, blocks)];
  }));
  const iterations = ascending(pictured.flatMap(run => run.grids.map(grid => grid.iteration)));
  const {controls, update} = slider("seeds-at", iterations, say, show);
  const marked = pictured.some(run => run.grids.some(verdict)) ? " ✓ and ✗ are the verifier's." : "";
  section("seeds", "Same seeds", `Held-out prompts, the same noise at every iteration.${marked}`, controls, shown);
  update();
}

// --- pools ---

/** The candidates of each run as rows. */
const candidates = runs.map(({ledger: {columns, texts}}) => columns.iteration.map((_, i) => {
  const row = Object.fromEntries(Object.keys(columns).map(name => [name, columns[name][i]]));
  return {...row, prompt: texts[row.prompt], precision: texts[row.precision]};
}));
/** The least and the largest finite reward of some candidates. */
function range(rows) {
  const finite = rows.flatMap(row => [row.proxy_reward, row.regenerated_reward]).filter(x => typeof x === "number");
  return finite.length ? [Math.min(...finite), Math.max(...finite)] : [0, 1];
}
/** All candidates of a prompt: proxy rewards by rank, and of those kept the regenerated ones. */
function strip(rows, [low, high]) {
  const W = 440, H = 96, kept = rows.filter(row => row.kept), best = rows.find(row => row.rank === 0);
  const x = row => 5 + row.rank / Math.max(1, rows.length - 1) * (W - 10);
  const y = value => H - 5 - (value - low) / (high - low || 1) * (H - 10);
  const told = (row, value, phase) => h("title", {}, `candidate ${row.candidate}, ${phase} ${reward(value)}`);
  const dot = (row, value, phase, r) => typeof value === "number" &&
    h("circle", {cx: x(row), cy: y(value), r, class: phase}, told(row, value, phase));
  const pair = row => typeof row.proxy_reward === "number" && typeof row.regenerated_reward === "number" &&
    h("line", {class: "pair", x1: x(row), x2: x(row), y1: y(row.proxy_reward), y2: y(row.regenerated_reward)});
  const label = `${rows.length} candidates by rank, best proxy reward ${reward(best?.proxy_reward)}, ${kept.length} kept`;
  return h("svg", {class: "strip", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label},
    h("line", {x1: 0, x2: W, y1: H, y2: H}),
    rows.filter(row => !row.kept).map(row => dot(row, row.proxy_reward, "pool", 1.75)), kept.map(pair),
    kept.map(row => [dot(row, row.proxy_reward, "explored", 3), dot(row, row.regenerated_reward, "regenerated", 3)]));
}
/** The best and the worst kept candidates: those with pictures, else two of each. */
function ends(rows, cells) {
  const kept = rows.filter(row => row.kept).sort((a, b) => a.rank - b.rank);
  const drawn = new Set(cells.map(cell => cell.candidate));
  const some = kept.filter((row, i) => drawn.size ? drawn.has(row.candidate) : i < 2 || i >= kept.length - 2);
  if (!some.length) return h("p", {class: "muted"}, "None was kept: too few finite rewards.");
  const line = (phase, column) => h("tr", {}, h("th", {scope: "row"}, phase), some.map(row => {
    const cell = cells.find(cell => cell.phase === phase && cell.candidate === row.candidate);
    const image = cell && picture(cell, `${phase}, candidate ${row.candidate}`);
    return h("td", {}, image, reward(row[column]), cell && typeof cell.right === "boolean" ? [" ", mark(cell.right)] : null);
  }));
  const heads = some.map(row => h("th", {scope: "col"}, `${row.rank + 1} of ${rows.length}`));
  return h("table", {class: "ends"}, h("caption", {class: "hidden"}, "Best and worst kept candidates"),
    h("thead", {}, h("tr", {}, h("th", {scope: "col"}, "rank"), heads)),
    h("tbody", {}, line("explored", "proxy_reward"),
      some.some(row => row.regenerated_reward !== null) && line("regenerated", "regenerated_reward")));
}
function pools() {
  const above = h("div"), shown = h("div", {class: "prompts"});
  const choose = run => {
    const iterations = grouped(candidates[run], "iteration");
    const ranges = new Map([...iterations].map(([i, rows]) => [i, range(rows)]));
    const pool = i => runs[run].pools.find(pool => pool.iteration === i);
    const size = i => pool(i) ? `${pool(i).size} pixels, ` : "";
    const say = i => `iteration ${i}, ${size(i)}rewards ${ranges.get(i).map(x => reward(x)).join(" to ")}`;
    const show = i => {
      const cells = pool(i)?.cells || [];
      const block = ([prompt, rows]) => h("div", {}, h("h3", {}, prompt), strip(rows, ranges.get(i)),
        ends(rows, cells.filter(cell => cell.prompt === prompt)));
      shown.replaceChildren(...[...grouped(iterations.get(i), "prompt")].map(block));
    };
    const {controls, update} = slider("pools-at", ascending(iterations.keys()), say, show);
    const others = chooser(run, choose) || "";
    if (iterations.size) controls.prepend(others);
    above.replaceChildren(iterations.size ? controls : h("div", {class: "controls"}, others));
    if (iterations.size) update();
    else shown.replaceChildren();
  };
  const drawn = ascending(runs.flatMap(run => run.pools.map(pool => pool.iteration)));
  const where = drawn.length ? ` Pictures are of iterations ${drawn.join(", ")}${one ? "" : " of some runs"}.` : "";
  const note = "Each prompt's candidates from best to worst proxy reward. A ring is a kept candidate as explored, the dot " +
    `joined to it the same seed regenerated; small dots were not kept. All prompts have one scale.${where}`;
  section("pools", "Pools", note, above, shown);
  choose(candidates.findIndex(rows => rows.length));
}

// --- ledger ---

const PAGE = 25;  // candidates that are shown at once
const COLUMNS = {
  iteration: "Iteration", prompt: "Prompt", candidate: "Candidate", rank: "Rank", proxy_reward: "Proxy reward",
  regenerated_reward: "Regenerated", advantage: "Advantage", kept: "Kept", precision: "Format", steps: "Steps", seed: "Seed",
};
const TEXTS = new Set(["prompt", "precision", "kept", "seed"]);
const REWARDS = new Set(["proxy_reward", "regenerated_reward", "advantage"]);

function ledger() {
  const state = {run: 0, text: "", iteration: "", kept: false, by: "iteration", down: true, page: 0};
  const change = to => { Object.assign(state, {page: 0}, to); draw(); };
  const body = h("tbody"), count = h("output", {"aria-live": "polite"});
  const iterations = h("select", {onchange: event => change({iteration: event.target.value})});
  const earlier = h("button", {type: "button", onclick: () => change({page: state.page - 1})}, "Previous");
  const later = h("button", {type: "button", onclick: () => change({page: state.page + 1})}, "Next");
  const side = name => TEXTS.has(name) && name !== "seed" ? name : "number";
  const heads = Object.entries(COLUMNS).map(([name, title]) => h("th", {scope: "col", class: side(name), "data-name": name},
    h("button", {type: "button", onclick: () => change({by: name, down: state.by === name ? !state.down : true})}, title)));
  // below all numbers: what is not finite, and what is not there
  const key = row => !TEXTS.has(state.by) && typeof row[state.by] !== "number" ? -Infinity : row[state.by];
  const compare = (a, b) => (key(a) > key(b)) - (key(a) < key(b));
  const text = (row, name) =>
    name === "kept" ? (row.kept ? "yes" : "–") : REWARDS.has(name) ? reward(row[name], 4) : row[name];

  function draw() {
    const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = candidates[state.run].filter(row => (row.kept || !state.kept) &&
      (!state.iteration || row.iteration === Number(state.iteration)) &&
      words.every(word => row.prompt.toLowerCase().includes(word) || row.seed === word));
    found.sort((a, b) => state.down ? compare(b, a) : compare(a, b));
    const from = state.page * PAGE, page = found.slice(from, from + PAGE);
    const cells = row => Object.keys(COLUMNS).map(name => h("td", {class: side(name)}, text(row, name)));
    body.replaceChildren(...page.map(row => h("tr", {class: row.kept && "kept"}, cells(row))));
    const [start, stop, all] = [from + 1, from + page.length, found.length].map(number);
    count.textContent = found.length ? `${start} to ${stop} of ${all}` : "none";
    earlier.disabled = !state.page;
    later.disabled = from + PAGE >= found.length;
    for (const head of heads) {
      if (head.dataset.name === state.by) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }
  function choose(run) {
    const there = ascending(candidates[run].map(row => row.iteration));
    iterations.replaceChildren(h("option", {value: ""}, "all"), ...there.map(i => h("option", {value: i}, i)));
    change({run, iteration: ""});
  }
  const search = h("input", {
    type: "search", placeholder: "words of a prompt, or a seed", oninput: event => change({text: event.target.value})});
  const kept = h("input", {type: "checkbox", onchange: event => change({kept: event.target.checked})});
  const part = runs.filter(run => run.ledger.shown < run.ledger.iterations.length).map(run =>
    ` The newest ${run.ledger.shown} of ${run.ledger.iterations.length} iterations${one ? "" : ` of ${run.name}`} are shown.`);
  section("ledger", "Ledger", `Every candidate that was explored.${part.join("")}${part.length ? " All are in ledger/." : ""}`,
    h("div", {class: "controls"}, chooser(0, choose), h("label", {class: "wide"}, "Search", search),
      h("label", {}, "Iteration", iterations), h("label", {}, kept, "kept only")),
    h("div", {class: "scroll ledger", tabindex: 0, role: "region", "aria-label": "Candidates"},
      h("table", {}, h("thead", {}, h("tr", {}, heads)), body)),
    h("div", {class: "controls"}, count, earlier, later));
  choose(0);
}

// --- device plan ---

function devicePlan() {
  const {phases, usable, seconds, rollout, naive_scaling: naive} = plan;
  const row = ([name, ...cells]) => [name, ...cells.slice(0, -1).map(s => s ? number(s) : "–"),
    `${number(cells.at(-1) / 1e9)} GB, ${Math.round(100 * cells.at(-1) / usable)} %`];
  const than = naive ? ` naive_scaling would take ${number(naive.seconds)} s, ${number(naive.seconds / seconds)} times as long` +
    ` (rollout phase: ${number(naive.rollout / rollout)} times).` : "";
  section("plan", "Device plan", `${plan.preset} on ${plan.hosts} × ${plan.devices} ${plan.device}, compiled, not run: exploration ` +
    `in ${plan.exploration}. An iteration takes ${number(seconds)} s at the public peaks, no less.${than} ` +
    (plan.fits ? "It fits into memory." : "It does not fit into memory."),
    table("Phases of the plan", ["Phase", "Seconds", "matmuls", "attention", "memory", "links", "Peak memory, of what is usable"],
      phases.map(row)));
}

// --- configuration ---

function configuration() {
  const say = value => value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value);
  const sides = one ? [["this run", first.config]] : runs.map(run => [run.name, run.config]);
  if (one && first.preset) sides.unshift(["preset", first.preset]);
  const settings = [...new Set(sides.flatMap(([, config]) => Object.keys(config)))];
  const differs = name => name !== "run.dir" && new Set(sides.map(([, config]) => say(config[name]))).size > 1;
  const values = (name, of) => [name, ...of.map(config => say(config[name]))];
  const told = runs.map(({facts: {packages, exploration, mesh, ...facts}}) =>
    ({...facts, mesh, exploration: exploration?.means, ...packages}));
  const all = (title, names, of) => h("details", {}, h("summary", {}, title),
    table(title, ["", ...runs.map(run => run.name)], names.map(name => values(name, of))));
  const rows = settings.filter(differs).map(name => values(name, sides.map(([, config]) => config)));
  const note = one ? `What differs from the preset ${first.config.preset}.` : "What differs between the runs.";
  section("configuration", "Configuration", note,
    rows.length ? table("Differences", ["Setting", ...sides.map(([name]) => name)], rows) : h("p", {}, "Nothing."),
    all("All settings", settings, runs.map(run => run.config)),
    all("Devices and versions", [...new Set(told.flatMap(Object.keys))], told));
}

// --- the page ---

const title = runs.map(run => run.name).join(", ");
const when = new Date(written).toLocaleString("en-GB", {dateStyle: "medium", timeStyle: "short"});
const {config} = first;
const about = one ? `${config["model.name"]}, ${config.family}, ${first.trained.join(" + ")}, seed ${config.seed}. ` +
  `Iteration ${done(first)} of ${config["train.iterations"]}, ${when}.` : `${runs.length} runs, ${when}.`;
document.title = `${title} – solrl report`;
document.querySelector("header").append(h("h1", {}, title), h("p", {class: "muted"}, about));
if (live) {
  const follow = h("input", {type: "checkbox", onchange: () => { location.hash = follow.checked ? "follow" : ""; }});
  follow.checked = location.hash === "#follow";
  document.querySelector("header").append(
    h("div", {class: "controls"}, h("label", {}, follow, "Reload every 20 seconds while it trains")));
  setInterval(() => follow.checked && location.reload(), 20000);
}
overview();
curves("rewards", "Rewards", "On held-out prompts. Bands: one standard error. Arrow keys or the pointer read the values.");
curves("exploration", "Exploration", "What the pool holds and what selection takes from it.");
curves("fidelity", "Rank fidelity", "Over kept samples: does what explored well also regenerate well? 1 is perfect.");
curves("update", "Update", "How far the policy has moved.");
curves("cost", "Cost of rewards", "What the judges and services of each iteration cost, exploration and regeneration together.");
curves("time", "Time", "Median of an iteration, the first left out because it compiles.", phases());
seeds();
if (candidates.some(rows => rows.length)) {
  pools();
  ledger();
}
if (plan) devicePlan();
configuration();
