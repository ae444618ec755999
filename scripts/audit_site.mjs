// Checks the built site with Lighthouse and axe in headless Chromium, at 390 and 1440 px, light and dark. Writes benchmarks/site.json.
// The exit code is 1 for an accessibility score below 95, a violation, a console error, or a page that is wider than the window.
//
//   make docs
//   PUPPETEER_SKIP_DOWNLOAD=1 npm install --no-save lighthouse axe-core puppeteer-core
//   CHROMIUM=/usr/bin/chromium node scripts/audit_site.mjs [report.html ...]     reports of runs, for axe
import { createServer } from "node:http";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { basename, extname, resolve } from "node:path";
import lighthouse from "lighthouse";
import puppeteer from "puppeteer-core";

const TYPES = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".json": "application/json" };
const SCORED = ["index.html", "tutorial.html", "exploration.html", "compiled.html", "api.html"]; // by Lighthouse; by axe all are
const LEAST = 0.95;
const reports = Object.fromEntries(process.argv.slice(2).map((path) => [`report-${basename(path)}`, resolve(path)]));
const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
const axe = readFileSync("node_modules/axe-core/axe.min.js", "utf8");

const server = createServer((request, answer) => {
  const name = decodeURIComponent(new URL(request.url, "http://localhost").pathname).slice(1);
  try {
    const body = readFileSync(reports[name] ?? `site/${name}`);
    answer.writeHead(200, { "Content-Type": TYPES[extname(name)] ?? "application/octet-stream" }).end(body);
  } catch {
    answer.writeHead(404).end();
  }
}).listen(0, "127.0.0.1");
await new Promise((done) => server.once("listening", done));
const address = (name) => `http://127.0.0.1:${server.address().port}/${name}`;

const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"], protocolTimeout: 600000 });
const pages = [...readdirSync("site").filter((name) => name.endsWith(".html") && name !== "404.html"), ...Object.keys(reports)];
const settings = [390, 1440].flatMap((width) => ["light", "dark"].map((scheme) => ({ width, scheme })));
const found = { pages: pages.length, audits: 0, violations: 0, console_errors: 0, wider_than_window: 0 };
const scores = {};
const wrong = [];

for (const name of pages) {
  for (const { width, scheme } of settings) {
    const visit = await browser.createBrowserContext(); // or the colors of one visit would be kept for the next
    const page = await visit.newPage();
    const errors = [];
    page.on("console", (said) => ["error", "warn"].includes(said.type()) && errors.push(said.text()));
    page.on("pageerror", (error) => errors.push(String(error)));
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
    await page.setViewport({ width, height: 900 });
    await page.goto(address(name), { waitUntil: "networkidle0", timeout: 120000 });
    const dressed = (wanted) => document.body.dataset.mdColorScheme === wanted; // a script of the theme sets it
    const patience = { timeout: 300000, polling: 200 };
    if (!reports[name]) await page.waitForFunction(dressed, patience, scheme === "dark" ? "slate" : "default");
    await new Promise((done) => setTimeout(done, 1000)); // site.js waits a little, and colors fade
    const wider = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
    await page.evaluate(axe);
    const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
    found.audits += 1;
    found.violations += violations.length;
    found.console_errors += errors.length;
    found.wider_than_window += wider;
    const told = violations.map((rule) => `${rule.id} at ${rule.nodes.map((node) => node.target).join(", ")}`);
    if (wider) told.push("wider than the window");
    if (SCORED.includes(name)) {
      const flags = { onlyCategories: ["accessibility", "best-practices"], formFactor: width < 800 ? "mobile" : "desktop" };
      flags.screenEmulation = { mobile: width < 800, width, height: 900, deviceScaleFactor: 1 };
      flags.throttlingMethod = "provided";
      const { lhr } = await lighthouse(address(name), flags, undefined, page);
      const quiet = lhr.audits["errors-in-console"].score === 1;
      scores[name] = { ...scores[name], [`${width} ${scheme}`]: lhr.categories.accessibility.score };
      if (lhr.categories.accessibility.score < LEAST || !quiet) told.push(`Lighthouse: ${lhr.categories.accessibility.score}, console quiet: ${quiet}`);
    }
    [...told, ...errors].forEach((line) => wrong.push(`${name}, ${width} px, ${scheme}: ${line}`));
    await visit.close();
  }
}
const versions = { lighthouse: version("lighthouse"), "axe-core": version("axe-core"), browser: await browser.version() };
await browser.close();
server.close();
const record = {
  what: "the pages of the site, 390 and 1440 px wide, light and dark: accessibility by Lighthouse (1 is best), and what axe finds",
  command: "make docs; node scripts/audit_site.mjs [report.html of solrl report RUN --plan PLAN]",
  date: new Date().toISOString().slice(0, 10), device: "2 CPU cores, headless", versions, lighthouse: scores, axe: found,
};
writeFileSync("benchmarks/site.json", JSON.stringify(record, null, 1) + "\n");
console.log([...wrong, `${found.audits} audits of ${pages.length} pages, ${wrong.length} findings`].join("\n"));
process.exit(wrong.length ? 1 : 0);
