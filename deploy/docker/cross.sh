#!/bin/sh
# Prepares the builder's cargo to compile for the architecture $1, amd64 or arm64, with Debian's cross compiler. Without
# $1, or where it is the machine's own, there is nothing to prepare.
set -eu
architecture=${1:-}

case $architecture in
"" | "$(dpkg --print-architecture)") exit 0 ;;
amd64) target=x86_64-unknown-linux-gnu compiler=x86_64-linux-gnu-gcc package=gcc-x86-64-linux-gnu ;;
arm64) target=aarch64-unknown-linux-gnu compiler=aarch64-linux-gnu-gcc package=gcc-aarch64-linux-gnu ;;
*)
    echo "cross.sh: no cross compiler is known for $architecture; amd64 and arm64 are" >&2
    exit 1
    ;;
esac

apt-get update
apt-get install --yes --no-install-recommends "$package" "libc6-dev-$architecture-cross"
rm -rf /var/lib/apt/lists/*
rustup target add "$target"
# The crates' C code finds the same compiler by the target's name.
cat >>"${CARGO_HOME:-$HOME/.cargo}/config.toml" <<END
[build]
target = "$target"
[target.$target]
linker = "$compiler"
END
