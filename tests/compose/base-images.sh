#!/usr/bin/env bash
# Provides the images that deploy/docker/Dockerfile and docker-compose.yml build on: those that are there
# stay, those of a registry that answers are pulled, the others are made here of Debian's packages and the
# installed Rust toolchain, under the same tags. Then the Dockerfiles and the compose file under test are
# the ones that users run.
#
#   tests/compose/base-images.sh                   needs a Docker engine; to make images also debootstrap, and root
#   tests/compose/base-images.sh --without-rust    leaves out the image that programs are built in
#
# Grafana is in no package: it is pulled or it is missing, which is said and is no error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

suite=bookworm
dockerfile=deploy/docker/Dockerfile

say() { printf 'base-images: %s\n' "$*"; }
fail() { printf 'base-images: %s\n' "$*" >&2; exit 1; }
present() { docker image inspect "$1" >/dev/null 2>&1; }

# The default of an ARG of the Dockerfile, and of a variable of the compose file.
argument() { sed -n "s/^ARG $1=//p" "$dockerfile" | head -n 1; }
variable() { sed -n "s/.*\${$1:-\([^}]*\)}.*/\1/p" docker-compose.yml | head -n 1; }

work=$(mktemp -d)
trap 'umount "$work/debian" 2>/dev/null || true; rm -rf "$work"' EXIT

# Builds with the classic builder, which uses images that are on this machine without asking a registry.
build() {
    DOCKER_BUILDKIT=0 docker build --quiet "$@" >"$work/build.log" 2>&1 \
        || { cat "$work/build.log" >&2; fail "docker build failed"; }
}

make_debian() {
    local root=$work/debian
    command -v debootstrap >/dev/null || fail "$1 is missing, no registry answers, and debootstrap is not installed"
    ((EUID == 0)) || fail "only root can make $1 with debootstrap"
    mkdir "$root"
    # In memory, where it can be: dpkg waits for the disk after each file.
    mount -t tmpfs -o size=1g flambeau "$root" 2>/dev/null || true
    debootstrap --variant=minbase "$suite" "$root" >"$work/debootstrap.log" 2>&1 \
        || { tail -n 20 "$work/debootstrap.log" >&2; fail "debootstrap failed"; }
    # What the slim image leaves out, and what apt fetches again when it is asked to.
    find "$root"/usr/share/doc -type f ! -name copyright -delete
    rm -rf "$root"/usr/share/{man,info,locale}/* "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* \
        "$root"/var/log/*.log "$root"/dev/* "$root"/proc/* "$root"/sys/*
    tar --create --numeric-owner --directory "$root" . \
        | docker import --change 'CMD ["bash"]' \
            --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' - "$1" >/dev/null
    umount "$root" 2>/dev/null || rm -rf "$root"
}

# Installs packages into images without waiting for the disk after each file.
install="apt-get install --yes --no-install-recommends --option Dpkg::Options::=--force-unsafe-io"

# gcc, a C library to link with, this machine's Rust, and the certificates that this machine trusts, so that
# crates come from where they come from here.
make_rust() {
    local context=$work/rust sysroot
    sysroot=$(rustc --print sysroot)
    mkdir -p "$context/bin"
    cp "$sysroot"/bin/{cargo,rustc} "$context/bin/"
    cp -a "$sysroot/lib" "$context/lib"
    cp -L "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$context/ca-certificates.crt"
    cat >"$context/Dockerfile" <<END
FROM $debian
RUN apt-get update \\
    && $install ca-certificates gcc libc6-dev \\
    && rm -rf /var/lib/apt/lists/*
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY bin /usr/local/cargo/bin
COPY lib /usr/local/cargo/lib
ENV CARGO_HOME=/usr/local/cargo PATH=/usr/local/cargo/bin:\$PATH
END
    build --tag "$1" "$context"
    rm -rf "$context"
}

# Debian's Prometheus, laid out as the official image is.
make_prometheus() {
    mkdir -p "$work/prometheus"
    cat >"$work/prometheus/Dockerfile" <<END
FROM $debian
RUN apt-get update \\
    && $install prometheus \\
    && rm -rf /var/lib/apt/lists/* \\
    && install --directory --owner nobody --group nogroup /prometheus
WORKDIR /prometheus
USER nobody
EXPOSE 9090
VOLUME /prometheus
ENTRYPOINT ["/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
END
    build --tag "$1" "$work/prometheus"
}

# provide TAG [COMMAND]: COMMAND makes the image where it cannot be pulled.
provide() {
    local tag=$1 make=${2:-} began=$SECONDS
    if present "$tag"; then
        say "$tag is there"
    elif timeout 600 docker pull --quiet "$tag" >/dev/null 2>"$work/pull.log"; then
        say "$tag was pulled"
    elif [[ -n $make ]]; then
        say "$tag cannot be pulled ($(tail -n 1 "$work/pull.log")); making one"
        "$make" "$tag"
        say "$tag is made in $((SECONDS - began)) s"
    else
        say "$tag cannot be pulled and cannot be made; what needs it is not tested"
    fi
}

[[ $* == "" || $* == --without-rust ]] || fail "usage: $0 [--without-rust]"
docker version >/dev/null 2>&1 || fail "no Docker engine answers"
debian=$(argument BASE_IMAGE)
rust=$(argument RUST_IMAGE)
[[ -n $debian && -n $rust ]] || fail "$dockerfile does not say BASE_IMAGE and RUST_IMAGE"
provide "$debian" make_debian
[[ ${1:-} == --without-rust ]] || provide "$rust" make_rust
provide "prom/prometheus:$(variable PROMETHEUS_VERSION)" make_prometheus
provide "grafana/grafana:$(variable GRAFANA_VERSION)"
