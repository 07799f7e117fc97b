#!/bin/sh
# Writes to the folder $1 a workspace that depends on what the one here depends on, and has no code of
# its own: its build is the layer with all dependencies, which changes only when a manifest does.
set -eu
plan=$1

program() { mkdir -p "$(dirname "$1")" && echo 'fn main() {}' >"$1"; }

mkdir -p "$plan"
cp -r .cargo Cargo.toml Cargo.lock "$plan"
for manifest in crates/*/Cargo.toml tests/Cargo.toml; do
    package=$(dirname "$manifest")
    mkdir -p "$plan/$package/src"
    cp "$manifest" "$plan/$package"
    : >"$plan/$package/src/lib.rs"
    if [ -e "$package/build.rs" ]; then program "$plan/$package/build.rs"; fi
    # The programs, examples, tests and benches that the manifest names, each with its `path`.
    sed -n 's/^path = "\(.*\.rs\)"$/\1/p' "$manifest" | while read -r path; do
        program "$plan/$package/$path"
    done
done
