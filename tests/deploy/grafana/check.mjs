// Holds dashboards against a JSON schema that is made of Grafana's published types:
//
//     node check.mjs DASHBOARD.json...
//
// It runs where "npm install" was run on the package.json beside it.
import { readFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import Ajv from "ajv";
import { createGenerator } from "ts-json-schema-generator";

const here = dirname(fileURLToPath(import.meta.url));
const schema = createGenerator({
    path: join(here, "dashboard.ts"),
    tsconfig: join(here, "tsconfig.json"),
    type: "Checked",
    expose: "none",
    skipTypeCheck: true,
}).createSchema("Checked");
const validate = new Ajv({ allErrors: true, strict: false }).compile(schema);

function problems({ panels: all, ...dashboard }) {
    const panels = {};
    for (const panel of all) (panels[panel.type] ??= []).push(panel);
    if (validate({ dashboard, panels })) return [];
    return validate.errors.map(({ instancePath, message, params }) => {
        const [, type, index] = instancePath.match(/^\/panels\/([^/]+)\/(\d+)/) ?? [];
        const title = type ? `${panels[type][index].title}: ` : "";
        return `${title}${instancePath} ${message} ${JSON.stringify(params)}`;
    });
}

let failed = 0;
const files = process.argv.slice(2);
for (const file of files) {
    const dashboard = JSON.parse(readFileSync(file, "utf8"));
    for (const problem of problems(dashboard)) {
        console.error(`${basename(file)}: ${problem}`);
        failed += 1;
    }
    // That nothing was refused counts only if a slip of the pen would have been.
    const slips = [
        (copy) => (copy.refersh = "5s"),
        (copy) => (copy.templating.list[0].includeAll = "no"),
        (copy) => (copy.annotations.list[0].target.exp = "up"),
        (copy) => (copy.panels.find((panel) => panel.type === "stat").options.textMode = "nmae"),
        (copy) => (copy.panels.find((panel) => panel.type === "stat").type = "stats"),
        (copy) => (copy.panels.find((panel) => panel.type === "timeseries").fieldConfig.defaults.units = "s"),
        (copy) => (copy.panels.find((panel) => panel.type === "timeseries").gridPos.w = "8"),
    ];
    for (const slip of slips) {
        const copy = structuredClone(dashboard);
        slip(copy);
        if (problems(copy).length === 0) {
            console.error(`${basename(file)}: the schema lets this pass: ${slip}`);
            failed += 1;
        }
    }
}
const { version } = JSON.parse(readFileSync(join(here, "node_modules/@grafana/schema/package.json"), "utf8"));
console.log(`${files.length} dashboards against the types of Grafana ${version}: ${failed} problems`);
process.exit(failed ? 1 : 0);
