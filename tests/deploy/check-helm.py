#!/usr/bin/env python3
"""Checks the chart deploy/helm/flambeau, offline and without a cluster:

    python3 tests/deploy/check-helm.py

renders it in all its forms, holds every document against Kubernetes' own schemas, compares it with what kustomize makes
of deploy/kubernetes, and sees that wrong values are refused and that README.md has each value with its default.

The chart is to make the objects that kustomize makes, except for what MEANT lists. Each entry says why, and undoes the
difference; an entry that nothing needs any more is a problem, too.

It installs nothing. Besides what check-kubernetes.py needs, it needs, or else it says SKIPPED:

    helm 3.17 or newer     $FLAMBEAU_TEST_HELM, or helm on the PATH
"""

import copy
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "flambeau"
GPU = f"--values={CHART / 'values-gpu.yaml'}"

# The checks of the manifests, whose parts serve here as well.
spec = importlib.util.spec_from_file_location("check_kubernetes", Path(__file__).with_name("check-kubernetes.py"))
manifests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(manifests)
expect, skipped, title, ROLES = manifests.expect, manifests.skipped, manifests.title, manifests.ROLES

# The oldest release that has what the form `job` uses.
OLDEST_FOR_JOBS = "1.29"

# Kinds of operators, of which there are no schemas here.
CUSTOM = {"PodMonitor", "PrometheusRule", "Certificate"}

# Each rendering by kustomize, and the values with which the chart is to make the same; monitoring_of adds some.
PAIRS = {
    "base": [],
    "overlays/cpu": [],
    "overlays/gpu": [GPU],
    "overlays/cpu + secure": ["tls.enabled=true"],
    "overlays/cpu + s3": ["runs.shared=false"],
    "overlays/cpu + data": ["worker.dataClaim=data"],
    "overlays/cpu + lookups": ["ps.lookups.enabled=true"],
    "overlays/cpu + rows-on-disk": [
        *("ps.tableMebibytes=1024", "ps.resources.requests.memory=2Gi", "ps.resources.limits.memory=2Gi"),
    ],
    "overlays/gpu + data + s3 + secure": [GPU, "worker.dataClaim=data", "runs.shared=false", "tls.enabled=true"],
    "overlays/mine": [
        *(f"image.registry={manifests.OWN_REGISTRY}", "ps.replicas=3", "worker.replicas=8"),
        *("worker.dataClaim=data", "runs.storageClassName=nfs", "job=MINE"),
    ],
}

# Further forms of the chart, which kustomize has nothing like.
FORMS = {
    "job": ["form=job"],
    "job with everything": [
        *("form=job", GPU, "runs.shared=false", "worker.dataClaim=data", "pipeline.activeDeadlineSeconds=3600"),
        *("pipeline.ttlSecondsAfterFinished=600", "tls.enabled=true", "tls.certManager.enabled=true"),
        *("tls.certManager.issuer.name=authority", "token.create=true", "resumeFailed=true", "restore=/runs/digits"),
    ],
    "autoscaling": [
        *("autoscaling.enabled=true", "autoscaling.samplesPerSecond=500"),
        "autoscaling.behavior.scaleDown.stabilizationWindowSeconds=600",
        'json:autoscaling.metrics=[{"type":"External","external":{"metric":{"name":"queue_length"},'
        '"target":{"type":"AverageValue","averageValue":"30"}}}]',
    ],
    "scheduling": [
        *("priorityClassName=low", "ps.priorityClassName=high", "imagePullSecrets[0]=registry"),
        *("worker.spread=DoNotSchedule", "ps.spread=", "worker.runtimeClassName=nvidia", "ps.nodeSelector.disk=fast"),
        *("worker.podAnnotations.team=vision", "worker.podLabels.team=vision", "fullnameOverride=other"),
        'json:worker.tolerations=[{"key":"spot","operator":"Exists"}]',
        'json:worker.env=[{"name":"RAYON_NUM_THREADS","value":"4"}]',
        'json:ps.affinity={"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":'
        '[{"matchExpressions":[{"key":"disk","operator":"Exists"}]}]}}}',
    ],
    "token alone": ["token.secret=mine"],
    "rings": ["ps.replicas=0", "worker.replicas=3"],
    "rings in a pipeline": ["form=job", "ps.replicas=0", "worker.replicas=3"],
    "monitoring": [f"monitoring.{part}.enabled=true" for part in ("podMonitor", "prometheusRule", "dashboards")],
    "a claim that is there": ["runs.existingClaim=shared", "networkPolicy.enabled=false"],
}

