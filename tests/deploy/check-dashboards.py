#!/usr/bin/env python3
"""Checks Grafana's dashboards, and the rules and alerts beside them.

    tests/deploy/check-dashboards.py
    tests/deploy/check-dashboards.py --prometheus http://127.0.0.1:9090 --wait 60
    tests/deploy/check-dashboards.py --prometheus http://127.0.0.1:9090 --row Tables
    tests/deploy/check-dashboards.py --prometheus http://127.0.0.1:9090 --without-row Tables --without-row Rings

Without a Prometheus: that dashboards are whole and readable, that every metric they name is documented and
served, that they and the rules keep clusters apart, and, where promtool is installed, that it can parse every query.
With one that scrapes a job in training: that every query of every panel, and every recording rule, gives data, and that
alerts can be evaluated. The panels of the row "Tables" have data only if the job has tables, and those of the row "Rings" only
if it has no servers: --row checks a row's panels alone, --without-row all but those of the rows that it names. Needs Python's standard library only.
"""

import argparse
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import typing
import urllib.error
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Metrics that Flambeau does not serve: Prometheus' own.
EXPORTERS = {"up", "ALERTS"}

# What Grafana puts in place of its variables.
GRAFANA = {
    "__rate_interval": "1m",
    "__range": "5m",
    "__interval": "15s",
}

# Which cluster is looked at: variables of every dashboard, and the values that docker-compose.yml leads to.
CLUSTER = {"cluster": "", "namespace": "", "job": "flambeau"}
SELECTED = ", ".join(f'{label}="${label}"' for label in CLUSTER)
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

WIDTH = 24
PANEL_TYPES = {"timeseries", "stat", "bargauge", "gauge", "state-timeline", "heatmap", "table"}
# Words of PromQL that are neither functions (those stand before a parenthesis) nor metrics.
KEYWORDS = {
    "and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right",
    "offset", "bool", "inf", "nan",
}  # fmt: skip


class Query(typing.NamedTuple):
    """A query, and where it stands."""

    dashboard: str
    panel: str
    expr: str
    row: str = ""

    @property
    def place(self):
        return f"{self.dashboard}: {self.panel}"


class Rule(typing.NamedTuple):
    """A recording rule or an alert."""

    kind: str
    name: str
    expr: str


def panels(dashboard):
    """All panels, those of collapsed rows as well."""
    return [panel for _, panel in panels_of_rows(dashboard)]


def panels_of_rows(dashboard, row=""):
    """All panels, each with the title of its row: the last one above it, or the collapsed one that contains it."""
    for panel in dashboard.get("panels", []):
        row = panel["title"] if panel.get("type") == "row" else row
        yield row, panel
        yield from panels_of_rows(panel, row)


def read(folder):
    """The dashboards of a folder, by file name."""
    files = sorted(pathlib.Path(folder).glob("*.json"))
    if not files:
        raise SystemExit(f"no dashboards in {folder}")
    return {file.name: json.loads(file.read_text()) for file in files}


def definition(variable):
    """The query that gives a variable's values; none for the datasource."""
    return variable["query"]["query"] if variable["type"] == "query" else ""


def substituted(expr, cluster=CLUSTER):
    """The query as Grafana would send it for a cluster, with all values chosen of the other variables."""
    for name, value in (GRAFANA | cluster).items():
        expr = expr.replace(f"${{{name}}}", value).replace(f"${name}", value)
    return re.sub(r"\$\{\w+(:\w+)?\}|\$\w+|\[\[\w+\]\]", ".*", expr)


def queries(folder):
    """Every query of every panel of the dashboards in a folder, ready to be executed."""
    return [
        Query(dashboard["title"], panel["title"], substituted(target["expr"]), row)
        for dashboard in read(folder).values()
        for row, panel in panels_of_rows(dashboard)
        for target in panel.get("targets", [])
    ]


def annotations(folder):
    """The queries of annotations, which may be empty."""
    return [
        Query(dashboard["title"], "annotation " + annotation["name"], substituted(annotation["target"]["expr"]))
        for dashboard in read(folder).values()
        for annotation in dashboard.get("annotations", {}).get("list", [])
    ]


def rules(file):
    """Recording rules and alerts of a file; their expressions are on one line or in a block."""
    found, lines = [], pathlib.Path(file).read_text().splitlines()
    heads = [
        (number, re.match(r"( *)- (record|alert): (\S+)$", line)) for number, line in enumerate(lines)
    ]
    heads = [(number, head) for number, head in heads if head]
    for (start, head), (end, _) in zip(heads, heads[1:] + [(len(lines), None)]):
        expr = None
        for number in range(start + 1, end):
            if match := re.match(r"( +)expr: (.*)$", lines[number]):
                indent, expr = len(match[1]), match[2]
                if expr in ("|", ">", "|-", ">-"):
                    block = []
                    for line in lines[number + 1 : end]:
                        if line.strip() and len(line) - len(line.lstrip()) <= indent:
                            break
                        block.append(line.strip())
                    expr = " ".join(block).strip()
                break
        if not expr:
            raise SystemExit(f"{file}: {head[3]} has no expression that can be read")
        found.append(Rule(head[2], head[3], expr))
    return found


