#!/usr/bin/env bash
# Makes the environment and runs the tests; arguments go to pytest.
#   bash scripts/test.sh               everything that this machine can run
#   bash scripts/test.sh tests/unit -x   a part, by path or with -k
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_modules pytest hypothesis
# Tests start several ranks, each a process.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}
cd "$root"
for argument in "$@"; do # tests named by path take the place of all of them
  if [[ -e ${argument%%::*} ]]; then exec "$PYTHON" -m pytest "$@"; fi
done
exec "$PYTHON" -m pytest tests "$@"
