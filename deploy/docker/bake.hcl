# The images of a release, for `docker buildx bake`. deploy/docker/release.sh sets the variables and runs it:
#
#   deploy/docker/release.sh --print     shows what would be built
#
# Each image is tagged by its version and by its commit, and carries an SBOM and its provenance. An image for the other
# architecture is cross-compiled (cross.sh), so no emulator is needed.

# Where the images go, without the last part of their names: registry.example/flambeau.
variable "FLAMBEAU_REGISTRY" {
  default = "flambeau"
}

# The version, that of Cargo.toml.
variable "FLAMBEAU_VERSION" {
  default = "dev"
}

# The commit, as 40 digits.
variable "FLAMBEAU_REVISION" {
  default = "unknown"
}

# When the commit was made, in RFC 3339.
variable "FLAMBEAU_CREATED" {
  default = ""
}

variable "CARGO_MIRROR" {
  default = ""
}

# The NVIDIA GPUs that worker-cuda is built for: docs/cuda.md.
variable "CUDA_COMPUTE_CAP" {
  default = "80"
}

function "tags" {
  params = [image]
  result = [
    "${FLAMBEAU_REGISTRY}/${image}:${FLAMBEAU_VERSION}",
    "${FLAMBEAU_REGISTRY}/${image}:${substr(FLAMBEAU_REVISION, 0, 12)}",
  ]
}

group "default" {
  targets = ["roles", "worker-cuda"]
}

# What all images have in common.
target "release" {
  context = "."
  args = {
    VERSION      = FLAMBEAU_VERSION
    REVISION     = FLAMBEAU_REVISION
    CARGO_MIRROR = CARGO_MIRROR
  }
  labels = {
    "org.opencontainers.image.created" = FLAMBEAU_CREATED
  }
  # An index is what a registry shows first, so it has the description too.
  annotations = [
    "index,manifest:org.opencontainers.image.version=${FLAMBEAU_VERSION}",
    "index,manifest:org.opencontainers.image.revision=${FLAMBEAU_REVISION}",
    "index,manifest:org.opencontainers.image.licenses=MIT OR Apache-2.0",
  ]
  attest = [
    "type=provenance,mode=max",
    "type=sbom",
  ]
}

# coordinator, ps-server and worker, for amd64 and arm64.
target "roles" {
  inherits   = ["release"]
  name       = image
  matrix     = { image = ["coordinator", "ps-server", "worker"] }
  dockerfile = "deploy/docker/Dockerfile"
  target     = image
  tags       = tags(image)
  platforms  = ["linux/amd64", "linux/arm64"]
}

# Its CUDA kernels take long to compile and are not cross-compiled: amd64 alone.
target "worker-cuda" {
  inherits   = ["release"]
  dockerfile = "deploy/docker/Dockerfile.cuda"
  target     = "worker-cuda"
  args       = { CUDA_COMPUTE_CAP = CUDA_COMPUTE_CAP }
  tags       = tags("worker-cuda")
  platforms  = ["linux/amd64"]
}