def metrics(expr):
    """The metrics that a query names, histograms without the suffixes of their series."""
    expr = re.sub(r'"(\\.|[^"\\])*"', '""', expr)
    expr = re.sub(r"\{[^}]*\}", " ", expr)
    expr = re.sub(r"\[[^\]]*\]", " ", expr)
    expr = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", expr)
    expr = re.sub(r"\boffset\s+\S+", " ", expr)
    names = re.findall(r"(?<![\w:.$])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])", expr)
    return {name for name in names if name.lower() not in KEYWORDS}


def documented(files):
    """The metrics that stand in backticks in some pages."""
    text = "\n".join(pathlib.Path(file).read_text() for file in files)
    return set(re.findall(r"`([a-z_]+)(?:\{\w+(?:, *\w+)*\})?`", text))


class Findings(list):
    """What is wrong."""

    def expect(self, holds, what):
        if not holds:
            self.append(what)


def check_metrics(named, known, findings):
    for place, expr in named:
        for name in sorted(metrics(expr)):
            plain = re.sub(r"_(bucket|sum|count)$", "", name)
            findings.expect(
                name in known or plain in known,
                f"{place}: {name} is not documented in docs/metrics.md",
            )


def check_served(named, findings):
    """Whether the daemons' sources have the metrics that are named."""
    source = "".join(file.read_text() for file in sorted((ROOT / "crates").glob("*/src/**/*.rs")))
    for place, expr in named:
        for name in sorted(metrics(expr)):
            plain = re.sub(r"_(bucket|sum|count)$", "", name)
            served = f'"{name}"' in source or f'"{plain}"' in source
            findings.expect(served or not name.startswith("flambeau_"), f"{place}: no daemon serves {name}")


def check_rule(rule, findings):
    """A rule sums, counts and joins within a cluster alone."""
    for labels in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", rule.expr):
        named = {label.strip() for label in labels.split(",")}
        findings.expect(named >= CLUSTER.keys(), f"{rule.kind} {rule.name}: mixes clusters by ({labels})")
    summed = re.findall(r"\b(sum|count|min|max|avg|topk|quantile)\s*\(", rule.expr)
    findings.expect(not summed, f"{rule.kind} {rule.name}: {', '.join(summed)} over all clusters")


def check_selection(place, expr, findings):
    """A query of a panel asks for the cluster that is looked at, or keeps all of them apart."""
    if re.search(r"\bby \(cluster, namespace, job\)", expr):
        return
    selectors = re.findall(r"(?<![\w:])([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?", re.sub(r'"[^"]*"', '""', expr))
    wanted = re.sub(r'"[^"]*"', '""', SELECTED)
    for name in metrics(expr):
        found = [braces for metric, braces in selectors if metric == name]
        findings.expect(all(wanted in braces for braces in found), f"{place}: {name} is that of all clusters")


def check_release(findings):
    """The types that dashboards are held against are of the Grafana that docker-compose.yml starts."""
    run = re.search(r"GRAFANA_VERSION:-(\d+\.\d+)", (ROOT / "docker-compose.yml").read_text())
    held = json.loads((ROOT / "tests/deploy/grafana/package.json").read_text())["dependencies"]["@grafana/schema"]
    findings.expect(
        run and held.startswith(f"{run[1]}."), f"@grafana/schema {held} is not of docker-compose.yml's Grafana"
    )


def check_syntax(named, findings):
    """Has promtool parse the queries. Returns how many, or why none."""
    promtool = shutil.which("promtool")
    if not promtool:
        return "SKIPPED: no promtool to parse them with"
    records = [f"      - {{record: 'q:{number}', expr: {json.dumps(expr)}}}" for number, (_, expr) in enumerate(named)]
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        file.write("\n".join(["groups:", "  - name: queries", "    rules:", *records, ""]))
        file.flush()
        checked = subprocess.run([promtool, "check", "rules", file.name], capture_output=True, text=True)
    findings.expect(checked.returncode == 0, f"promtool cannot parse a query: {checked.stderr.strip()}")
    return f"{len(named)} of them parsed by promtool"


