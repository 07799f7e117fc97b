#!/usr/bin/env bash
# Builds `flambeau` for NVIDIA GPUs on a machine that needs neither a GPU nor a CUDA toolkit: the
# toolkit is put together from wheels on PyPI. docs/cuda.md tells more.
#
#   scripts/build-cuda.sh           the program
#   scripts/build-cuda.sh nccl      the same, in which GPUs add up gradients by NCCL
#   scripts/build-cuda.sh tests     the tests that need a GPU too
#
# Settings, all from the environment:
#   CUDA_HOME               a toolkit of your own; where it has bin/nvcc, no wheels are installed
#   FLAMBEAU_CUDA_TOOLKIT   where the wheels go; default target/cuda-toolkit
#   CUDA_COMPUTE_CAP        the GPUs' compute capability; default 90 (Hopper)
#   CUDAFORGE_THREADS       how many nvcc run at once; default: as many as there are cores
set -euo pipefail

# Of one CUDA release, 13.0; nvcc, its libraries and its headers belong together.
wheels=(
    nvidia-cuda-nvcc==13.0.88
    nvidia-nvvm==13.0.88
    nvidia-cuda-crt==13.0.88
    nvidia-cuda-nvrtc==13.0.88
    nvidia-cuda-runtime==13.0.96
    nvidia-cuda-cccl==13.0.85
    nvidia-curand==10.4.0.35
    nvidia-cublas==13.1.0.3
)
nccl_wheel=nvidia-nccl-cu13==2.28.9
wheels_cuda_version=13000 # as cudarc's build script wants it

say() { printf 'build-cuda: %s\n' "$*"; }
fail() { printf 'build-cuda: %s\n' "$*" >&2; exit 1; }
need() { command -v "$1" >/dev/null || fail "$1 is not on PATH; $2"; }

# Installs the wheels, unless they are there.
install_wheels() {
    local wanted stamp="$toolkit/wheels.txt"
    wanted=$(printf '%s\n' "${wheels[@]}")
    if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        say "the wheels are in $toolkit already"
        return
    fi
    say "installing ${#wheels[@]} wheels from PyPI into $toolkit (about 1.2 GB)"
    # --upgrade replaces what an interrupted run has left; the stamp comes last.
    python3 -m pip install --no-deps --no-compile --only-binary :all: --upgrade \
        --target "$toolkit" "${wheels[@]}"
    printf '%s\n' "$wanted" >"$stamp"
}

# NCCL is a wheel of its own, in a folder of its own: pip adds nothing to one that is there.
install_nccl() {
    local folder="$toolkit/${nccl_wheel//==/-}"
    local library="$folder/nvidia/nccl/lib/libnccl.so.2"
    if [[ ! -f $library ]]; then
        say "installing $nccl_wheel from PyPI into $toolkit"
        python3 -m pip install --no-deps --no-compile --only-binary :all: \
            --target "$folder" "$nccl_wheel"
    fi
    ln -sfn "$library" "$CUDA_HOME/lib/libnccl.so"
    ln -sfn "$library" "$CUDA_HOME/lib/libnccl.so.2"
}

# The wheels hold libX.so.N alone; the linker looks for libX.so, some tools for lib64.
link_libraries() {
    local library
    for library in cublas cublasLt cudart curand nvrtc; do
        local versioned=("$CUDA_HOME/lib/lib$library".so.*)
        [[ -e ${versioned[0]} ]] || fail "no lib$library.so.* in $CUDA_HOME/lib"
        ln -sfn "${versioned[0]##*/}" "$CUDA_HOME/lib/lib$library.so"
    done
    ln -sfn lib "$CUDA_HOME/lib64"
}

