#!/usr/bin/env python3
"""Checks deploy/kubernetes, offline and without a cluster:

    python3 tests/deploy/check-kubernetes.py [FOLDER]

renders base, overlays and components with kustomize, holds every document against Kubernetes' own schemas
(unknown fields are refused), and sees that the documents fit each other, the daemons' settings in crates/,
and README.md's commands. Without FOLDER it is deploy/kubernetes.

It installs nothing. It needs Python 3.11 and, or else it says SKIPPED with what remains unchecked and why:

    kustomize 5           $FLAMBEAU_TEST_KUSTOMIZE, or kustomize or kubectl (1.27 or newer) on the PATH
    kubernetes-validate   from PyPI, for the Python that runs this; it brings PyYAML and the schemas
"""

import copy
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

# The oldest release that README.md promises.
OLDEST = "1.27"

# What is rendered: a folder, and components that are put over it.
RENDERINGS = [
    ("base", []),
    ("overlays/cpu", []),
    ("overlays/gpu", []),
    ("overlays/cpu", ["secure"]),
    ("overlays/cpu", ["s3"]),
    ("overlays/cpu", ["data"]),
    ("overlays/cpu", ["lookups"]),
    ("overlays/cpu", ["rows-on-disk"]),
    ("overlays/gpu", ["data", "s3", "secure"]),
    ("overlays/mine", []),
]

# The overlay that README.md has its readers write, and the registry that it names; here with a port besides.
OWN = "overlays/mine"
OWN_REGISTRY = "registry.example:5000/flambeau"

METRICS = 9464
LOOKUPS = 7002
# The label of pods that may read rows.
READER = {"flambeau-reader": "true"}
NAME = "app.kubernetes.io/name"
ROLE = "app.kubernetes.io/component"
# By which the sidecar of Grafana's Helm chart finds dashboards.
DASHBOARD = "grafana_dashboard"

# Each role: kind of its workload, image, the port it serves its calls at (for workers: links of other workers), its crate.
ROLES = {
    "coordinator": ("StatefulSet", "coordinator", 7070, "coordinator"),
    "ps": ("StatefulSet", "ps-server", 7001, "ps-server"),
    "worker": ("Deployment", "worker", 7002, "worker"),
}

# Made by hand, as README.md says, so not among what is rendered.
SECRETS = {"s3"} | {f"flambeau-{role}" for role in ROLES}
CLAIMS = {"data"}

problems = []


def expect(holds, what):
    if not holds:
        problems.append(what)


def skipped(what):
    print(f"SKIPPED: {what}", file=sys.stderr, flush=True)


# ---- rendering ----------------------------------------------------------------------------------------------


def find_kustomize():
    """The command that renders a folder, and what it says of itself."""
    given = os.environ.get("FLAMBEAU_TEST_KUSTOMIZE")
    kustomize = given or shutil.which("kustomize")
    if kustomize:
        version = subprocess.run([kustomize, "version"], capture_output=True, text=True)
        if version.returncode == 0:
            return [kustomize, "build"], f"kustomize {version.stdout.strip()}"
        if given:
            sys.exit(f"FLAMBEAU_TEST_KUSTOMIZE={given} is no kustomize: {version.stderr.strip()}")
    if kubectl := shutil.which("kubectl"):
        asked = [kubectl, "version", "--client", "--output", "json"]
        version = subprocess.run(asked, capture_output=True, text=True)
        # Releases that do not name it have one that knows no components.
        if version.returncode == 0 and (found := json.loads(version.stdout).get("kustomizeVersion")):
            return [kubectl, "kustomize"], f"kubectl's kustomize {found}"
    return None, None


