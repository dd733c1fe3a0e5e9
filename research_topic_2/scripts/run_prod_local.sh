#!/usr/bin/env bash
# Runs benchmark.py on NPROC ranks of this host. Arguments go to the benchmark.
#   NPROC=2 bash scripts/run_prod_local.sh --overlap kernel
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$here/scripts/environment.sh"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-8}" "$here/benchmark.py" "$@"
