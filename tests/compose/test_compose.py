#!/usr/bin/env python3
"""Runs docker-compose.yml with real containers, and does to them what happens to containers.

    tests/compose/test_compose.py               everything; on two cores some ten minutes, and twenty more
                                                where the programs have to be built from the start
    tests/compose/test_compose.py files images  some of it: files, images, plain, secure, tables, rings, upgrades, jobs,
                                                runbook

Needs a Docker engine, docker compose (v2) or docker-compose (1.29), and the images that Flambeau's are
built on (tests/compose/base-images.sh provides them). Where there is no engine it says SKIPPED and why,
and exits with 0. It uses a project, ports and image tags of its own, and takes down what it has brought up
however it ends; the images stay, since their layers make the next run short.

FLAMBEAU_TEST_DATA     a folder with data sets: MNIST is trained too if it is there
FLAMBEAU_TEST_COMPOSE  the compose program to use, as in "docker-compose"
FLAMBEAU_TEST_PROGRAMS   a folder with the programs flambeau (or flambeau-under-test), ps-server and worker, such as
                         target/debug after `cargo test --workspace`: the images are made of these, and of the Dockerfile
                         all is used but its build of programs. The machine's C library must be no newer than the images'.
FLAMBEAU_TEST_OPT_LEVEL  without FLAMBEAU_TEST_PROGRAMS, the optimisation of the programs; the default is 3, and 1 builds
                         sooner

Without FLAMBEAU_TEST_PROGRAMS, `images` builds all of the Dockerfile. When it passes, it writes to
deploy/docker/built.sha256 of which files this was true. .ci/containers goes by it; commit it with these files.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOGS = ROOT / "target" / "compose-test"
TAG = "compose-test"

# What the same jobs come to on one machine without containers (README.md, docs/benchmarks.md), and how
# much less or more is the same.
LOCAL_ACCURACY = {"digits": 0.964, "mnist": 0.974}
TOLERANCE = 0.015

# What is done to the long job takes so many seconds, with some to spare.
LONG_SECONDS = 100
SECURE_SECONDS = 40
UPGRADE_SECONDS = 45
RING_SECONDS = 60

IMAGES = {
    "coordinator": f"flambeau/coordinator:{TAG}",
    "ps": f"flambeau/ps-server:{TAG}",
    "worker": f"flambeau/worker:{TAG}",
}
# Takes the place of the Dockerfile's stages `planner` and `builder`.
PREBUILT = """FROM scratch AS builder
LABEL flambeau.stage=build
COPY deploy/docker/programs /programs
COPY deploy/docker/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt

