#!/usr/bin/env python3
"""Checks docs/runbook.md:

    tests/deploy/check-runbook.py

that each alert of deploy/prometheus has a section and leads to it, and each section an alert; that a section has its
four parts; and that what it names is there: commands and flags of flambeau, services of docker-compose.yml, workloads of
deploy/kubernetes, settings, metrics, panels, places in other pages, and queries that promtool, where it is installed, can
parse. Needs Python's standard library only.
"""

import importlib.util
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
PARTS = ["What it means", "What to look at", "What to do", "How to see that it helped"]

spec = importlib.util.spec_from_file_location("check_dashboards", HERE / "check-dashboards.py")
dashboards = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dashboards)
ROOT = dashboards.ROOT


def sources(crate="*"):
    return "\n".join(file.read_text() for file in sorted(ROOT.glob(f"crates/{crate}/src/**/*.rs")))


def kebab(name):
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def variants(file, enum):
    """The names under which clap knows the variants of an enum."""
    [body] = re.findall(rf"enum {enum} \{{\n(.*?)\n\}}", (ROOT / file).read_text(), re.DOTALL)
    return {kebab(name) for name in re.findall(r"(?m)^    ([A-Z]\w*)", body)}


def anchor(heading):
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def check_sections(text, findings):
    alerts = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    urls = dict(re.findall(r"- alert: (\w+)\n(?:(?!      - alert:).*\n)*? +runbook_url: (\S+)", alerts))
    severities = dict(re.findall(r"- alert: (\w+)\n(?:(?!      - alert:).*\n)*? +severity: (\w+)", alerts))
    names = re.findall(r"- alert: (\w+)", alerts)
    sections = dict(re.findall(r"(?ms)^## (\w+)\n(.*?)(?=^## |\Z)", text))
    findings.expect(sections.pop("Commands", None), "there is no section of commands")
    findings.expect(sections.keys() == set(names), f"sections and alerts differ: {sorted(sections.keys() ^ set(names))}")
    findings.expect(list(sections) == names, "sections stand in another order than the alerts")
    for name in names:
        wanted = f"docs/runbook.md#{anchor(name)}"
        findings.expect(urls.get(name) == wanted, f"{name}: its runbook_url is {urls.get(name)}, not {wanted}")
        section = sections.get(name, "")
        parts = re.findall(r"(?m)^\*\*(.+?)\.\*\*", section)
        findings.expect(parts == PARTS, f"{name}: its parts are {parts}")
        severity = severities.get(name, "").capitalize()
        findings.expect(section.startswith(f"\n{severity}.\n"), f"{name}: the section does not say {severity}")
    return len(names)


def check_links(text, findings):
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, place = target.partition("#")
        page = ROOT / "docs" / (file or "runbook.md")
        findings.expect(page.exists(), f"{target}: there is no such page")
        if place and page.exists():
            anchors = {anchor(heading) for heading in re.findall(r"(?m)^#+ (.*)$", page.read_text())}
            findings.expect(place in anchors, f"{target}: there is no such place")


def commands(text):
    """Every command of the page: the lines of its blocks, and what stands in the text."""
    blocks = re.findall(r"(?s)```sh\n(.*?)```", text)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    spans = re.findall(r"`([^`]+)`", re.sub(r"(?s)```.*?```", "", text))
    spans = [" ".join(span.split()) for span in spans]
    return [line for line in lines if line] + [span for span in spans if re.match(r"(docker|kubectl|flambeau|--\w)", span)]


def check_commands(found, findings):
    code = sources()
    known = variants("crates/flambeau/src/app.rs", "Command")
    of_checkpoint = variants("crates/flambeau/src/checkpoint/mod.rs", "Command")
    fields = re.findall(r"(?m)^ +(?:pub(?:\(crate\))? )?(\w+): ", code)
    flags = {"--" + field.replace("_", "-") for field in fields}
    for command in found:
        called = re.search(
            r"^flambeau (.+)|-- flambeau (.+)|exec [\w-]+ flambeau (.+)|--entrypoint flambeau [\w-]+ (.+)", command
        )
        if called or command.startswith("--"):
            name, *more = next(filter(None, called.groups())).split() if called else ["", *command.split()]
            findings.expect(not called or name in known, f"`{command}`: flambeau has no command {name}")
            if name == "checkpoint":
                findings.expect(more and more[0] in of_checkpoint, f"`{command}`: no such command of checkpoint")
            for flag in more:
                findings.expect(not flag.startswith("--") or flag in flags, f"`{command}`: there is no flag {flag}")
        if command.startswith("docker compose") or " docker compose" in command:
            check_compose(command, findings)
        if command.startswith("kubectl"):
            check_kubectl(command, findings)


