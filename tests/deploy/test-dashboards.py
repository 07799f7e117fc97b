#!/usr/bin/env python3
"""Runs unit tests of the dashboards' queries, by promtool:

    tests/deploy/test-dashboards.py

tests/deploy/dashboards_test.yml is a test file of promtool's in which "panel: DASHBOARD / PANEL" or, for the second
query of a panel, "panel: DASHBOARD / PANEL / B" stands for an expression. Here it gets the query of the first panel
of that title, as Grafana sends it with the namespace "a" and the job "flambeau" selected. Needs Python's standard library and promtool.
"""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SELECTED = {"cluster": "", "namespace": "a", "job": "flambeau"}

spec = importlib.util.spec_from_file_location("check_dashboards", HERE / "check-dashboards.py")
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)


def query(found):
    """The line that promtool is given for a line that names a panel."""
    head, dashboard, panel, _, letter = found.groups()
    [file] = [d for d in check.read(check.ROOT / "deploy/grafana/dashboards").values() if d["title"].endswith(dashboard)]
    exprs = [
        target["expr"]
        for shown in check.panels(file)
        if shown["title"] == panel
        for target in shown.get("targets", [])
        if target["refId"] == (letter or "A")
    ]
    if not exprs:
        sys.exit(f"dashboards_test.yml: no query is called {dashboard} / {panel} / {letter or 'A'}")
    return f"{head}expr: {json.dumps(check.substituted(exprs[0], SELECTED))}"


def main():
    text = (HERE / "dashboards_test.yml").read_text()
    text, replaced = re.subn(r"(?m)^( +- )panel: ([^/\n]+?) / ([^/\n]+?)( / ([A-Z]))?$", query, text)
    text = text.replace("../..", str(check.ROOT))
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "dashboards_test.yml"
        file.write_text(text)
        print(f"{replaced} tests of panels' queries", flush=True)
        return subprocess.run(["promtool", "test", "rules", file]).returncode


if __name__ == "__main__":
    sys.exit(main())