# Values that must be refused, and a word of the reason.
REFUSED = {
    "form=jobs": "form",
    "worker.replica=3": "replica",
    "worker.replicas=many": "replicas",
    "worker.gpus=2": "gpus",
    "ps.tableMebibytes=-1": "tableMebibytes",
    "ps.lookups.readers=app": "readers",
    "image.version=latest": "version",
    "image.registry=registry.example/": "registry",
    "job=epochs": "job",
    "runs.size=big": "size",
    "worker.resources.limits.memory=lots": "memory",
    "worker.spread=Always": "spread",
    "worker.env[0].nam=X": "nam",
    "form=job,autoscaling.enabled=true": "form cluster",
    "autoscaling.enabled=true": "samplesPerSecond",
    "tls.certManager.enabled=true": "tls.enabled",
    "tls.enabled=true,tls.certManager.enabled=true": "issuer",
}


# ---- rendering ----------------------------------------------------------------------------------------------


def find_helm():
    """The program, and what it says of itself."""
    helm = os.environ.get("FLAMBEAU_TEST_HELM") or shutil.which("helm")
    if not helm:
        return None, None
    return helm, subprocess.run([helm, "version", "--short"], capture_output=True, text=True, check=True).stdout.strip()


def arguments_of(values):
    arguments = []
    for value in values:
        if value.startswith("--"):
            arguments.append(value)
        elif value.startswith("json:"):
            arguments += ["--set-json", value.removeprefix("json:")]
        elif value == "job=MINE":
            arguments += ["--set-string", "job=" + default_job().replace('name = "digits"', 'name = "mine"')]
        else:
            arguments += ["--set", value]
    return arguments


def monitoring_of(kustomize):
    """The values with which the chart monitors as much as a rendering by kustomize does, with the same labels."""
    values = []
    for document in kustomize:
        part = {"PodMonitor": "podMonitor", "PrometheusRule": "prometheusRule"}.get(document["kind"])
        if part:
            values.append(f"monitoring.{part}.enabled=true")
            for label, value in document["metadata"]["labels"].items():
                if label != manifests.NAME:
                    values.append(f"monitoring.{part}.labels.{label}={value}")
        if is_dashboard(document):
            values.append("monitoring.dashboards.enabled=true")
    return sorted(set(values))


def is_dashboard(document):
    return document["kind"] == "ConfigMap" and "-dashboard-" in document["metadata"]["name"]


def default_job():
    return yaml.safe_load((CHART / "values.yaml").read_text())["job"].replace(",", r"\,")


def template(helm, values, version):
    """Runs `helm template` for a release of Kubernetes."""
    command = [helm, "template", "flambeau", CHART, "--namespace=training", f"--kube-version={version}"]
    return subprocess.run([*command, *arguments_of(values)], capture_output=True, text=True)


def render(helm, name, values):
    version = OLDEST_FOR_JOBS if "form=job" in values else manifests.OLDEST
    done = template(helm, values, version)
    if done.returncode:
        manifests.problems.append(f"{name} cannot be rendered: {done.stderr.strip()}")
        return []
    return [document for document in yaml.safe_load_all(done.stdout) if document]


# ---- what is meant to differ --------------------------------------------------------------------------------


def everywhere(node, change):
    """Calls `change` for each map of a document; returns whether one of the calls did anything."""
    changed = False
    if isinstance(node, dict):
        changed |= bool(change(node))
        for value in node.values():
            changed |= everywhere(value, change)
    elif isinstance(node, list):
        for value in node:
            changed |= everywhere(value, change)
    return changed


def labels(document):
    """Two releases may share a namespace, so that pods are selected by their release, too; the rest is Helm's custom."""
    own = ["instance", "version", "managed-by"]
    own = [f"app.kubernetes.io/{label}" for label in own] + ["helm.sh/chart"]
    return everywhere(document, lambda node: [node.pop(label) for label in own if label in node])


