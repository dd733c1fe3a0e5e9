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
if (($#)); then exec "$PYTHON" -m pytest tests "$@"; fi

# Everything: the tests that start ranks mostly wait for one compiler, so the others run beside them.
mkdir -p build
"$PYTHON" -m pytest tests --ignore=tests/distributed >build/tests-local.log 2>&1 &
local_tests=$!
status=0
"$PYTHON" -m pytest tests/distributed || status=$?
wait "$local_tests" || status=$?
cat build/tests-local.log
exit "$status"