def render(kustomize, folder):
    """The documents of base, overlays and components; a name for each rendering."""
    renderings = {}
    with tempfile.TemporaryDirectory() as scratch:
        # A copy, because components are put over an overlay by a kustomization beside it.
        tree = Path(scratch) / "kubernetes"
        shutil.copytree(folder, tree, ignore=shutil.ignore_patterns(Path(OWN).name))
        # The dashboards are a kustomization beside it.
        shutil.copytree(folder.parent / "grafana", tree.parent / "grafana")
        (tree / OWN).mkdir()
        examples = re.findall(r"```yaml\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
        examples = [example.replace("registry.example/flambeau", OWN_REGISTRY) for example in examples]
        own, picked = map(yaml.safe_load, examples)
        own["patches"] += picked["patches"]
        (tree / OWN / "kustomization.yaml").write_text(yaml.safe_dump(own))
        job = (folder / "base" / "job.toml").read_text()
        (tree / OWN / "job.toml").write_text(job.replace('name = "digits"', 'name = "mine"'))
        for number, (over, components) in enumerate(RENDERINGS):
            name = " + ".join([over, *components])
            target = tree / over
            if components:
                target = tree / "overlays" / f"rendering-{number}"
                target.mkdir()
                put_over = {
                    "namespace": "flambeau",
                    "resources": [f"../../{over}"],
                    "components": [f"../../components/{component}" for component in components],
                }
                (target / "kustomization.yaml").write_text(yaml.safe_dump(put_over))
            rendered = subprocess.run([*kustomize, target], capture_output=True, text=True)
            if rendered.returncode:
                problems.append(f"{name} cannot be rendered: {rendered.stderr.strip()}")
                continue
            # Kustomize says so there where it knows something as deprecated.
            expect(not rendered.stderr, f"{name}: {rendered.stderr.strip()}")
            renderings[name] = list(yaml.safe_load_all(rendered.stdout))
    return renderings


def unrendered(folder):
    """The documents of base as they lie there."""
    files = [file for file in sorted(folder.glob("base/*.yaml")) if file.name != "kustomization.yaml"]
    return {f"base/{file.name}": list(yaml.safe_load_all(file.read_text())) for file in files}


# ---- schemas ------------------------------------------------------------------------------------------------


def check_schemas(renderings, oldest=OLDEST):
    """Holds each document against the schemas of the oldest and the newest release."""
    versions = [oldest, kubernetes_validate.latest_version()]
    documents = {}
    for name, rendering in renderings.items():
        for document in rendering:
            documents.setdefault(json.dumps(document, sort_keys=True), (name, document))

    def refusal(document, version):
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(str(part) for part in error.path)
            return f"{where}: {error.message}"
        return None

    held = 0
    for name, document in documents.values():
        if document["kind"] in ("PodMonitor", "PrometheusRule"):
            continue
        for version in versions:
            held += 1
            if why := refusal(document, version):
                problems.append(f"{name}: {title(document)} is not Kubernetes {version}'s: {why}")

    # That nothing was refused counts only if a slip of the pen would have been.
    pods = next(d for _, d in documents.values() if d["kind"] in ("StatefulSet", "Job"))
    for version in versions:
        for slip in [{"livenesProbe": {}}, {"ports": [{"containerPort": "many"}]}]:
            slipped = copy.deepcopy(pods)
            slipped["spec"]["template"]["spec"]["containers"][0].update(slip)
            expect(refusal(slipped, version), f"the schemas of Kubernetes {version} let {slip} pass")
    return f"{held} checks against the schemas of Kubernetes {' and '.join(versions)}"


# ---- consistency --------------------------------------------------------------------------------------------


def title(document):
    return f"{document['kind']} {document['metadata']['name']}"


def version_of_cargo():
    """The version of this workspace, which is that of a release's images."""
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def settings_of(crate):
    """The environment variables that a daemon reads."""
    names = set()
    for source in [crate, "daemon", "shared-proto"]:
        for file in (ROOT / "crates" / source).rglob("*.rs"):
            names.update(re.findall(r'env = "(FLAMBEAU_\w+)"', file.read_text()))
    return names


def selects(selector, labels):
    """Whether a selector of matchLabels alone, or a map of labels, takes a pod with these labels."""
    wanted = selector.get("matchLabels", selector)
    return bool(wanted) and wanted.items() <= labels.items()


class Rendering:
    def __init__(self, name, documents):
        self.name = name
        self.documents = documents
        self.workloads = {
            document["metadata"]["name"]: document
            for document in documents
            if document["kind"] in ("StatefulSet", "Deployment")
        }

    def of(self, kind):
        return [document for document in self.documents if document["kind"] == kind]

    def names(self, kind):
        return {document["metadata"]["name"] for document in self.of(kind)}

    def expect(self, holds, what):
        expect(holds, f"{self.name}: {what}")

    def labels(self, role):
        return self.workloads[role]["spec"]["template"]["metadata"]["labels"]

    def selected(self, selector):
        return {role for role in self.workloads if selects(selector, self.labels(role))}

    def check(self):
        self.expect(set(self.workloads) == set(ROLES), f"the workloads are {sorted(self.workloads)}")
        if set(self.workloads) != set(ROLES):
            return
        for document in self.documents:
            labels = document["metadata"].get("labels", {})
            self.expect(labels.get(NAME) == "flambeau", f"{title(document)} has no label {NAME}")
            self.expect(labels.get(ROLE) in (None, document["metadata"]["name"]), f"{title(document)}: its labels")
        namespaces = {document["metadata"].get("namespace") for document in self.documents}
        wanted = {None} if self.name == "base" else {"flambeau"}
        self.expect(namespaces == wanted, f"the namespaces are {namespaces}")
        for role in ROLES:
            self.check_workload(role)
        self.check_services()
        self.check_budgets()
        self.check_network()
        self.check_monitors()
        self.check_dashboards()
        self.expect(len(self.of("PrometheusRule")) == (self.name != "base"), "PrometheusRules")
        for document in self.of("PodMonitor") + self.of("PrometheusRule"):
            picked = document["metadata"]["labels"].get("release")
            self.expect((picked is not None) == (self.name == OWN), f"{title(document)}: its label release")

    def check_workload(self, role):
        kind, image, port, crate = ROLES[role]
        workload = self.workloads[role]
        spec = workload["spec"]
        pod = spec["template"]["spec"]
        self.expect(workload["kind"] == kind, f"{role} is a {workload['kind']}")
        self.expect(self.labels(role) == {NAME: "flambeau", ROLE: role}, f"{role}: its pods' labels")
        self.expect(spec["selector"] == {"matchLabels": self.labels(role)}, f"{role}: its selector")
        if kind == "StatefulSet":
            self.expect(spec["serviceName"] in self.names("Service"), f"{role}: its Service")
        self.expect(len(pod["containers"]) == 1, f"{role}: more than one container")
        container = pod["containers"][0]
        if role == "worker" and "overlays/gpu" in self.name:
            image = "worker-cuda"
        registry = OWN_REGISTRY if self.name == OWN else "flambeau"
        image = f"{registry}/{image}:{version_of_cargo()}"
        self.expect(container["image"] == image, f"{role}: image {container['image']}, not {image}")

        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        wanted = {"metrics": METRICS, "grpc": port}
        if role == "ps" and "lookups" in self.name:
            wanted["lookups"] = LOOKUPS
        self.expect(ports == wanted, f"{role}: ports {ports}, not {wanted}")
        self.check_environment(role, container, settings_of(crate), ports)
        self.check_confinement(role, pod, container)
        self.check_volumes(role, pod, container)

        probes = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
        for probe, path in probes.items():
            asked = container.get(probe, {}).get("httpGet")
            self.expect(asked == {"path": path, "port": "metrics"}, f"{role}: {probe} asks {asked}")
        for which in ["requests", "limits"]:
            given = set(container.get("resources", {}).get(which, {}))
            self.expect(given >= {"cpu", "memory"}, f"{role}: {which} lack cpu or memory")
        self.expect(pod["terminationGracePeriodSeconds"] > 10, f"{role}: less time to leave than it takes")
        if role == "worker" and "overlays/gpu" in self.name:
            gpus = container["resources"]["limits"].get("nvidia.com/gpu")
            self.expect(gpus == 1, f"a worker has {gpus} GPUs")
            # The image's entry point wants to write locks, which the root file system does not take.
            self.expect(container.get("command") == ["worker"], "GPU workers start by the image's entry point")
            keys = {toleration.get("key") for toleration in pod.get("tolerations", [])}
            self.expect("nvidia.com/gpu" in keys, "workers do not tolerate the taint of GPU nodes")

    def check_environment(self, role, container, known, ports):
        environment = {}
        for variable in container["env"]:
            name, value = variable["name"], variable.get("value")
            self.expect(name not in environment, f"{role}: {name} is set twice")
            for used in re.findall(r"\$\((\w+)\)", value or ""):
                self.expect(used in environment, f"{role}: {name} uses {used}, which is not set before it")
            environment[name] = value
            if name.startswith("FLAMBEAU_"):
                self.expect(name in known, f"{role}: no setting in its crates is called {name}")

        def is_set(name, wanted):
            self.expect(environment.get(name) == wanted, f"{role}: {name} is {environment.get(name)}, not {wanted}")

        is_set("FLAMBEAU_METRICS_LISTEN", f"0.0.0.0:{ports['metrics']}")
        is_set("FLAMBEAU_AFTER_JOB", "wait")
        is_set("FLAMBEAU_LOG_FORMAT", "json")
        prefix = "FLAMBEAU_WORKER" if role == "worker" else "FLAMBEAU"
        is_set(f"{prefix}_LISTEN", f"0.0.0.0:{ports['grpc']}")
        if role == "coordinator":
            self.check_job(container, environment.get("FLAMBEAU_JOB", "/"))
        else:
            is_set("FLAMBEAU_COORDINATOR", f"coordinator:{ROLES['coordinator'][2]}")
        if role == "worker":
            is_set("FLAMBEAU_WORKER_ADVERTISE", f"$(POD_IP):{ports['grpc']}")
            own = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
            self.expect(own in container["env"], "worker: POD_IP is not the pod's status.podIP")
        if role == "ps":
            is_set("FLAMBEAU_ADVERTISE", f"$(POD_IP):{ports['grpc']}")
            is_set("FLAMBEAU_LOOKUP_LISTEN", f"0.0.0.0:{LOOKUPS}" if "lookups" in self.name else None)
            on_disk = "rows-on-disk" in self.name
            is_set("FLAMBEAU_TABLE_FOLDER", "/rows" if on_disk else None)
            mebibytes, memory = environment.get("FLAMBEAU_TABLE_MEBIBYTES"), container["resources"]["limits"]["memory"]
            self.expect((mebibytes, memory) == (("1024", "2Gi") if on_disk else (None, "1Gi")), f"rows in {mebibytes} of {memory}")
            fields = [("POD_IP", "status.podIP"), ("FLAMBEAU_IDENTITY", "metadata.name")]
            for name, field in fields:
                set_so = {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}
                self.expect(set_so in container["env"], f"ps: {name} is not the pod's {field}")
        if role == "worker" and self.name != "base":
            is_set("FLAMBEAU_DEVICE", "cuda:0" if "overlays/gpu" in self.name else "cpu")
        if "secure" in self.name:
            is_set("FLAMBEAU_TLS_CA", "/certs/ca.crt")
            is_set("FLAMBEAU_TLS_CERT", "/certs/tls.crt")
            is_set("FLAMBEAU_TLS_KEY", "/certs/tls.key")
            is_set("FLAMBEAU_TOKEN_FILE", "/certs/token")
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            self.expect("/certs" in mounts, f"{role}: nothing is mounted at /certs")

    def check_job(self, container, path):
        """The job's file is there, and as many servers and workers are started as it waits for."""
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        path = Path(path)
        self.expect(str(path.parent) in mounts, f"coordinator: nothing is mounted where {path} should be")
        configs = [config for config in self.of("ConfigMap") if DASHBOARD not in config["metadata"]["labels"]]
        self.expect(len(configs) == 1, f"{len(configs)} ConfigMaps")
        text = configs[0]["data"].get(path.name)
        self.expect(text is not None, f"coordinator: the ConfigMap has no {path.name}")
        job = tomllib.loads(text or "")
        wanted = "mine" if self.name == OWN else "digits"
        self.expect(job.get("name") == wanted, f"the job is {job.get('name')}, not {wanted}")
        cluster = job.get("cluster", {})
        for role, field in [("ps", "ps"), ("worker", "workers")]:
            replicas = self.workloads[role]["spec"]["replicas"]
            self.expect(replicas >= cluster.get(field, 1), f"{replicas} {role} for a job of {cluster.get(field)}")
        self.expect(self.workloads["coordinator"]["spec"]["replicas"] == 1, "there is one coordinator")

    def check_confinement(self, role, pod, container):
        """What the Pod Security Standard "restricted" demands, and more."""
        of_pod, of_container = pod["securityContext"], container["securityContext"]
        wanted = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}
        self.expect(wanted.items() <= of_pod.items(), f"{role}: runs as another than 10001")
        self.expect(of_pod["seccompProfile"] == {"type": "RuntimeDefault"}, f"{role}: seccomp")
        confined = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        self.expect(of_container == confined, f"{role}: its container may do {of_container}")
        self.expect(pod["automountServiceAccountToken"] is False, f"{role}: has a service account's token")

    def check_volumes(self, role, pod, container):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        mounted = set(mounts.values())
        self.expect(mounted == set(volumes), f"{role}: mounts {mounted}, has {set(volumes)}")
        self.expect("emptyDir" in volumes.get(mounts.get("/tmp"), {}), f"{role}: /tmp cannot be written")
        for name, volume in volumes.items():
            sources = set(volume) - {"name"}
            self.expect(len(sources) == 1, f"{role}: the volume {name} is {sources}")
            if "configMap" in volume:
                self.expect(volume["configMap"]["name"] in self.names("ConfigMap"), f"{role}: no ConfigMap for {name}")
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                claims = self.names("PersistentVolumeClaim") | CLAIMS
                self.expect(claim in claims, f"{role}: no claim {claim}")
            if "secret" in volume:
                self.expect(volume["secret"]["secretName"] == f"flambeau-{role}", f"{role}: another role's Secret")
        for source in container.get("envFrom", []):
            self.expect(source["secretRef"]["name"] in SECRETS, f"{role}: envFrom {source}")
            self.expect(source["secretRef"].get("optional"), f"{role}: does not start without {source}")

        # The roles that share the run directories must be able to mount them at once.
        shared = {role for role in ROLES if self.has_claim(role, "runs")}
        [claim] = self.of("PersistentVolumeClaim")
        modes = claim["spec"]["accessModes"]
        if "s3" in self.name:
            self.expect(shared == {"coordinator"} and modes == ["ReadWriteOnce"], f"{shared} mount {modes}")
        else:
            self.expect(shared == set(ROLES) and modes == ["ReadWriteMany"], f"{shared} mount {modes}")

    def has_claim(self, role, claim):
        volumes = self.workloads[role]["spec"]["template"]["spec"]["volumes"]
        return claim in [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in volumes]

    def check_services(self):
        for role in ["coordinator", "ps"]:
            found = [s for s in self.of("Service") if s["metadata"]["name"] == role]
            self.expect(len(found) == 1, f"{len(found)} Services {role}")
            for service in found:
                spec = service["spec"]
                self.expect(self.selected(spec["selector"]) == {role}, f"Service {role} selects others")
                ports = {(port["port"], port["targetPort"]) for port in spec["ports"]}
                wanted = {(ROLES[role][2], "grpc")}
                if role == "ps" and "lookups" in self.name:
                    wanted.add((LOOKUPS, "lookups"))
                self.expect(ports == wanted, f"Service {role} has ports {ports}")
                self.expect((spec.get("clusterIP") == "None") == (role == "ps"), f"Service {role}: headless or not")

    def check_budgets(self):
        budgets = self.of("PodDisruptionBudget")
        selected = [self.selected(budget["spec"]["selector"]) for budget in budgets]
        # A pod of two budgets cannot be evicted at all.
        for role in ROLES:
            self.expect(selected.count({role}) == 1, f"{role}: {selected.count({role})} disruption budgets")
        self.expect(len(budgets) == len(ROLES), "a disruption budget too many")

    def peers(self, selector):
        return {"reader"} if selector == {"matchLabels": READER} else self.selected(selector)

    def check_network(self):
        """Checks which peers may reach which port of which role, by all policies together."""
        reached = set()
        for policy in self.of("NetworkPolicy"):
            for rule in policy["spec"]["ingress"]:
                peers = {"anyone"}
                if "from" in rule:
                    peers = set().union(*(self.peers(peer["podSelector"]) for peer in rule["from"]))
                for role in self.selected(policy["spec"]["podSelector"]):
                    reached |= {(peer, role, port["port"]) for peer in peers for port in rule["ports"]}
        wanted = {("anyone", role, METRICS) for role in ROLES}
        wanted |= {(peer, "coordinator", ROLES["coordinator"][2]) for peer in ROLES}
        wanted |= {("worker", role, ROLES[role][2]) for role in ("ps", "worker")}
        if "lookups" in self.name:
            wanted |= {(peer, "ps", LOOKUPS) for peer in ("reader", "coordinator")}
        self.expect(reached == wanted, f"policies differ from what is meant: {sorted(reached ^ wanted)}")

    def check_monitors(self):
        """A PodMonitor has no schema here, so all of it is looked at."""
        monitors = self.of("PodMonitor")
        self.expect(len(monitors) == (self.name != "base"), f"{len(monitors)} PodMonitors")
        for monitor in monitors:
            spec = monitor["spec"]
            self.expect(monitor["apiVersion"] == "monitoring.coreos.com/v1", "PodMonitor: apiVersion")
            self.expect(set(spec) == {"selector", "jobLabel", "podMetricsEndpoints"}, f"PodMonitor: {set(spec)}")
            self.expect(self.selected(spec["selector"]) == set(ROLES), "the PodMonitor does not select all pods")
            expected_job = {self.labels(role).get(spec["jobLabel"]) for role in ROLES}
            self.expect(expected_job == {"flambeau"}, f"PodMonitor: the label job becomes {expected_job}")
            for endpoint in spec["podMetricsEndpoints"]:
                known = {"port", "path", "interval", "scrapeTimeout", "relabelings", "honorLabels"}
                self.expect(set(endpoint) <= known, f"PodMonitor: {set(endpoint) - known}")
                self.expect((endpoint["port"], endpoint["path"]) == ("metrics", "/metrics"), "PodMonitor: endpoint")
                label = "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", ROLE)
                role = {"sourceLabels": [label], "targetLabel": "role"}
                self.expect(endpoint["relabelings"] == [role], "PodMonitor: the label role")
                # Else the coordinator's counts by role would be hidden by the label of its own pod.
                self.expect(endpoint["honorLabels"] is True, "PodMonitor: honorLabels")


    def check_dashboards(self):
        """Each dashboard of deploy/grafana is in a ConfigMap of its own, as it is there."""
        found = {}
        for config in self.of("ConfigMap"):
            if config["metadata"]["labels"].get(DASHBOARD) == "1":
                [(file, text)] = config["data"].items()
                found[file] = json.loads(text)
                # kubectl apply keeps a copy in an annotation, which Kubernetes limits to 256 KiB.
                self.expect(len(json.dumps(config)) < 200 * 1024, f"{title(config)} is too large for kubectl apply")
        files = [] if self.name == "base" else sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
        wanted = {f"flambeau-{file.name}": json.loads(file.read_text()) for file in files}
        self.expect(found == wanted, f"dashboards {sorted(found)}, not those of deploy/grafana, {sorted(wanted)}")