def names(document):
    """For the same reason, names begin with the release's."""
    prefixed = {f"flambeau-{name}": name for name in [*ROLES, "runs", "job", "metrics", "lookups"]}

    def change(node):
        found = [key for key in ("name", "serviceName", "claimName") if node.get(key) in prefixed]
        for key in found:
            node[key] = prefixed[node[key]]
        if node.get("value") == "flambeau-coordinator:7070":
            node["value"] = "coordinator:7070"
            found.append("value")
        return found

    return everywhere(document, change)


def job(document):
    """Kustomize names a job's ConfigMap by a hash of its content; the chart annotates the coordinator's pods with one."""
    metadata = document.get("spec", {}).get("template", {}).get("metadata", {})
    if set(metadata.get("annotations", {})) == {"checksum/job"}:
        return bool(metadata.pop("annotations"))
    return False


def keep(document):
    """`helm uninstall` leaves the claim with the runs; `kubectl delete -k` does not."""
    wanted = {"helm.sh/resource-policy": "keep"}
    if document["kind"] == "PersistentVolumeClaim" and document["metadata"].get("annotations") == wanted:
        return bool(document["metadata"].pop("annotations"))
    return False


def device(document):
    """The chart always names the device; kustomize's base leaves it to the overlays."""
    setting = {"name": "FLAMBEAU_DEVICE", "value": "cpu"}
    for container in containers_of(document):
        if setting in container["env"]:
            container["env"].remove(setting)
            return True
    return False


MEANT = [labels, names, job, keep]
MEANT_IN_BASE = [device]


def containers_of(document):
    return document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])


def plain(document):
    """The document without namespace, and with lists in which order says nothing in one order."""
    document = copy.deepcopy(document)
    document["metadata"].pop("namespace", None)
    if document["kind"] == "ConfigMap":
        # Comments and spaces aside.
        read = json.loads if is_dashboard(document) else tomllib.loads
        document["data"] = {name: read(text) for name, text in document["data"].items()}

    def change(node):
        # The hash behind the name of the ConfigMap.
        if re.fullmatch(r"job-[0-9a-z]{10}", str(node.get("name"))):
            node["name"] = "job"
        for key, by in [("env", "name"), ("volumes", "name"), ("volumeMounts", "mountPath")]:
            if isinstance(node.get(key), list):
                node[key] = sorted(node[key], key=lambda entry: entry[by])

    everywhere(document, change)
    return document


