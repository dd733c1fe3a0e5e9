#!/usr/bin/env bash
# Makes the environment and runs the tests; arguments go to pytest.
#   bash scripts/test.sh               everything that this machine can run
#   bash scripts/test.sh -k unit -x    a part
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_modules pytest hypothesis
# Tests start several ranks, each a process.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}
cd "$root"
exec "$PYTHON" -m pytest tests "$@"
