#!/usr/bin/env bash
# Runs benchmark.py over several nodes; start it on every node. Arguments go to the benchmark.
#   NNODES=2 NPROC=2 NODE_RANK=0 MASTER_ADDR=<IP of node 0> bash scripts/run_prod_cross.sh --overlap kernel
# MASTER_PORT defaults to 29500. NCCL's network interface is set with NCCL_SOCKET_IFNAME and NCCL_IB_HCA, gloo's
# (--device cpu) with GLOO_SOCKET_IFNAME: CLUSTER.md.
set -euo pipefail
if [[ -z "${MASTER_ADDR:-}" ]]; then
    echo "error: MASTER_ADDR is not set; give the IP address of node 0 that every node reaches" >&2
    exit 2
fi
if [[ -z "${NODE_RANK:-}" ]]; then
    echo "error: NODE_RANK is not set; give this node's index, from 0 to NNODES - 1" >&2
    exit 2
fi
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$here/scripts/environment.sh"
exec "$PYTHON" -m torch.distributed.run --nnodes "${NNODES:-2}" --nproc-per-node "${NPROC:-8}" \
    --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    "$here/benchmark.py" "$@"