def differences(ours, theirs, where=""):
    """Each place where two documents differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(set(ours) | set(theirs)):
            at = f"{where}.{key}".lstrip(".")
            if key not in ours or key not in theirs:
                yield f"{at} is only in {'kustomize' if key not in ours else 'the chart'}"
            else:
                yield from differences(ours[key], theirs[key], at)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, pair in enumerate(zip(ours, theirs)):
            yield from differences(*pair, f"{where}[{number}]")
    elif ours != theirs:
        yield f"{where} is {ours!r} in the chart, {theirs!r} in kustomize"


def compare(chart, kustomize, undo):
    """Each difference between two renderings once `undo` is undone; and which entries of it did something."""
    used, found = set(), []
    chart = copy.deepcopy(chart)
    for document in chart:
        used |= {entry for entry in undo if entry(document)}
    ours = {title(document): document for document in map(plain, chart)}
    theirs = {title(document): document for document in map(plain, kustomize)}
    for name in sorted(set(ours) | set(theirs)):
        if name not in ours or name not in theirs:
            found.append(f"{name} is only in {'kustomize' if name not in ours else 'the chart'}")
        else:
            found += [f"{name}: {difference}" for difference in differences(ours[name], theirs[name])]
    return found, used


def check_pairs(charts, kustomize):
    needed = set()
    for name, documents in charts.items():
        undo = MEANT + (MEANT_IN_BASE if name == "base" else [])
        found, used = compare(documents, kustomize[name], undo)
        needed |= used
        for difference in found:
            manifests.problems.append(f"{name}: {difference}")
    for entry in MEANT + MEANT_IN_BASE:
        expect(entry in needed, f"nothing differs any more by {entry.__name__}: {entry.__doc__}")

    # That nothing differs counts only if a difference would be found.
    slipped = copy.deepcopy(charts["base"])
    containers_of(next(d for d in slipped if d["kind"] == "Deployment"))[0]["resources"]["limits"]["cpu"] = "3"
    found, _ = compare(slipped, kustomize["base"], MEANT + MEANT_IN_BASE)
    expect(len(found) == 1 and "limits.cpu" in found[0], f"of a planted difference is found: {found}")
    return f"{len(charts)} renderings compared with kustomize's"


# ---- schemas ------------------------------------------------------------------------------------------------


def check_schemas(renderings):
    documents = {name: [d for d in found if d["kind"] not in CUSTOM] for name, found in renderings.items()}
    jobs = {name: found for name, found in documents.items() if any(d["kind"] == "Job" for d in found)}
    others = {name: found for name, found in documents.items() if name not in jobs}
    return f"{manifests.check_schemas(others)}, {manifests.check_schemas(jobs, OLDEST_FOR_JOBS)}"


# ---- forms that only the chart has --------------------------------------------------------------------------


def one(documents, kind, name):
    found = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    expect(len(found) == 1, f"{len(found)} of {kind} {name}")
    return found[0] if found else None


def environment_of(container):
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def check_jobs(name, documents):
    """The form `job`: three Jobs, which end with the job, and carry success or failure."""
    rendering = manifests.Rendering(name, documents)
    expect(not rendering.workloads, f"{name}: has {set(rendering.workloads)} besides Jobs")
    expect(not rendering.of("PodDisruptionBudget"), f"{name}: a disruption budget, which Jobs' pods cannot have")
    for role in ROLES:
        found = one(documents, "Job", f"flambeau-{role}")
        pod = found["spec"]["template"]["spec"]
        container = pod["containers"][0]
        rendering.check_confinement(role, pod, container)
        environment = environment_of(container)
        known = manifests.settings_of(ROLES[role][3])
        unknown = {setting for setting in environment if setting.startswith("FLAMBEAU_")} - known
        expect(not unknown, f"{name}: {role} is given {unknown}, which it does not read")
        expect(environment["FLAMBEAU_AFTER_JOB"] == "exit", f"{name}: {role} does not end with the job")
        expect(pod["restartPolicy"] == "Never", f"{name}: {role}: the rules for failures need Never")
        expect(container["command"][:2] == ["sh", "-c"], f"{name}: {role} does not run by as-job.sh")
        # Kubernetes would take $(...) for a variable of its own.
        expect("$(" not in container["command"][2], f"{name}: as-job.sh has $( in it")
        rules = {
            (rule["action"], *rule["onExitCodes"]["values"])
            for rule in found["spec"]["podFailurePolicy"]["rules"]
            if "onExitCodes" in rule
        }
        wanted = {("FailJob" if role == "coordinator" else "FailIndex", 1)}
        wanted |= {("Ignore", 3)} if role == "worker" else set()
        expect(rules == wanted, f"{name}: {role}: {rules}")
        if role == "ps":
            order = [variable["name"] for variable in container["env"]]
            expect(environment["FLAMBEAU_IDENTITY"] == "ps-$(POD_INDEX)", f"{name}: a server's identity")
            expect(order.index("POD_INDEX") < order.index("FLAMBEAU_IDENTITY"), f"{name}: POD_INDEX is set too late")


def check_wrapper():
    """as-job.sh: the daemon's exit code, and 143 for one that was told to end."""
    script = (CHART / "files" / "as-job.sh").read_text()
    # A daemon that ends well when it is told to, or with the code that it is given.
    daemon = 'trap "exit 0" TERM; echo up; [ "$1" = stay ] || exit "$1"; while :; do sleep 0.05; done'

    def run(argument, told=False):
        command = ["sh", "-c", script, "as-job", "sh", "-c", daemon, "daemon", argument]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        if told:
            process.terminate()
        return process.wait(timeout=20)

    codes = [run("0"), run("1"), run("3"), run("stay", told=True)]
    expect(codes == [0, 1, 3, 143], f"as-job.sh ends with {codes}, not 0, 1, 3, 143")


