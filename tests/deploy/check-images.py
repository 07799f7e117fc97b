#!/usr/bin/env python3
"""Checks how images are named, built and confined, offline and without an engine:

    python3 tests/deploy/check-images.py

compares each place that names a version with Cargo.toml's, looks at what bake.hcl would build, as deploy/docker/release.sh
builds it, and at the limits of each service of docker-compose.yml.

It installs nothing. It needs Python 3.11 and, or else it says SKIPPED with what remains unchecked and why:

    docker-buildx 0.13    on the PATH
    PyYAML                from PyPI, for the Python that runs this
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROLES = {"coordinator", "ps-server", "worker"}
DOCKERFILES = {"deploy/docker/Dockerfile": ROLES, "deploy/docker/Dockerfile.cuda": {"worker-cuda"}}

problems = []


def expect(holds, what):
    if not holds:
        problems.append(what)


def skipped(what):
    print(f"SKIPPED: {what}", file=sys.stderr, flush=True)


def text_of(path):
    return (ROOT / path).read_text()


def check_versions(version):
    """Each place that names the release names the one that Cargo.toml does, and no place names `latest`."""
    places = {
        "docker-compose.yml": r"\$\{FLAMBEAU_VERSION:-([^}]*)\}",
        ".env.example": r"^#FLAMBEAU_VERSION=(.*)$",
        "deploy/kubernetes/base/kustomization.yaml": r"^ +- version=(.*)$",
        "deploy/kubernetes/README.md": r"^ +- version=(.*)$",
        "deploy/helm/flambeau/Chart.yaml": r"^(?:version|appVersion): (.*)$",
    }
    for path, pattern in places.items():
        named = re.findall(pattern, text_of(path), re.M)
        expect(named and set(named) == {version}, f"{path} names the version {sorted(set(named))}, not {version}")
    files = [ROOT / "docker-compose.yml", ROOT / ".env.example", *(ROOT / "deploy").rglob("*.yaml")]
    for file in files:
        expect(":latest" not in file.read_text(), f"{file.relative_to(ROOT)} names an image as latest")
    return f"the version {version} in {len(places)} files"


def check_dockerfiles():
    """Each role's stage is labelled with its version and its commit."""
    for path, roles in DOCKERFILES.items():
        stages = re.split(r"^FROM .* AS ([\w-]+)$", text_of(path), flags=re.M)
        bodies = dict(zip(stages[1::2], stages[2::2]))
        for role in roles:
            for name in ["version", "revision"]:
                label = f'org.opencontainers.image.{name}="${{{name.upper()}}}"'
                expect(label in bodies.get(role, ""), f"{path}: the stage {role} is not labelled with its {name}")


def check_bake(version):
    """What a release would build: each image for its platforms, under both tags, attested."""
    if not shutil.which("docker-buildx"):
        skipped("deploy/docker/bake.hcl: there is no docker-buildx on the PATH")
        return None
    registry = "registry.example:5000/team/flambeau"
    release = [ROOT / "deploy/docker/release.sh", "--print"]
    printed = subprocess.run(
        release, capture_output=True, text=True, env=os.environ | {"FLAMBEAU_REGISTRY": registry}
    )
    if printed.returncode:
        problems.append(f"deploy/docker/release.sh --print: {printed.stderr.strip()}")
        return None
    targets = json.loads(printed.stdout)["target"]
    expect(set(targets) == ROLES | {"worker-cuda"}, f"bake.hcl builds {sorted(targets)}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    for image, target in targets.items():
        wanted = {
            "tags": [f"{registry}/{image}:{version}", f"{registry}/{image}:{commit[:12]}"],
            "platforms": ["linux/amd64"] + (["linux/arm64"] if image in ROLES else []),
            "target": image,
            "attest": ["type=provenance,mode=max", "type=sbom"],
        }
        for key, value in wanted.items():
            expect(target.get(key) == value, f"bake.hcl: {image} has {key} {target.get(key)}, not {value}")
        arguments = {"VERSION": version, "REVISION": commit}
        expect(arguments.items() <= target["args"].items(), f"bake.hcl: {image} is built with {target['args']}")
        expect(image in DOCKERFILES.get(target["dockerfile"], ()), f"{image} is of {target['dockerfile']}")
    return f"{len(targets)} images of deploy/docker/bake.hcl"


def check_limits():
    """Each service's memory, processors and processes are limited, and its image is named by the two settings."""
    try:
        import yaml
    except ImportError as missing:
        skipped(f"the limits in docker-compose.yml: {missing}")
        return None
    services = yaml.safe_load(text_of("docker-compose.yml"))["services"]
    for name, service in services.items():
        for limit in ["mem_limit", "cpus", "pids_limit"]:
            expect(limit in service, f"docker-compose.yml: {name} has no {limit}")
        if "build" in service:
            image = r"\$\{FLAMBEAU_REGISTRY:-flambeau\}/(" + "|".join(ROLES | {"worker-cuda"})
            image += r"):\$\{FLAMBEAU_VERSION:-[\d.]+\}"
            expect(re.fullmatch(image, service["image"]), f"docker-compose.yml: {name} has {service['image']}")
    return f"the limits of {len(services)} services"


def main():
    version = tomllib.loads(text_of("Cargo.toml"))["workspace"]["package"]["version"]
    check_dockerfiles()
    done = [check_versions(version), check_bake(version), check_limits()]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"images: {', '.join(filter(None, done))}: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