"""
# The files that say how programs are built in containers, each with its digest when this was last done.
BUILT = ROOT / "deploy/docker/built.sha256"
PS_SERVER_MEGABYTES = 60
BUILD_TOOLS = {"cargo", "rustc", "rustup", "gcc", "cc", "g++", "ld", "as", "make", "git"}
SOURCES = re.compile(r"\.(rs|proto)$|(^|/)(Cargo\.(toml|lock)|Dockerfile[^/]*|\.git)(/|$)")
SECRETS = re.compile(r"\.key$|(^|/)(\.env|id_[a-z0-9]+|credentials|token)$|^certs/.")

# Log lines that documented commands look for, and that are there because of what the tests do.
CAUSED = {"refused: "}

BEGAN = time.monotonic()


class Failure(Exception):
    """Something is not as it should be."""


def say(text):
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


def check(holds, what):
    if not holds:
        raise Failure(what)


def run(*command, fine=True, **settings):
    """Runs a command to its end; returns what it printed. `fine`: it must end with 0."""
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings
    )
    if fine and done.returncode != 0:
        raise Failure(f"{shlex.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def ends_with(*command, **settings):
    """Runs a command to its end; returns its exit code and what it printed."""
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings
    )
    return done.returncode, done.stdout


def until(what, seconds, holds, last=None):
    """Waits until `holds()` gives something true, and returns it. A failure says what `last()` gives."""
    deadline = time.monotonic() + seconds
    while True:
        found = holds()
        if found:
            return found
        if time.monotonic() > deadline:
            raise Failure(f"waited {seconds} s in vain: {what}" + (f"; {last()}" if last else ""))
        time.sleep(0.5)


def inspect(kind, name):
    return json.loads(run("docker", kind, "inspect", name))[0]


def free_port():
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


def compose_programs():
    """The compose programs of this machine, the one to use first."""
    if wanted := os.environ.get("FLAMBEAU_TEST_COMPOSE"):
        return [shlex.split(wanted)]
    programs = (["docker", "compose"], ["docker-compose"])
    return [program for program in programs if answers([*program, "version"])]


def answers(command):
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).returncode == 0
    except FileNotFoundError:
        return False


class Project:
    """A compose project of the file at the root: services, and what is known of their containers."""

    def __init__(self, program, kind, profile=None):
        self.program = program
        self.name = f"flambeau-{kind}-{os.getpid()}"
        self.suffix = f"-{profile}" if profile else ""
        self.prometheus = f"http://127.0.0.1:{(prometheus_port := free_port())}"
        # Nothing of the user's own settings counts.
        mine = {k: v for k, v in os.environ.items() if not k.startswith(("FLAMBEAU_", "AWS_"))}
        self.environment = mine | {
            "FLAMBEAU_VERSION": TAG,
            "FLAMBEAU_REVISION": run("git", "rev-parse", "HEAD", cwd=ROOT).strip(),
            "FLAMBEAU_PORT": str(free_port()),
            "PROMETHEUS_PORT": str(prometheus_port),
            "COMPOSE_PROJECT_NAME": self.name,
        }
        if profile:
            self.environment["COMPOSE_PROFILES"] = profile
        if data := os.environ.get("FLAMBEAU_TEST_DATA"):
            self.environment["FLAMBEAU_DATA_FOLDER"] = str(pathlib.Path(data).resolve())

    def compose(self, *arguments, profiles=(), folder=ROOT, **settings):
        choose = [word for profile in profiles for word in ("--profile", profile)]
        with tempfile.NamedTemporaryFile(suffix=".env") as nothing:
            command = [*self.program, "--env-file", nothing.name, "--file", "docker-compose.yml", *choose]
            return run(*command, *arguments, cwd=folder, env=self.environment, **settings)

    def up(self, ps, worker, *services):
        """Brings up so many of each."""
        scale = [f"--scale=ps{self.suffix}={ps}", f"--scale=worker{self.suffix}={worker}"]
        services = [f"worker{self.suffix}", *services]
        self.compose("up", "--detach", "--no-build", *scale, *services)

    def containers(self, service, running=False):
        labels = [f"com.docker.compose.project={self.name}", f"com.docker.compose.service={service}"]
        filters = [f"--filter=label={label}" for label in labels]
        return run("docker", "ps", "--quiet", *([] if running else ["--all"]), *filters).split()

    def role(self, role, running=False):
        return self.containers(role + self.suffix, running)

    def roles(self):
        return [c for role in ("coordinator", "ps", "worker") for c in self.role(role)]

    def network(self):
        return f"{self.name}_default"

    def status(self):
        """What `flambeau status` tells, or nothing while no coordinator answers."""
        for coordinator in self.role("coordinator", running=True):
            code, text = ends_with(
                "docker", "exec", coordinator, "flambeau", "status", "--json"
            )
            if code == 0:
                return json.loads(text)
        return None

    def live(self, role):
        status = self.status() or {"tasks": []}
        return sum(t["alive"] and t["task"].startswith(f"{role}-") for t in status["tasks"])

    def await_live(self, role, number, seconds=60):
        until(f"{number} of role {role} are live", seconds, lambda: self.live(role) == number, self.status)

    def await_progress(self, seconds=90):
        """Waits until a hundred more steps have been finished."""
        steps = until("the coordinator answers", seconds, self.status)["steps"]
        until("training goes on", seconds, lambda: (self.status() or {"steps": 0})["steps"] > steps + 100)

    def query(self, expression):
        """The values that Prometheus gives."""
        url = f"{self.prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            return []
        return [float(series["value"][1]) for series in found]

    def read(self, path, program="cat"):
        """A file of the volume with the runs."""
        volume = f"{self.name}_runs:/runs:ro"
        command = ["docker", "run", "--rm", "--network=none", "--volume", volume, "--entrypoint", program]
        return run(*command, IMAGES["coordinator"], path)

    def find(self, path):
        """A file of the volume with the runs, or nothing while it is not there."""
        folder, name = path.rsplit("/", 1)
        return self.read(path) if name in self.read(folder, "ls").split() else None

    def epochs_that_last(self, run_name, seconds, least):
        """How many epochs of the digits last about this long at the pace of another run. Its own mean also counts the start of its workers, so
        that a job by it may end far too soon."""
        text = self.find(f"/runs/{run_name}/metrics.jsonl")
        check(text, f"the run {run_name} has no metrics")
        points = [point for point in map(json.loads, text.splitlines()) if point["event"] == "steps"]
        spans = [(end["samples"] - begin["samples"], end["seconds"] - begin["seconds"]) for begin, end in zip(points, points[1:])]
        paces = [samples / took for samples, took in spans if samples > 0 and took > 0]
        check(paces, f"the run {run_name} has told no pace")
        return max(least, int(statistics.median(paces) * seconds / 1437))

    def await_end(self, run_name, seconds):
        """Waits for the end of the job, at which every container must end well and stay so. Returns the summary."""

        def ended():
            states = {c: inspect("container", c)["State"] for c in self.roles()}
            for container, state in states.items():
                check(
                    state["Running"] or state["Restarting"] or state["ExitCode"] == 0,
                    f"container {container} has ended with {state['ExitCode']}",
                )
            return not any(state["Running"] or state["Restarting"] for state in states.values())

        until("every role has ended", seconds, ended)
        starts = [inspect("container", c)["State"]["StartedAt"] for c in self.roles()]
        # The engine decides when a container ends whether it starts it again; until it does, the container is "Restarting".
        time.sleep(1)
        check(ended(), "a role came back although the job has ended")
        again = [inspect("container", c)["State"]["StartedAt"] for c in self.roles()]
        check(starts == again, "a role was started again although the job has ended")
        return json.loads(self.read(f"/runs/{run_name}/summary.json"))

    def keep_logs(self):
        LOGS.mkdir(parents=True, exist_ok=True)
        text = self.compose("logs", "--no-color", "--timestamps", fine=False)
        path = LOGS / f"{self.name}.log"
        path.write_text(text)
        say(f"the containers' logs are in {path}")

    def down(self):
        """Takes everything down, and looks whether something is left."""
        profiles = ("gpu", "secure", "dashboards")
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "15", profiles=profiles)
        label = f"--filter=label=com.docker.compose.project={self.name}"
        for kind, command in {
            "containers": ("ps", "--all", "--quiet"),
            "networks": ("network", "ls", "--quiet"),
            "volumes": ("volume", "ls", "--quiet"),
        }.items():
            left = run("docker", *command, label).split()
            check(not left, f"{kind} were left behind: {left}")
        say("taken down; no container, network or volume is left")


@contextlib.contextmanager
def brought_up(program, kind, profile=None):
    """A project that is taken down at the end, whatever happens."""
    project = Project(program, kind, profile)
    try:
        yield project
    except BaseException:
        for last in (project.keep_logs, project.down):
            try:
                last()
            except Failure as failure:
                say(f"besides: {failure}")
        raise
    project.down()


def kill_from_outside(container):
    """SIGKILL for a container's main process, by its number on the host: `docker kill` would be taken for
    a wish that it stays down."""
    pid = inspect("container", container)["State"]["Pid"]
    check(pid > 0, f"container {container} does not run")
    base = re.search(r"^ARG BASE_IMAGE=(.*)$", dockerfile(), re.M).group(1)
    run("docker", "run", "--rm", "--pid=host", "--network=none", base, "sh", "-c", f"kill -9 {pid}")


def dockerfile():
    return (ROOT / "deploy/docker/Dockerfile").read_text()


# --- what is tested


def test_files(programs):
    """The compose file, .env.example and Prometheus' files are valid and fit together."""
    for program in programs:
        project = Project(program, "files")
        for profiles in ((), ("gpu",), ("secure",), ("dashboards",), ("gpu", "secure", "dashboards")):
            project.compose("config", "--quiet", profiles=profiles)
        version = run(*program, "version", "--short").strip()
        say(f"compose {version} accepts the file with no profile, gpu, secure, dashboards, and all")

    text = (ROOT / "docker-compose.yml").read_text()
    settings = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    # Those that are passed on as they are have no default.
    settings |= {name: "" for name in re.findall(r"^  ((?:FLAMBEAU|AWS)_\w+):$", text, re.M)}
    # What volumes' names begin with, which is no setting of the user's.
    settings["FLAMBEAU_CERTS"] = ""
    # Compose's own.
    settings["COMPOSE_PROFILES"] = ""
    shown = re.findall(r"^#(: )?(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.M)
    example = {name: "" if absent else value for absent, name, value in shown}
    check(settings == example, f"not the same in both: {sorted(settings.items() ^ example.items())}")
    say(f".env.example has the compose file's {len(settings)} settings, with their defaults")
    the_rules_hold()


def test_images(programs):
    """The images are built by the compose file, and hold what they should."""
    project = Project(programs[0], "images")
    began = time.monotonic()
    prebuilt = os.environ.get("FLAMBEAU_TEST_PROGRAMS")
    # As they are now: they may be edited while the build runs.
    digests = digests_of_build()
    if prebuilt:
        with folder_with_programs(pathlib.Path(prebuilt)) as folder:
            project.compose("build", *IMAGES, folder=folder)
    else:
        level = f"OPT_LEVEL={os.environ.get('FLAMBEAU_TEST_OPT_LEVEL', '3')}"
        project.compose("build", "--build-arg", level, *IMAGES)
    say(f"images built in {time.monotonic() - began:.0f} s")

    base = re.search(r"^ARG BASE_IMAGE=(.*)$", dockerfile(), re.M).group(1)
    base_bytes = inspect("image", base)["Size"]
    for role, image in IMAGES.items():
        found = inspect("image", image)
        over = (found["Size"] - base_bytes) / 1e6
        say(f"{image}: {found['Size'] / 1e6:.1f} MB, {over:.1f} over {base}")
        if role == "ps":
            check(over <= PS_SERVER_MEGABYTES, f"{image} is {over:.1f} MB over its base")
        config = found["Config"]
        check(config["User"] == "10001:10001", f"{image} runs as {config['User']!r}")
        check(config.get("StopSignal") == "SIGTERM", f"{image} has no stop signal")
        check("--check-health" in config["Healthcheck"]["Test"], f"{image} has no health check")
        check(config["Labels"]["org.opencontainers.image.version"] == TAG, f"{image} has no version")
        revision = config["Labels"]["org.opencontainers.image.revision"]
        check(revision == project.environment["FLAMBEAU_REVISION"], f"{image} is of commit {revision}")
        for setting in config["Env"]:
            secret = re.search(r"SECRET|PASSWORD|TOKEN|KEY", setting.split("=")[0])
            check(not secret, f"{image} has a secret in its environment: {setting}")
        wrong = [path for path in files_of(image) if is_out_of_place(path)]
        check(not wrong, f"{image} has what it should not: {wrong}")
    say("no image has build tools, sources or secrets; all run as user 10001")
    if not prebuilt:
        BUILT.write_text(digests)
        say(f"{BUILT.relative_to(ROOT)} says of which files the images were built")


def digests_of_build():
    """The digests of the files that BUILT names, in its format: that of sha256sum."""
    return run("sha256sum", *(line.split()[1] for line in BUILT.read_text().splitlines()), cwd=ROOT)


@contextlib.contextmanager
def folder_with_programs(programs):
    """A folder that compose builds the images in as at the root, but its Dockerfile takes these programs and builds none."""
    head, planner, builder, *rest = re.split(r"(?m)^(?=FROM )", dockerfile())
    replaced = [stage.splitlines()[0].split()[-1] for stage in (planner, builder)]
    check(replaced == ["planner", "builder"], f"the Dockerfile's first stages are {replaced}, not planner and builder")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for file in (ROOT / "docker-compose.yml", ROOT / ".dockerignore", *ROOT.glob("LICENSE*")):
            shutil.copy(file, folder)
        docker = folder / "deploy/docker"
        (docker / "programs").mkdir(parents=True)
        (docker / "Dockerfile").write_text("".join((head, PREBUILT, *rest)))
        shutil.copy(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"), docker / "ca-certificates.crt")
        for program, names in {
            # The tests' program is the same command with further models.
            "flambeau": ("flambeau", "flambeau-under-test"),
            "ps-server": ("ps-server",),
            "worker": ("worker",),
        }.items():
            found = [path for name in names if (path := programs / name).is_file()]
            check(found, f"{programs} has no {' or '.join(names)}; `cargo test --workspace --no-run` builds it in target/debug")
            # An older one may be left from another build.
            newest = max(found, key=lambda path: path.stat().st_mtime)
            run("strip", "-o", docker / "programs" / program, newest)
        yield folder


def files_of(image):
    """The names of an image's files."""
    container = run("docker", "create", image).strip()
    try:
        with subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as export:
            with tarfile.open(fileobj=export.stdout, mode="r|") as files:
                return [file.name for file in files if not file.isdir()]
    finally:
        run("docker", "rm", container)


def is_out_of_place(path):
    tool = path.startswith(("usr/bin/", "usr/local/")) and path.rsplit("/", 1)[-1] in BUILD_TOOLS
    return tool or SOURCES.search(path) or SECRETS.search(path)


def test_plain(programs):
    """Two servers and three workers train, whatever happens to them."""
    with brought_up(programs[0], "plain") as project:
        the_job_that_ships(project)
        from_its_checkpoint(project)
        if (pathlib.Path(project.environment.get("FLAMBEAU_DATA_FOLDER", "/nowhere")) / "mnist").is_dir():
            mnist(project)
        else:
            say("SKIPPED: MNIST; FLAMBEAU_TEST_DATA names no folder that has it")
        a_long_job(project)


def the_job_that_ships(project):
    """The digits, as `docker compose up` trains them."""
    # No service is named, and what is in a profile is not needed: Grafana's image may be missing.
    project.compose("up", "--detach", "--no-build", "--scale=ps=2", "--scale=worker=3")
    check(project.containers("prometheus"), "there is no Prometheus")
    check(not project.containers("grafana"), "Grafana was started without its profile")
    summary = project.await_end("digits", 300)
    expect_accuracy("digits", summary)
    check(summary["ps"] == 2, f"the variables were spread over {summary['ps']} servers, not 2")
    restarts = [inspect("container", c)["RestartCount"] for c in project.roles()]
    check(not any(restarts), f"roles were restarted: {restarts}")
    for container in project.roles():
        for line in run("docker", "logs", container).splitlines():
            check(is_log_line(line), f"a log line is no JSON object with a time and a level: {line!r}")
    say("all roles ended with 0 and stay so; every log line is a JSON object with a time and a level")
    # The end of a job is durable: a container that is started again learns of it, and ends.
    project.up(2, 3)
    again = project.await_end("digits", 120)
    check(again == summary, "the job's summary is another one after it was brought up again")
    say("brought up again, the ended job ended again")


def from_its_checkpoint(project):
    """The same job goes on from its last checkpoint, on another number of servers."""
    settings = {"FLAMBEAU_RUN_DIR": "/runs/second", "FLAMBEAU_RESTORE": "/runs/digits", "FLAMBEAU_EPOCHS": "24"}
    project.environment |= settings
    project.up(3, 2)
    summary = project.await_end("second", 120)
    for name in settings:
        del project.environment[name]
    check((summary["ps"], summary["epochs"]) == (3, 24), f"it was to end after 24 epochs on 3 servers: {summary}")
    check(summary["seconds"] < 24 * 1437 / summary["samples_per_second"] / 2, f"it began anew: {summary}")
    expect_accuracy("digits", summary, longer=True)


def expect_accuracy(job, summary, longer=False):
    """The local run's accuracy, or a better one if the job had more epochs."""
    accuracy, local = summary["test_accuracy"], LOCAL_ACCURACY[job]
    say(
        f"{job}: accuracy {accuracy:.4f} (local {local}), {summary['ps']} ps, {summary['workers']} workers, "
        f"{summary['steps']} steps in {summary['seconds']:.1f} s, {summary['samples_per_second']:.0f} samples/s"
    )
    near = accuracy >= local - TOLERANCE and (longer or accuracy <= local + TOLERANCE)
    check(near, f"{job} came to {accuracy:.4f}, locally {local}")


def is_log_line(line):
    try:
        return {"timestamp", "level"} <= json.loads(line).keys()
    except (AttributeError, ValueError):
        return False


def mnist(project):
    project.environment["FLAMBEAU_JOB"] = "/jobs/mnist.toml"
    project.up(2, 3)
    expect_accuracy("mnist", project.await_end("mnist", 600))
    del project.environment["FLAMBEAU_JOB"]


def a_long_job(project):
    """A job that is long enough for all that happens to it."""
    # The machine may do more beside one of the two than beside the other.
    epochs = max(project.epochs_that_last(name, LONG_SECONDS, 100) for name in ("digits", "second"))
    project.environment |= {
        "FLAMBEAU_NAME": "long",
        "FLAMBEAU_EPOCHS": str(epochs),
        "FLAMBEAU_SET": "checkpoint.every_seconds=5",
    }
    began = time.monotonic()
    project.up(2, 3)
    project.await_live("ps", 2)
    project.await_live("worker", 3)
    until("training", 60, lambda: project.status()["phase"] == "training")
    say(f"a job of {epochs} epochs trains on 2 servers and 3 workers")

    containers_are_confined(project)
    scale(project)
    stop_and_start(project)
    for role in ("ps", "worker", "coordinator"):
        kill(project, role)
    for role in ("worker", "ps"):
        cut_off(project, role)
    read_dashboards(project, began)

    status = project.status()
    check(status and status["phase"] == "training", "the job was too short for all that was done to it")
    say(f"{status['samples'] / status['total_samples']:.0%} done, {status['lost_updates']} updates lost with servers")
    expect_accuracy("digits", project.await_end("long", 1200), longer=True)
    say(f"the long job ended well after {time.monotonic() - began:.0f} s")


def containers_are_confined(project):
    for container in project.roles():
        found = inspect("container", container)
        host, name = found["HostConfig"], found["Name"]
        check(host["ReadonlyRootfs"], f"{name} can write its root file system")
        check(host["CapDrop"] == ["ALL"], f"{name} has capabilities")
        check("no-new-privileges:true" in host["SecurityOpt"], f"{name} can gain privileges")
        check(host["Memory"] > 0, f"{name} has no memory limit")
        user = run("docker", "exec", container, "sh", "-c", "id -u").strip()
        check(user == "10001", f"{name} runs as {user}")
        code, _ = ends_with("docker", "exec", container, "sh", "-c", "echo > /written")
        check(code != 0, f"{name} wrote to its root file system")
        healthy = lambda c=container: inspect("container", c)["State"]["Health"]["Status"] == "healthy"
        until(f"{name} is healthy", 60, healthy)
    limits = until(
        "Prometheus knows the memory limits", 60, lambda: project.query('flambeau_memory_limit_bytes{role="ps"}')
    )
    check(limits == [2 * 1024**3] * len(limits), f"servers take their memory limit for {limits}")
    say("all are healthy, run as user 10001 without capabilities, and cannot write their root file system")


def scale(project):
    for workers in (4, 2, 3):
        began = time.monotonic()
        project.up(2, workers)
        project.await_live("worker", workers)
        project.await_progress()
        say(f"scaled to {workers} workers, {time.monotonic() - began:.1f} s until all took part and training went on")
    found = lambda: project.query('count(up{role="worker"} == 1)') == [3]
    until("Prometheus finds all workers by DNS", 60, found)


def stop_and_start(project):
    """A container that is told to stop says good-bye, in time and with 0, and is not brought back."""
    worker = project.role("worker", running=True)[0]
    began = time.monotonic()
    run("docker", "stop", "--time", "10", worker)
    took = time.monotonic() - began
    state = inspect("container", worker)["State"]
    check(state["ExitCode"] == 0, f"a worker that was told to stop ended with {state['ExitCode']}")
    check(took < 10, f"a worker needed {took:.1f} s to stop")
    project.await_live("worker", 2, 5)
    run("docker", "start", worker)
    project.await_live("worker", 3)
    say(f"a worker that was told to stop ended with 0 after {took:.1f} s, and took part again when started")


def kill(project, role, progress=True):
    """Kills a container's process. It is brought back, and with `progress` training goes on."""
    container = project.role(role, running=True)[0]
    before = inspect("container", container)
    began = time.monotonic()
    kill_from_outside(container)

    def back():
        found = inspect("container", container)
        return found["RestartCount"] > before["RestartCount"] and found["State"]["Running"]

    until(f"the killed {role} is brought back", 30, back)
    project.await_live("ps", 2)
    project.await_live("worker", 3)
    if progress:
        project.await_progress()
    say(f"killed a {role}: it is back, and training went on, after {time.monotonic() - began:.1f} s")
    if role == "worker":
        alert = 'ALERTS{alertname="FlambeauWorkerLost", alertstate="firing"}'
        until("Prometheus says that a worker was lost", 60, lambda: project.query(alert))


def cut_off(project, role):
    """A container loses its network for longer than its lease."""
    container = project.role(role, running=True)[-1]
    restarts = inspect("container", container)["RestartCount"]
    others = project.live(role) - 1
    address = lambda: inspect("container", container)["NetworkSettings"]["Networks"][project.network()]["IPAddress"]
    before = address()
    run("docker", "network", "disconnect", project.network(), container)
    began = time.monotonic()
    project.await_live(role, others)
    lost = time.monotonic() - began
    if role == "worker":
        project.await_progress()
    # As compose connects it: under its service's name; where another container has taken its address meanwhile.
    with other_container(project.network()):
        run("docker", "network", "connect", "--alias", role + project.suffix, project.network(), container)
    check(address() != before, f"the {role} is at the same address again")
    began = time.monotonic()
    project.await_live(role, others + 1, 120)
    project.await_progress()
    again = inspect("container", container)["RestartCount"] - restarts
    say(
        f"cut a {role} off: given up after {lost:.1f} s; {time.monotonic() - began:.1f} s after it was connected "
        f"again it took part and training went on, with {again} restarts"
    )


@contextlib.contextmanager
def other_container(network):
    """A container that has the network's first free address."""
    base = re.search(r"^ARG BASE_IMAGE=(.*)$", dockerfile(), re.M).group(1)
    container = run("docker", "run", "--detach", "--rm", "--network", network, base, "sleep", "60").strip()
    try:
        yield
    finally:
        run("docker", "kill", container)


def read_dashboards(project, began):
    # Rates need a minute's samples of every process, also of those that were restarted last.
    time.sleep(max(0, 60 - (time.monotonic() - began)))
    # This job has no tables, and servers.
    check_dashboards(project, "--without-row", "Tables", "--without-row", "Rings")


def check_dashboards(project, *which):
    script = ROOT / "tests/deploy/check-dashboards.py"
    text = run(sys.executable, str(script), "--prometheus", project.prometheus, "--wait", "90", *which)
    say(f"the dashboards' queries give data ({' '.join(which)}): {text.strip().splitlines()[-1]}")


def the_rules_hold():
    image = re.search(r"image: (prom/prometheus):\$\{[A-Z_]+:-(.*)\}", (ROOT / "docker-compose.yml").read_text())
    promtool = ["docker", "run", "--rm", "--network=none", "--volume", f"{ROOT}:/work:ro", "--workdir=/work"]
    # Its scratch data in memory: it syncs every write.
    promtool += ["--user=0:0", "--tmpfs=/tmp", "--entrypoint=promtool", ":".join(image.groups())]
    run(*promtool, "check", "config", "deploy/prometheus/prometheus.yml")
    run(*promtool, "test", "rules", "tests/deploy/alerts_test.yml", "tests/deploy/clusters_test.yml")
    say("promtool accepts Prometheus' configuration, and the alerts' tests pass")


def test_secure(programs):
    """The cluster with TLS and a token refuses callers without a certificate or with another token."""
    with brought_up(programs[0], "tls", "secure") as project:
        project.up(2, 3, "prometheus")
        summary = project.await_end("digits", 300)
        expect_accuracy("digits", summary)

        epochs = project.epochs_that_last("digits", SECURE_SECONDS, 100)
        project.environment |= {"FLAMBEAU_NAME": "renewed", "FLAMBEAU_EPOCHS": str(epochs)}
        project.up(2, 3)
        project.await_live("worker", 3)
        certificates_are_renewed(project)
        summary = project.await_end("renewed", 600)
        check(summary["lost_updates"] == 0, f"{summary['lost_updates']} updates were lost while certificates were renewed")

        project.environment |= {"FLAMBEAU_NAME": "long", "FLAMBEAU_EPOCHS": str(epochs)}
        with own_certificates() as folder:
            project.environment["FLAMBEAU_CERTS"] = f"{folder}/"
            project.up(2, 3)
            project.await_live("worker", 3)
            keys_are_apart(project)
            strangers_are_refused(project, f"{folder}/worker")
            project.await_progress()
            expect_accuracy("digits", project.await_end("long", 600), longer=True)
            run_as_typed(project, next(command for command in runbook_commands() if "'refused: '" in command))
        say("the secure job ended well, with certificates from a folder")


def certificates_are_renewed(project):
    """The runbook's commands renew the certificates of a job that trains; no container is started again."""
    expires = lambda: project.query("min(flambeau_certificate_expires_timestamp_seconds)")
    starts = lambda: [inspect("container", c)["State"]["StartedAt"] for c in project.roles()]
    before, started = until("Prometheus knows when certificates expire", 60, expires), starts()
    began = time.monotonic()
    for command in runbook_commands():
        if is_secure(command) and "grep" not in command:
            run_as_typed(project, command)
    until("every process has its new certificate", 60, lambda: (now := expires()) and now[0] > before[0])
    took = time.monotonic() - began
    project.await_progress()
    check(starts() == started, "a container was started again for its certificate")
    say(f"renewed every certificate in {took:.1f} s; training goes on, and no container was started again")


@contextlib.contextmanager
def own_certificates():
    """A folder of certificates, made as docs/operations.md says."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        made = ["docker", "run", "--rm", "--user=0:0", "--volume", f"{folder}:/own", "--entrypoint=flambeau"]
        run(*made, IMAGES["coordinator"], "certs", "--dir", "/own")
        run("chown", "-R", "10001:10001", *(f"{folder}/{role}" for role in ("coordinator", "ps", "worker")))
        yield folder


def keys_are_apart(project):
    for role in ("coordinator", "ps", "worker"):
        for container in project.role(role, running=True):
            files = run("docker", "exec", container, "find", "/certs", "-type", "f").split()
            wanted = {f"/certs/{name}" for name in ("ca.crt", "tls.crt", "tls.key", "token")}
            check(set(files) == wanted, f"a {role} sees {files}")
    say("each container sees its role's key and no other")


def strangers_are_refused(project, certificates):
    tls = [f"--env=FLAMBEAU_TLS_{what}=/certs/{file}" for what, file in
           (("CA", "ca.crt"), ("CERT", "tls.crt"), ("KEY", "tls.key"))]  # fmt: skip
    strangers = {
        "without a certificate": [],
        "with a certificate and no token": tls,
        "with a certificate and another token": [*tls, "--env=FLAMBEAU_TOKEN_FILE=/etc/hostname"],
    }
    for what, settings in strangers.items():
        stranger = ["docker", "run", "--rm", "--read-only", "--network", project.network()]
        stranger += ["--volume", f"{certificates}:/certs:ro", "--env=FLAMBEAU_PATIENCE_SECONDS=5"]
        began = time.monotonic()
        code, text = ends_with(*stranger, *settings, IMAGES["worker"], timeout=60)
        check(code == 1, f"a worker {what} ended with {code}: {text}")
        reason = text.strip().splitlines()[-1]
        say(f"a worker {what} was refused after {time.monotonic() - began:.1f} s: {reason}")
    check(project.live("worker") == 3, "a stranger is a member")
    for reason in ("certificate", "token"):
        counted = f'sum(flambeau_refused_connections_total{{reason="{reason}"}}) > 0'
        until(f"refusals for want of a {reason} are counted", 30, lambda q=counted: project.query(q))
    say("the refusals are counted by reason")


def test_tables(programs):
    """A job with embedding tables, most of whose rows are on disk, answers reads of rows while it trains."""
    with brought_up(programs[0], "tables") as project:
        project.environment |= {
            "FLAMBEAU_JOBS": str(ROOT / "examples/jobs"),
            "FLAMBEAU_JOB": "/jobs/clicks.toml",
            "FLAMBEAU_EPOCHS": "1000",
            "FLAMBEAU_TABLE_MEBIBYTES": "1",
            "FLAMBEAU_LOOKUP_LISTEN": "0.0.0.0:7002",
        }
        project.up(2, 3, "prometheus")
        project.await_live("worker", 3)
        spilled = lambda: (rows := project.query("flambeau_ps_table_rows_on_disk")) and sum(rows) > 10000
        until("most rows are on disk", 120, spilled)
        kill(project, "ps")

        def looked_up():
            look_up(project)
            return len(project.query("rate(flambeau_ps_lookups_total[1m]) > 0")) == 2

        until("Prometheus has a rate of lookups of both servers", 60, looked_up)
        say("both servers answer lookups while they train with rows on disk")
        check_dashboards(project, "--row", "Tables")


def look_up(project):
    """Reads rows of both servers, as another container of the network does."""
    ids = [str(id) for id in range(64)]
    coordinator = project.role("coordinator", running=True)[0]
    text = run("docker", "exec", coordinator, "flambeau", "table", "embedding", "get", "--json", *ids)
    rows = json.loads(text)["rows"]
    check([row["id"] for row in rows] == [int(id) for id in ids], f"the rows are of other ids: {text}")
    check({len(row["values"]) for row in rows} == {8}, f"rows of dimension 8 have other numbers of values: {text}")


def test_rings(programs):
    """Workers train without servers; one of them is killed, and every sample counts. The same with TLS."""
    with brought_up(programs[0], "rings") as project:
        a_ring(project)
        without_servers(project, "mirrored", workers=1, devices="cpu,cpu")
        without_servers(project, "stages", workers=3, devices="cpu")
        epochs = project.epochs_that_last("rings", RING_SECONDS, 100)
        project.environment |= {"FLAMBEAU_NAME": "long", "FLAMBEAU_EPOCHS": str(epochs)}
        project.up(0, 3, "prometheus")
        project.await_live("worker", 3)
        # So that Prometheus sees the counters change.
        until("Prometheus sees the workers", 60, lambda: project.query('count(up{role="worker"} == 1)') == [3])
        lose_a_member(project)
        check_dashboards(project, "--row", "Rings")
        summary = project.await_end("long", 600)
        check(summary["samples"] == epochs * 1437, f"{summary['samples']} samples count, not {epochs} times 1437")
        check(summary["test_accuracy"] > 0.9, f"the job came to {summary['test_accuracy']}")
        say(f"the long job ended well, and each of its {summary['samples']} samples has counted once")
    with brought_up(programs[0], "rings-tls", "secure") as project:
        a_ring(project)


def a_ring(project):
    """The job of a ring that ships, without a server."""
    project.environment["FLAMBEAU_JOB"] = "/jobs/rings.toml"
    project.up(0, 3)
    summary = project.await_end("rings", 300)
    check(not project.role("ps"), "there are servers")
    check((summary["ps"], summary["workers"]) == (0, 3), f"the ring was another one: {summary}")
    check(summary["samples"] == 20 * 1437, f"{summary['samples']} samples count, not 20 times 1437")
    check(summary["test_accuracy"] > 0.9, f"the ring came to {summary['test_accuracy']}")
    say(f"a ring of 3 workers: accuracy {summary['test_accuracy']:.4f}, {summary['samples_per_second']:.0f} samples/s")


def without_servers(project, name, workers, devices):
    """A job that ships, with workers that have these devices."""
    settings = {"FLAMBEAU_JOB": f"/jobs/{name}.toml", "FLAMBEAU_DEVICE": devices}
    before = dict(project.environment)
    project.environment |= settings
    project.up(0, workers)
    summary = project.await_end(name, 300)
    project.environment = before
    # Its model may be a better one.
    expect_accuracy("digits", summary, longer=True)


def lose_a_member(project):
    """Kills a worker of a ring. The others form the next one; with the worker, once it is back, a further one."""
    ring = lambda: (project.status() or {}).get("ring") or {"stage": "", "members": [], "number": 0}
    settled = lambda: (found := ring())["stage"] == "settled" and len(found["members"]) == 3 and found
    before = until("a ring of three workers makes steps", 60, settled)
    container = project.role("worker", running=True)[0]
    restarts = inspect("container", container)["RestartCount"]
    began = time.monotonic()
    kill_from_outside(container)
    back = lambda: inspect("container", container)["RestartCount"] > restarts
    until("the killed worker is brought back", 30, back)
    later = lambda: (found := settled()) and found["number"] > before["number"] and found
    again = until("a later ring of three workers makes steps", 60, later)
    project.await_progress()
    check(sum(again["broken"].values()) >= 1, f"the status counts no broken ring: {again}")
    took = time.monotonic() - began
    say(f"killed a worker: it is in ring {again['number']} after ring {before['number']}, and steps go on, after {took:.1f} s")


def test_upgrades(programs):
    """Servers and workers take the next job; all roles are replaced one by one, and nothing is lost."""
    with brought_up(programs[0], "upgrades") as project:
        project.environment["FLAMBEAU_AFTER_JOB"] = "wait"
        for mode in ("sync", "bounded", "async"):
            project.environment["FLAMBEAU_MODE"] = mode
            next_job(project, f"short-{mode}", 12)
            done_job(project, f"short-{mode}", 12)
            epochs = project.epochs_that_last(f"short-{mode}", UPGRADE_SECONDS, 50)
            next_job(project, f"long-{mode}", epochs)
            upgrade(project)
            summary = done_job(project, f"long-{mode}", epochs)
            check(summary["lost_updates"] == 0, f"{summary['lost_updates']} updates were lost in {mode} mode")
            expect_accuracy("digits", summary, longer=True)
    with brought_up(programs[0], "data") as project:
        a_worker_without_data(project)


def next_job(project, name, epochs):
    """Begins another job by the command of docs/operations.md: only the coordinator's settings change."""
    before = {role: project.role(role) for role in ("ps", "worker")}
    project.environment |= {"FLAMBEAU_NAME": name, "FLAMBEAU_EPOCHS": str(epochs)}
    project.up(2, 3)
    begun = lambda: (found := project.status()) and found["job"] == name and found["phase"] != "starting"
    until(f"the job {name} trains", 90, begun)
    kept = all(not before[role] or set(before[role]) == set(project.role(role)) for role in before)
    check(kept, "servers and workers were replaced for the next job")


def done_job(project, name, epochs):
    """Waits until a job is done, of which every sample must count; returns its summary."""
    done = lambda: (found := project.status()) and (found["job"], found["phase"]) == (name, "done")
    until(f"the job {name} is done", 600, done)
    # It is written after the last report, which the status shows at once.
    summary = json.loads(until(f"the summary of {name} is written", 30, lambda: project.find(f"/runs/{name}/summary.json")))
    check(summary["samples"] == epochs * 1437, f"{summary['samples']} samples count, not {epochs} times 1437")
    return summary


def upgrade(project):
    """Replaces the containers of each role, in the order and by the commands of docs/operations.md."""
    for role, number in (("worker", 3), ("ps", 2), ("coordinator", 1)):
        began = time.monotonic()
        before = project.role(role)
        scale = [f"--scale={role}={number}"] if number > 1 else []
        project.compose("up", "--detach", "--no-build", "--no-deps", "--force-recreate", *scale, role)
        check(not set(before) & set(project.role(role)), f"the containers of role {role} are the same")
        project.await_live("ps", 2)
        project.await_live("worker", 3)
        project.await_progress()
        say(f"replaced every {role}; training went on after {time.monotonic() - began:.1f} s")


def test_jobs(programs):
    """Jobs are submitted to a long-lived cluster; its coordinator is killed in the middle of one."""
    with tempfile.TemporaryDirectory() as folder, brought_up(programs[0], "jobs") as project:
        write_points(folder)
        sizes = "[cluster]\nps = 2\nworkers = 3\n"
        sync = '[strategy]\nmode = "sync"\n'
        points = '[data]\nkind = "csv"\ndir = "/data"\nlabel = "colour"\n[model]\nname = "softmax"\n'
        jobs = {
            "plain": f'name = "plain"\nepochs = 20\n{sync}{sizes}',
            "points": f'name = "points"\nepochs = 20\n{points}{sync}{sizes}',
            "too-fast": f'name = "too-fast"\n[optimizer]\nname = "sgd"\nlearning_rate = 1e38\n{sizes}',
            "endless": f'name = "endless"\nepochs = 1000000\n{sizes}',
        }
        for name, text in jobs.items():
            (pathlib.Path(folder) / f"{name}.toml").write_text(text)
        project.environment |= {"FLAMBEAU_DATA_FOLDER": folder, "FLAMBEAU_JOBS": folder}
        project.environment |= {"FLAMBEAU_AFTER_JOB": "wait", "FLAMBEAU_NO_JOB": "true", "FLAMBEAU_JOB": "/jobs/plain.toml"}
        project.up(2, 3)
        until("the coordinator answers", 60, lambda: listed_jobs(project) is not None)

        # Each process has done a job of both kinds; from here on it must not grow.
        first = [ended_job(project, submit(project, name)) for name in ("plain", "points")]
        check([job["state"] for job in first] == ["done", "done"], f"the first jobs ended so: {first}")
        before = {container: held(container) for container in project.roles()}

        failing, endless, plain, points = [submit(project, name) for name in ("too-fast", "endless", "plain", "points")]
        failed = ended_job(project, failing)
        check((failed["state"], "NaN" in failed["error"]) == ("failed", True), f"a job without a loss ended so: {failed}")
        until("the endless job trains", 120, lambda: job_of(project, endless)["samples"] > 2000)
        in_cluster(project, "cancel", str(endless))
        cancelled = ended_job(project, endless)
        check(cancelled["state"] == "cancelled", f"a job that was cancelled ended so: {cancelled}")
        same_as(first[0], ended_job(project, plain))
        same_as(first[1], ended_job(project, points))
        for container, (files, megabytes) in before.items():
            until(f"{container} has closed its files", 30, lambda c=container, f=files: held(c)[0] <= f + 6)
            now = held(container)[1]
            check(now <= megabytes + 40, f"{container} holds {now:.0f} MB after six jobs, {megabytes:.0f} MB after two")
        say(f"six jobs on the same processes: one failed, one was cancelled, four are done, and nothing grew")

        interrupted, waiting = submit(project, "plain"), submit(project, "points")
        until("the job trains", 120, lambda: job_of(project, interrupted)["samples"] > 1000)
        kill(project, "coordinator", progress=False)
        same_as(first[0], ended_job(project, interrupted))
        same_as(first[1], ended_job(project, waiting))
        check(len(listed_jobs(project)) == 8, f"the queue has other jobs: {listed_jobs(project)}")
        say("the coordinator was killed in the middle of a job; it and the next one end with the same weights")


def in_cluster(project, *arguments):
    """What a command of `flambeau` prints as JSON, run in the coordinator's container."""
    return json.loads(project.compose("exec", "-T", "coordinator", "flambeau", *arguments, "--json"))


def submit(project, name):
    """Submits a job of the folder of jobs. Returns its id."""
    return in_cluster(project, "submit", f"/jobs/{name}.toml")["id"]


def listed_jobs(project):
    """The jobs of the cluster, or nothing while its coordinator does not answer."""
    try:
        return in_cluster(project, "jobs")["jobs"]
    except (Failure, ValueError):
        return None


def job_of(project, number):
    return next((job for job in listed_jobs(project) or [] if job["id"] == number), {"state": "", "samples": 0})


def ended_job(project, number):
    """Waits until a job has ended, and returns it."""
    has_ended = lambda: (job := job_of(project, number))["state"] in ("done", "failed", "cancelled") and job
    return until(f"job {number} ends", 300, has_ended)


def same_as(first, again):
    """A job in sync mode ends with the same weights wherever and whenever it is done."""
    check(again["state"] == "done", f"job {again['id']} ended so: {again}")
    check(
        again["model_sha256"] == first["model_sha256"] != "",
        f"jobs {first['id']} and {again['id']} are the same job, and their weights differ",
    )


def held(container):
    """The number of files that a container's main process has open, and its memory in MB."""
    script = "ls /proc/1/fd | wc -l; grep VmRSS: /proc/1/status"
    files, memory = run("docker", "exec", container, "sh", "-c", script).splitlines()
    return int(files), int(memory.split()[1]) / 1024


def test_runbook(programs):
    """Every command of docs/runbook.md that an engine can run does so while a job trains and members die."""
    typed = [command for command in runbook_commands() if not is_secure(command)]
    of_ended_jobs = [command for command in typed if "summary.json" in command]
    of_running_jobs = [command for command in typed if command not in of_ended_jobs]
    with brought_up(programs[0], "runbook") as project:
        project.up(2, 3)
        project.await_end("digits", 300)
        for command in of_ended_jobs:
            run_as_typed(project, command)
        run_as_typed(project, "docker compose run --rm --no-deps -T --entrypoint rm coordinator -r /runs/digits")
        project.environment |= {"FLAMBEAU_EPOCHS": "1000000", "FLAMBEAU_SET": "checkpoint.every_seconds=5"}
        project.up(2, 3, "prometheus")
        project.await_live("worker", 3)
        # So that Prometheus sees the counters change.
        until("Prometheus sees the workers", 60, lambda: project.query('count(up{role="worker"} == 1)') == [3])
        for role in ("worker", "ps"):
            kill(project, role)
        run_as_typed(project, "docker compose run --rm --no-deps -T --entrypoint mkdir coordinator -p /runs/old/checkpoints")
        for command in of_running_jobs:
            run_as_typed(project, command)
        project.await_progress()
        say(f"{len(typed)} commands of the runbook were run, and training goes on")


def runbook_commands():
    """The commands of docs/runbook.md for an engine. Those for Kubernetes need a cluster; their names are checked by
    tests/deploy/check-runbook.py."""
    path = ROOT / "tests/deploy/check-runbook.py"
    spec = importlib.util.spec_from_file_location("check_runbook", path)
    runbook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runbook)
    blocks = re.findall(r"(?s)```sh\n(.*?)```", (ROOT / "docs/runbook.md").read_text())
    found = runbook.commands("\n".join(f"```sh\n{block}```" for block in blocks))
    return [command for command in dict.fromkeys(found) if "docker " in command]


def is_secure(command):
    return "secure" in command or " certs" in command


def run_as_typed(project, command):
    """Runs a command of the documents at a terminal, as a person types it. Lines that `grep` looks for must be there
    only if this test has caused them."""
    typed = command
    if "CONTAINER" in typed:
        typed = typed.replace("CONTAINER", project.role("ps", running=True)[0])
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as script, tempfile.NamedTemporaryFile(suffix=".env") as nothing:
        program = shlex.join([*project.program, "--env-file", nothing.name, "--file", "docker-compose.yml"])
        script.write(
            "set -o pipefail\n"
            f'docker() {{ if [ "$1" = compose ]; then shift; {program} "$@"; else command docker "$@"; fi; }}\n'
            f"{typed}\n"
        )
        script.flush()
        terminal = ["script", "--quiet", "--return", "--command", f"bash {script.name}", "/dev/null"]
        code, text = ends_with(*terminal, cwd=ROOT, env=project.environment, timeout=120)
    sought = re.search(r"\| grep '(.*)'", command)
    may_be_missing = sought and sought.group(1) not in CAUSED
    check(code == 0 or (may_be_missing and not text.strip()), f"`{typed}` ended with {code}:\n{text}")


def a_worker_without_data(project):
    """A worker whose data is not mounted leaves alone; the job goes on, and ends well."""
    with tempfile.TemporaryDirectory() as folder:
        write_points(folder)
        (pathlib.Path(folder) / "own.toml").write_text(
            'name = "own"\nepochs = 1200\nbatch_size = 16\n'
            '[data]\nkind = "csv"\ndir = "/data"\nlabel = "colour"\n[cluster]\nps = 1\nworkers = 2\n'
        )
        settings = {"FLAMBEAU_DATA_FOLDER": folder, "FLAMBEAU_JOBS": folder, "FLAMBEAU_JOB": "/jobs/own.toml"}
        project.environment |= settings
        project.up(1, 2)
        until("the job trains", 60, lambda: (found := project.status()) and found["phase"] == "training")
        stranger = ["docker", "run", "--rm", "--read-only", "--network", project.network()]
        stranger += ["--env=FLAMBEAU_COORDINATOR=coordinator:7070", "--env=FLAMBEAU_IDENTITY=without-data"]
        code, text = ends_with(*stranger, IMAGES["worker"], timeout=60)
        check(code == 3, f"a worker without data ended with {code}: {text}")
        status = project.status()
        task = next(t for t in status["tasks"] if t["identity"] == "without-data")
        check(task["failure"] == "data" and "/data" in task["trouble"], f"status says of it: {task}")
        project.await_progress()
        say(f"a worker without data left alone: {task['trouble']}")
        summary = project.await_end("own", 300)
        check(not summary.get("error"), f"the job ended with {summary}")


def write_points(folder):
    """A table of 400 coloured points, in a folder that containers may read."""
    os.chmod(folder, 0o755)
    rows = [f"{i % 20},{i // 20},{'red' if i % 20 > i // 20 else 'blue'}" for i in range(400)]
    (pathlib.Path(folder) / "train.csv").write_text("\n".join(["x,y,colour", *rows, ""]))


TESTS = {
    "files": test_files,
    "images": test_images,
    "plain": test_plain,
    "secure": test_secure,
    "tables": test_tables,
    "rings": test_rings,
    "upgrades": test_upgrades,
    "jobs": test_jobs,
    "runbook": test_runbook,
}


def skip(why):
    print(f"SKIPPED: the containers of docker-compose.yml were NOT tested: {why}", flush=True)
    sys.exit(0)


def main():
    wanted = sys.argv[1:] or list(TESTS)
    if unknown := set(wanted) - set(TESTS):
        sys.exit(f"no such test: {', '.join(sorted(unknown))}; there are {', '.join(TESTS)}")
    if not answers(["docker", "version"]):
        skip("no Docker engine answers (`docker version` fails)")
    programs = compose_programs()
    if not programs:
        skip("neither `docker compose` nor `docker-compose` is installed")
    # So that what was brought up is taken down then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for name in wanted:
            say(f"--- {name}: {TESTS[name].__doc__}")
            TESTS[name](programs)
    except Failure as failure:
        say(f"FAILED: {failure}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    say("all is well")


if __name__ == "__main__":
    main()