def check_forms(forms):
    for name in ["job", "job with everything"]:
        check_jobs(name, forms[name])
    full = forms["job with everything"]
    for role in ROLES:
        certificate = one(full, "Certificate", f"flambeau-{role}")["spec"]
        expect(certificate["dnsNames"] == [f"{role}.flambeau"], f"the certificate of {role}: {certificate}")
        # Workers of a ring call each other.
        expect({"server auth", "client auth"} <= set(certificate["usages"]), f"{role}: {certificate}")
        expect(certificate["issuerRef"]["name"] == "authority", f"{role}: {certificate}")
        pod = one(full, "Job", f"flambeau-{role}")["spec"]["template"]["spec"]
        [certs] = [volume for volume in pod["volumes"] if volume["name"] == "certs"]
        sources = {source["secret"]["name"] for source in certs["projected"]["sources"]}
        wanted = {certificate["secretName"], one(full, "Secret", "flambeau-token")["metadata"]["name"]}
        expect(sources == wanted, f"{role}: its certificates are of {sources}")
        expect("FLAMBEAU_TOKEN_FILE" in environment_of(pod["containers"][0]), f"{role}: has no token")
    worker = one(full, "Job", "flambeau-worker")["spec"]["template"]["spec"]["containers"][0]
    expect(worker["resources"]["limits"]["nvidia.com/gpu"] == 1, "a pipeline's worker has no GPU")

    scaler = one(forms["autoscaling"], "HorizontalPodAutoscaler", "flambeau-worker")["spec"]
    metrics = [metric.get("pods", metric.get("external"))["metric"]["name"] for metric in scaler["metrics"]]
    expect(metrics == ["flambeau_worker_samples_per_second", "queue_length"], f"workers are scaled by {metrics}")
    expect(f"`{metrics[0]}`" in (ROOT / "docs" / "metrics.md").read_text(), f"there is no metric {metrics[0]}")
    deployment = one(forms["autoscaling"], "Deployment", "flambeau-worker")
    expect("replicas" not in deployment["spec"], "the Deployment sets what the autoscaler sets")

    idle = one(forms["rings"], "StatefulSet", "flambeau-ps")["spec"]["replicas"]
    expect(idle == 0, f"a job without servers has {idle} of them")
    jobs = {document["metadata"]["name"] for document in forms["rings in a pipeline"] if document["kind"] == "Job"}
    expect(jobs == {"flambeau-coordinator", "flambeau-worker"}, f"a pipeline without servers has the Jobs {jobs}")

    for name, role, priority in [("StatefulSet", "ps", "high"), ("Deployment", "worker", "low")]:
        pod = one(forms["scheduling"], name, f"other-{role}")["spec"]["template"]["spec"]
        expect(pod["priorityClassName"] == priority, f"{role} has priority {pod.get('priorityClassName')}")
        expect(pod["imagePullSecrets"] == [{"name": "registry"}], f"{role}: its pull secrets")
        spread = [rule["whenUnsatisfiable"] for rule in pod.get("topologySpreadConstraints", [])]
        expect(spread == (["DoNotSchedule"] if role == "worker" else []), f"{role} is spread by {spread}")

    # Taken from deploy/prometheus and deploy/grafana, and equal to them.
    found = forms["monitoring"]
    rules = one(found, "PrometheusRule", "flambeau")["spec"]["groups"]
    files = [yaml.safe_load((ROOT / "deploy/prometheus" / name).read_text()) for name in ["rules.yml", "alerts.yml"]]
    expect(rules == [group for file in files for group in file["groups"]], "the PrometheusRule is not deploy/prometheus")
    for file in (ROOT / "deploy/grafana/dashboards").glob("*.json"):
        data = one(found, "ConfigMap", f"flambeau-dashboard-{file.stem}")["data"]
        expect(json.loads(data[f"flambeau-{file.name}"]) == json.loads(file.read_text()), f"{file.name} is another one")

    kinds = {document["kind"] for document in forms["a claim that is there"]}
    expect(not kinds & {"PersistentVolumeClaim", "NetworkPolicy"}, f"a claim that is there: {kinds}")
    check_wrapper()
    return f"{len(forms)} further forms"