def check_dashboard(name, dashboard, findings):
    def expect(holds, what):
        findings.expect(holds, f"{name}: {what}")

    for key in ("title", "uid", "description", "schemaVersion", "tags", "panels"):
        expect(dashboard.get(key), f"no {key}")
    expect(dashboard.get("schemaVersion", 0) >= 38, "schemaVersion is older than Grafana 10")
    # Only in the database of one Grafana does a number mean something.
    expect(dashboard.get("id") is None, "has a numeric id")
    for where, found in datasources(dashboard):
        expect(found == DATASOURCE, f"{where}: datasource {found}")
    for annotation in dashboard.get("annotations", {}).get("list", []):
        expect(annotation.get("target", {}).get("expr"), "an annotation without a query")
    listed = dashboard.get("templating", {}).get("list", [])
    variables = {v["name"] for v in listed}
    common = ["datasource", *CLUSTER]
    expect([v["name"] for v in listed][:4] == common, f"the variables do not begin with {', '.join(common)}")
    # With several clusters at a time their series would be mixed.
    expect(not any(v["multi"] or v["includeAll"] for v in listed if v["name"] in common), "several clusters at a time")

    everything = list(panels(dashboard))
    ids = [panel.get("id") for panel in everything]
    expect(len(set(ids)) == len(ids) and None not in ids, "panels without an id of their own")
    used = set()
    for panel in everything:
        if panel.get("type") != "row":
            used |= check_panel(panel, expect)
    used |= {name for v in listed for name in re.findall(r"\$(\w+)", definition(v))} | {"datasource"}
    expect(used <= variables, f"unknown variables {sorted(used - variables)}")
    expect(used >= variables, f"unused variables {sorted(variables - used)}")
    check_layout(dashboard["panels"], expect)


def datasources(dashboard):
    """Each place that must name a datasource, and what it names."""
    for panel in panels(dashboard):
        if panel.get("type") != "row":
            yield panel.get("title"), panel.get("datasource")
        for target in panel.get("targets", []):
            yield panel.get("title"), target.get("datasource")
    for variable in dashboard.get("templating", {}).get("list", []):
        if variable["type"] != "datasource":
            yield "variable " + variable["name"], variable.get("datasource")
    for annotation in dashboard.get("annotations", {}).get("list", []):
        yield "annotation " + annotation["name"], annotation.get("datasource")
        yield "annotation " + annotation["name"], annotation.get("target", {}).get("datasource")


def check_panel(panel, expect):
    """Checks a panel; returns the variables that it uses."""
    title = panel.get("title")
    expect(title, f"panel {panel.get('id')} has no title")
    expect(panel.get("description"), f"{title}: no description")
    expect(panel.get("type") in PANEL_TYPES, f"{title}: type {panel.get('type')!r}")
    expect(panel.get("fieldConfig", {}).get("defaults", {}).get("unit"), f"{title}: no unit")
    targets = panel.get("targets", [])
    expect(targets, f"{title}: no queries")
    ids = [target.get("refId") for target in targets]
    expect(len(set(ids)) == len(ids) and all(ids), f"{title}: queries without a refId of their own")
    used = set()
    for target in targets:
        expr = target.get("expr", "")
        expect(expr, f"{title}: a query without an expression")
        named = panel.get("type") in {"stat", "gauge"} or target.get("legendFormat")
        expect(named, f"{title}: a query without a legend")
        # An address says nothing to a reader: a task does, by way of flambeau_task_info.
        expect("instance" not in target.get("legendFormat", ""), f"{title}: a legend of addresses")
        # A single figure is of now: the last value of a range may be another run's.
        single = panel.get("type") in {"stat", "gauge", "bargauge"}
        expect(target.get("instant") == single, f"{title}: instant or range")
        used |= set(re.findall(r"\$\{?(\w+)", expr)) - set(GRAFANA)
    return used


def check_layout(shown, expect):
    """Panels lie on the grid and not on each other."""
    taken = {}
    for panel in shown:
        title, at = panel.get("title"), panel.get("gridPos", {})
        if not all(isinstance(at.get(key), int) for key in "xywh"):
            expect(False, f"{title}: no gridPos")
            continue
        inside = at["x"] >= 0 and at["y"] >= 0 and at["w"] > 0 and at["h"] > 0
        expect(inside and at["x"] + at["w"] <= WIDTH, f"{title}: lies outside of the grid")
        cells = [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
        on = {taken[cell] for cell in cells if cell in taken}
        expect(not on, f"{title}: lies on {', '.join(sorted(map(str, on)))}")
        taken.update(dict.fromkeys(cells, title))


def execute(prometheus, expr):
    """What is wrong with a query's answer: an error, or that it has no data."""
    url = prometheus.rstrip("/") + "/api/v1/query"
    body = urllib.parse.urlencode({"query": expr}).encode()
    try:
        with urllib.request.urlopen(url, body, timeout=30) as answer:
            result = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError):
            pass
        return f"error: {text.strip()}"
    except (OSError, ValueError, KeyError) as error:
        return f"error: {error}"
    if not result:
        return "no data"
    # Grafana shows nothing of such a series.
    if all(math.isnan(float(series["value"][1])) for series in result):
        return "no data but NaN"
    return None