def check_compose(command, findings):
    """The services and profiles that a command names are there."""
    compose = (ROOT / "docker-compose.yml").read_text()
    body = compose.split("\nservices:\n")[1].split("\nvolumes:\n")[0]
    services = set(re.findall(r"(?m)^  ([a-z-]+):", body))
    for profile in re.findall(r"--profile (\S+)", command):
        findings.expect(f"profiles: [{profile}]" in body, f"`{command}`: there is no profile {profile}")
    verb, rest = re.search(r"\b(up|ps|logs|exec|run) ?(.*)", command.partition("docker compose")[2]).groups()
    named = re.findall(r"--scale ([\w-]+)=\d", rest)
    rest = re.sub(r"--scale \S+|--entrypoint \S+|\|.*", "", rest)
    plain = [word for word in rest.split() if not word.startswith("-")]
    # What follows the service is its command.
    named += plain[:1] if verb in ("exec", "run") else plain
    for service in named:
        findings.expect(service in services, f"`{command}`: there is no service {service}")
    findings.expect(named or verb == "ps", f"`{command}`: no service is named")


def check_kubectl(command, findings):
    """The workloads and pods that a command names are there."""
    files = sorted((ROOT / "deploy/kubernetes/base").glob("*.yaml"))
    text = "\n".join(file.read_text() for file in files)
    workloads = re.findall(r"(?m)^kind: (StatefulSet|Deployment)\nmetadata:\n  name: (\S+)", text)
    workloads = {f"{kind.lower()}/{name}" for kind, name in workloads}
    for workload in re.findall(r"\b((?:statefulset|deployment)/[\w-]+)", command):
        findings.expect(workload in workloads, f"`{command}`: there is no {workload}")
    for name in re.findall(r"\b(?:pod|exec|logs) ([a-z][a-z-]*)-\d", command):
        findings.expect(f"statefulset/{name}" in workloads, f"`{command}`: there is no pod {name}-0")
    for component in re.findall(r"component=(\w+)", command):
        findings.expect(f"app.kubernetes.io/component: {component}" in text, f"`{command}`: no component {component}")


def check_names(text, found, findings):
    """Settings, metrics, panels and log lines that the page names are there."""
    code = sources() + (ROOT / "docker-compose.yml").read_text()
    for variable in sorted(set(re.findall(r"\bFLAMBEAU_[A-Z_]+", text))):
        findings.expect(variable in code, f"there is no setting {variable}")
    template = (ROOT / "crates/shared-proto/src/job/template.rs").read_text()
    sections = dict(re.findall(r"(?ms)^\[(\w+)\]\n(.*?)(?=^\[|\Z)", template))
    for section, key in re.findall(r"`(?!tls\.)([a-z]+)\.([a-z_]+)`", text):
        findings.expect(re.search(rf"(?m)^(#: )?{key} +=", sections.get(section, "")), f"no job has {section}.{key}")
    for line in re.findall(r"grep '([^']+)'", "\n".join(found)):
        findings.expect(f'"{line}' in code, f"no log has the line {line!r}")

    files = dashboards.read(ROOT / "deploy/grafana/dashboards").values()
    titles = {file["title"].rpartition(" / ")[2] for file in files}
    titles |= {panel["title"] for file in files for panel in dashboards.panels(file)}
    # Not what is quoted from elsewhere.
    quoted = set(re.findall(r'(?s)"([A-Z][^"]+)"', re.sub(r"(?s)```.*?```|`[^`]*`", "", text)))
    for title in sorted(" ".join(title.split()) for title in quoted):
        findings.expect(title in titles, f"no dashboard or panel is called {title!r}")


def check_queries(text, findings):
    """The metrics that are named are documented, and queries can be parsed."""
    spans = re.findall(r"(?s)```promql\n(.*?)```", text) + re.findall(r"`([^`\n]+)`", text)
    queries = [" ".join(span.split()) for span in spans if re.search(r"\b(flambeau|process)_\w|instance:", span)]
    rules = {rule.name for rule in dashboards.rules(ROOT / "deploy/prometheus/rules.yml")}
    known = dashboards.documented([ROOT / "docs/metrics.md"]) | rules
    named = [(f"`{query}`", query) for query in queries]
    dashboards.check_metrics(named, known, findings)
    return len(queries), dashboards.check_syntax(named, findings)


def main():
    findings = dashboards.Findings()
    text = (ROOT / "docs/runbook.md").read_text()
    alerts = check_sections(text, findings)
    check_links(text, findings)
    found = commands(text)
    check_commands(found, findings)
    check_names(text, found, findings)
    queries, parsed = check_queries(text, findings)
    for finding in findings:
        print(f"docs/runbook.md: {finding}", file=sys.stderr)
    print(f"docs/runbook.md: {alerts} alerts, {len(found)} commands, {queries} queries ({parsed}): {len(findings)} problems")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
