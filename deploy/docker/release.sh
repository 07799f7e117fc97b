#!/usr/bin/env bash
# Builds the images of a release for amd64 and arm64, tagged by version and commit, with SBOM and provenance, and
# pushes them; then packages the Helm chart and pushes it.
#
#   FLAMBEAU_REGISTRY=registry.example/flambeau deploy/docker/release.sh            from a clean tree, at the tag vVERSION
#   deploy/docker/release.sh --print                                                what would be built, as JSON
#   FLAMBEAU_REGISTRY=... deploy/docker/release.sh coordinator ps-server worker     without worker-cuda, and no chart
#
# Needs buildx 0.13 or newer, and helm for the chart. Attestations need a builder of the driver docker-container: it is made
# as flambeau-release unless BUILDX_BUILDER names another one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { printf 'release: %s\n' "$*" >&2; exit 1; }
bake() { buildx bake --file deploy/docker/bake.hcl "$@"; }
buildx() { if command -v docker-buildx >/dev/null; then docker-buildx "$@"; else docker buildx "$@"; fi; }

FLAMBEAU_VERSION=$(sed -n '/^\[workspace\.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
FLAMBEAU_REVISION=$(git rev-parse HEAD)
FLAMBEAU_CREATED=$(git log -1 --format=%cI)
# What the images say about when they were made is the commit's time.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export FLAMBEAU_VERSION FLAMBEAU_REVISION FLAMBEAU_CREATED SOURCE_DATE_EPOCH

if [[ ${1:-} == --print ]]; then
    bake "$@"
    exit
fi

[[ -n ${FLAMBEAU_REGISTRY:-} ]] || fail "FLAMBEAU_REGISTRY says where to push, as in registry.example/flambeau"
[[ -z $(git status --porcelain) ]] || fail "the tree has changes that are not committed; images name a commit"
[[ $(git tag --points-at HEAD) =~ (^|$'\n')"v$FLAMBEAU_VERSION"($|$'\n') ]] ||
    fail "this commit is not tagged v$FLAMBEAU_VERSION, the version of Cargo.toml"
(($#)) || command -v helm >/dev/null || fail "helm is not installed; name the images to leave the chart out"

if [[ -z ${BUILDX_BUILDER:-} ]]; then
    export BUILDX_BUILDER=flambeau-release
    buildx inspect "$BUILDX_BUILDER" >/dev/null 2>&1 ||
        buildx create --name "$BUILDX_BUILDER" --driver docker-container >/dev/null
fi
bake --push "$@"

if ((!$#)); then
    packages=$(mktemp -d)
    trap 'rm -r "$packages"' EXIT
    helm package deploy/helm/flambeau --destination "$packages"
    helm push "$packages/flambeau-$FLAMBEAU_VERSION.tgz" "oci://$FLAMBEAU_REGISTRY/charts"
fi