def check_refusals(helm):
    for values, word in REFUSED.items():
        done = template(helm, [values], manifests.OLDEST if "form=job," not in values else OLDEST_FOR_JOBS)
        expect(done.returncode and word in done.stderr, f"{values} is not refused for {word}: {done.stderr.strip()}")
    done = template(helm, ["form=job"], "1.28.0")
    expect(done.returncode and "1.29" in done.stderr, "the form job is not refused by Kubernetes 1.28")
    return f"{len(REFUSED) + 1} refusals"


# ---- the rest -----------------------------------------------------------------------------------------------


def leaves(values, prefix=""):
    """Each value's path and default; maps that are empty or free are leaves."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value and key not in ("resources", "labels", "annotations"):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def check_values():
    """README.md's table has each value with its default; `ROLE` there stands for each role."""
    defaults = dict(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| .*\|$", (CHART / "README.md").read_text(), re.M)
    shown = {}
    for path, default in rows:
        for role in ROLES if "ROLE" in path else [""]:
            shown[path.replace("ROLE", role)] = default.strip("`")
    for path in sorted(set(defaults) ^ set(shown)):
        manifests.problems.append(f"{path} is only in {'values.yaml' if path in defaults else 'README.md'}")
    for path, default in shown.items():
        value = defaults.get(path)
        # Longer ones are described.
        if default.startswith("*"):
            continue
        written = value if isinstance(value, str) and value else json.dumps(value)
        expect(written == default, f"README.md: the default of {path} is {written}, not {default}")
    return f"{len(defaults)} values in README.md"


def check_chart(helm):
    lint = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, text=True)
    expect(lint.returncode == 0, f"helm lint: {lint.stdout}{lint.stderr}")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = manifests.version_of_cargo()
    expect(chart["version"] == chart["appVersion"] == version, f"Chart.yaml is not of version {version}")
    oldest = f">={manifests.OLDEST}.0-0"
    expect(chart["kubeVersion"] == oldest, f"Chart.yaml: kubeVersion is {chart['kubeVersion']}, not {oldest}")
    # What a release pushes renders as the folder does: its links are followed.
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([helm, "package", CHART, "--destination", scratch], capture_output=True, check=True)
        packaged = Path(scratch) / f"flambeau-{version}.tgz"
        values = arguments_of(FORMS["monitoring"])
        texts = [
            subprocess.run([helm, "template", "flambeau", chart, *values], capture_output=True, text=True).stdout
            for chart in (CHART, packaged)
        ]
        expect(texts[0] and texts[0] == texts[1], "the packaged chart renders otherwise")


def main():
    helm, version = find_helm()
    if not helm:
        skipped("all of deploy/helm: there is no helm")
        return 0
    check_chart(helm)
    kustomize, _ = manifests.find_kustomize()
    if kustomize:
        kustomize = manifests.render(kustomize, ROOT / "deploy" / "kubernetes")
        expect(set(kustomize) == set(PAIRS), f"not compared with the chart: {sorted(set(kustomize) ^ set(PAIRS))}")
    else:
        skipped("how the chart differs from deploy/kubernetes: there is no kustomize")
        kustomize = {}
    charts = {
        name: render(helm, name, values + monitoring_of(kustomize.get(name, []))) for name, values in PAIRS.items()
    }
    forms = {name: render(helm, name, values) for name, values in FORMS.items()}
    done = [f"helm {version}"]
    if not manifests.problems:
        if kustomize:
            done.append(check_pairs(charts, kustomize))
        done += [check_forms(forms), check_refusals(helm), check_values(), check_schemas(charts | forms)]
    for problem in manifests.problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"deploy/helm: {', '.join(done)}: {len(manifests.problems)} problems")
    return 1 if manifests.problems else 0


if __name__ == "__main__":
    try:
        import kubernetes_validate
        import yaml
    except ImportError as missing:
        skipped(f"all of deploy/helm: {missing}; pip install kubernetes-validate")
        sys.exit(0)
    manifests.kubernetes_validate, manifests.yaml = kubernetes_validate, yaml
    sys.exit(main())