def execute_all(prometheus, wanted, wait):
    """Executes (query, may be empty) pairs; those without data again until `wait` seconds are over."""
    deadline = time.monotonic() + wait
    while True:
        failed = []
        for query, may_be_empty in wanted:
            wrong = execute(prometheus, query.expr)
            if wrong and not (may_be_empty and wrong.startswith("no data")):
                failed.append((query, may_be_empty, wrong))
        if not failed or time.monotonic() >= deadline:
            return [f"{query.place}: {wrong}\n    {query.expr}" for query, _, wrong in failed]
        wanted = [(query, may_be_empty) for query, may_be_empty, _ in failed]
        time.sleep(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prometheus", metavar="URL", help="execute every query there")
    parser.add_argument(
        "--wait", metavar="SECONDS", type=float, default=0, help="for so long, ask again where there is no data"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--row", metavar="TITLE", help="execute only the queries of this row's panels")
    chosen.add_argument(
        "--without-row", metavar="TITLE", action="append", default=[], help="execute no query of this row's panels; may be repeated"
    )
    parser.add_argument("--grafana", metavar="DIR", type=pathlib.Path, default=ROOT / "deploy" / "grafana")
    parser.add_argument("--rules", metavar="DIR", type=pathlib.Path, default=ROOT / "deploy" / "prometheus")
    parser.add_argument(
        "--metrics", metavar="PAGE", action="append", help="page that documents metrics; may be repeated"
    )
    arguments = parser.parse_args()
    folder = arguments.grafana / "dashboards"
    pages = arguments.metrics or [ROOT / "docs" / "metrics.md"]

    findings = Findings()
    dashboards = read(folder)
    uids = [dashboard.get("uid") for dashboard in dashboards.values()]
    findings.expect(len(set(uids)) == len(uids), "dashboards share a uid")
    for name, dashboard in dashboards.items():
        check_dashboard(name, dashboard, findings)

    shown, marked = queries(folder), annotations(folder)
    found = [
        rule
        for file in sorted(arguments.rules.glob("*.yml"))
        if file.name != "prometheus.yml"
        for rule in rules(file)
    ]
    recorded = {rule.name: rule for rule in found if rule.kind == "record"}
    named = [(query.place, query.expr) for query in shown + marked]
    named += [(f"{rule.kind} {rule.name}", rule.expr) for rule in found]
    named += [
        (f"{dashboard['title']}: variable {variable['name']}", definition(variable).partition("(")[2].rpartition(",")[0])
        for dashboard in dashboards.values()
        for variable in dashboard.get("templating", {}).get("list", [])
        if definition(variable)
    ]
    for rule in found:
        check_rule(rule, findings)
    for dashboard in dashboards.values():
        for panel in panels(dashboard):
            for target in panel.get("targets", []):
                check_selection(f"{dashboard['title']}: {panel['title']}", target["expr"], findings)
    check_served(named, findings)
    check_release(findings)
    parsed = check_syntax([(query.place, query.expr) for query in shown + marked], findings)
    check_metrics(named, documented(pages) | EXPORTERS | recorded.keys(), findings)
    used = set().union(*(metrics(expr) for _, expr in named))
    for name in sorted(recorded.keys() - used):
        findings.append(f"record {name}: used by no dashboard or alert")

    executed = 0
    if arguments.prometheus:
        for named in [arguments.row] if arguments.row else arguments.without_row:
            findings.expect(any(query.row == named for query in shown), f"no dashboard has a row {named!r}")
        wanted = [(query, False) for query in shown if query.row not in arguments.without_row]
        if arguments.row:
            wanted = [(query, False) for query, _ in wanted if query.row == arguments.row]
        else:
            wanted += [(Query(rule.kind, rule.name, rule.expr), rule.kind == "alert") for rule in found]
            wanted += [(query, True) for query in marked]
        executed = len(wanted)
        findings += execute_all(arguments.prometheus, wanted, arguments.wait)

    for finding in findings:
        print(finding, file=sys.stderr)
    print(
        f"{len(dashboards)} dashboards, {len(shown)} panel queries ({parsed}), {len(found)} rules and alerts, "
        f"{len(used - recorded.keys())} metrics; "
        f"{f'{executed} queries executed' if arguments.prometheus else 'nothing executed (no --prometheus)'}; "
        f"{f'{len(findings)} findings' if findings else 'all well'}"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
