#!/bin/sh
# Runs a worker on a GPU of its own: one-gpu worker [ARGUMENT...]
#
# All replicas of a service are started alike and see the same GPUs, so they settle it among themselves:
# each takes the first GPU whose lock in the folder /gpus, which they share, is free. The kernel gives the
# lock back when the process ends, however it ends. Where CUDA_VISIBLE_DEVICES says which GPU to take, or
# FLAMBEAU_DEVICE is cpu, nothing is locked.
set -eu
locks=${FLAMBEAU_GPU_LOCKS:-/gpus}

if [ -n "${CUDA_VISIBLE_DEVICES:-}" ] || [ "${FLAMBEAU_DEVICE:-}" = cpu ]; then
    exec "$@"
fi
gpus=$(nvidia-smi --query-gpu=uuid --format=csv,noheader) || {
    echo "one-gpu: no GPU in this container: $gpus; is NVIDIA's container toolkit installed?" >&2
    exit 1
}
for gpu in $gpus; do
    exec 9>"$locks/$gpu.lock"
    if flock --nonblock 9; then
        echo "one-gpu: taking $gpu" >&2
        export CUDA_VISIBLE_DEVICES="$gpu"
        # The worker inherits the lock, and knows the GPU as number 0.
        exec "$@"
    fi
done
echo "one-gpu: each GPU of this machine has a worker already; scale worker-gpu down" >&2
exit 1