def check_rules(folder):
    """The PrometheusRule has the rules and alerts of deploy/prometheus, all of them and no other."""
    rule = yaml.safe_load((folder / "components/monitoring/prometheus-rule.yaml").read_text())
    expect(rule["apiVersion"] == "monitoring.coreos.com/v1", "PrometheusRule: apiVersion")
    expect(rule["kind"] == "PrometheusRule" and set(rule["spec"]) == {"groups"}, "PrometheusRule: kind or spec")
    wanted = [
        group
        for file in ["rules.yml", "alerts.yml"]
        for group in yaml.safe_load((ROOT / "deploy/prometheus" / file).read_text())["groups"]
    ]
    expect(
        rule["spec"]["groups"] == wanted,
        "the PrometheusRule is not that of deploy/prometheus: run scripts/make-prometheus-rule.sh",
    )
    return f"a PrometheusRule of {sum(len(group['rules']) for group in wanted)} rules and alerts"


def check_readme(folder):
    """The folders and workloads that the commands name are there."""
    text = (folder / "README.md").read_text()
    for path in re.findall(r"-k (deploy/kubernetes/\S+)", text):
        there = folder / Path(path).relative_to("deploy/kubernetes")
        expect((there / "kustomization.yaml").exists() or there.name == "mine", f"README.md: {path} is not there")
    for kind, name in re.findall(r"\b(statefulset|deployment)/([\w-]+)", text):
        expect(ROLES.get(name, ("",))[0].lower() == kind, f"README.md: there is no {kind}/{name}")
    for component in (folder / "components").iterdir():
        expect(f"components/{component.name}" in text, f"README.md says nothing of components/{component.name}")
        rendered = {"images", "monitoring", "pod-monitor"}.union(*(components for _, components in RENDERINGS))
        expect(component.name in rendered, f"components/{component.name} is not rendered here")


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "deploy" / "kubernetes")
    kustomize, version = find_kustomize()
    done = []
    if kustomize:
        renderings = render(kustomize, folder)
        for name, documents in renderings.items():
            Rendering(name, documents).check()
        done.append(f"{len(renderings)} renderings by {version}")
    else:
        skipped(
            "overlays and components of deploy/kubernetes, and how its documents fit each other: there is neither"
            " kustomize nor a kubectl that has one (1.27 or newer)"
        )
        renderings = unrendered(folder)
    if renderings:
        done.append(check_schemas(renderings))
    done.append(check_rules(folder))
    check_readme(folder)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"deploy/kubernetes: {', '.join(done)}: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        import kubernetes_validate
        import yaml
    except ImportError as missing:
        skipped(f"all of deploy/kubernetes: {missing}; pip install kubernetes-validate")
        sys.exit(0)
    sys.exit(main())