# libcuda comes with the driver, and so in no wheel. The linker is content with a library that has
# the names which cudarc's bindings declare; each answers CUDA_ERROR_UNKNOWN.
make_stub() {
    local bindings stubs="$CUDA_HOME/lib/stubs"
    # cargo knows where the sources are of the version that Cargo.lock names.
    bindings=$(cargo metadata --locked --format-version 1 --features flambeau/cuda | python3 -c '
import json, pathlib, sys
packages = json.load(sys.stdin)["packages"]
manifests = [p["manifest_path"] for p in packages if p["name"] == "cudarc"]
print(pathlib.Path(manifests[0]).parent / "src/driver/sys/mod.rs")')
    mkdir -p "$stubs"
    grep -oE 'fn cu[A-Z][A-Za-z0-9_]*' "$bindings" | sort -u \
        | sed 's/^fn \(.*\)/int \1(void) { return 999; }/' >"$stubs/libcuda.c.new"
    [[ -s $stubs/libcuda.c.new ]] || fail "found no functions in $bindings"
    if [[ -e $stubs/libcuda.so ]] && cmp -s "$stubs/libcuda.c.new" "$stubs/libcuda.c"; then
        rm "$stubs/libcuda.c.new"
        return
    fi
    cc -shared -fPIC -Wl,-soname,libcuda.so.1 -x c -o "$stubs/libcuda.so" "$stubs/libcuda.c.new"
    mv "$stubs/libcuda.c.new" "$stubs/libcuda.c"
    say "made a libcuda to link with, of $(wc -l <"$stubs/libcuda.c") functions"
}

features=cuda
tests=
for argument in "$@"; do
    case $argument in
    nccl) features=nccl ;;
    tests) tests=yes ;;
    *) fail "$argument is unknown; nccl and tests are known" ;;
    esac
done

need cargo "install Rust"
need cc "install a C compiler; cargo links with it"
[[ -n ${NVCC_CCBIN:-} ]] || need g++ "install a C++ compiler; nvcc works with it"

toolkit=${FLAMBEAU_CUDA_TOOLKIT:-}
if [[ -n $toolkit ]]; then
    mkdir -p "$toolkit"
    toolkit=$(cd "$toolkit" && pwd)
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
toolkit=${toolkit:-$PWD/target/cuda-toolkit}

if [[ -n ${CUDA_HOME:-} && -x $CUDA_HOME/bin/nvcc ]]; then
    say "using the toolkit in CUDA_HOME, $CUDA_HOME"
    libraries=$CUDA_HOME/lib64
else
    [[ -z ${CUDA_HOME:-} ]] || say "CUDA_HOME, $CUDA_HOME, has no bin/nvcc; using wheels instead"
    need python3 "the wheels are installed with its pip"
    export CUDA_HOME=$toolkit/nvidia/cu13
    export CUDARC_CUDA_VERSION=$wheels_cuda_version
    libraries=$CUDA_HOME/lib
    mkdir -p "$toolkit"
    install_wheels
    link_libraries
    [[ $features != nccl ]] || install_nccl
    make_stub
fi

# The build scripts look at these too, and must not find a second toolkit.
unset CUDA_PATH CUDA_ROOT CUDA_TOOLKIT_ROOT_DIR NVCC
export PATH=$CUDA_HOME/bin:$PATH
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90}
export CUDAFORGE_THREADS=${CUDAFORGE_THREADS:-$(nproc)}

say "building for compute capability $CUDA_COMPUTE_CAP with $CUDAFORGE_THREADS nvcc at once"
cargo build --release --locked -p flambeau --features "$features" --target-dir target/cuda
if [[ -n $tests ]]; then
    cargo test --release --locked -p flambeau-replica -p flambeau-variables -p flambeau-gpu --features "$features" --lib --test cuda --test cuda_memory --no-run \
        --target-dir target/cuda
fi

binary=target/cuda/release/flambeau
say "built $binary, $(du -h "$binary" | cut -f1)"
if command -v readelf >/dev/null; then
    say "it needs these libraries:"
    readelf -d "$binary" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/    \1/p'
fi
cat <<END
build-cuda: on the GPU machine, libcuda.so.1 comes with the driver; for the other CUDA libraries set
    LD_LIBRARY_PATH=$libraries
or, there, to the same libraries in another place (docs/cuda.md).
END
