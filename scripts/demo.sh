#!/usr/bin/env bash
# The main job, from nothing: makes the environment, runs the block sequentially and overlapped, forward and backward,
# checks the outputs and gradients against the sequential ones, and prints latency, communication, hidden fraction and
# throughput. Two or more GPUs: the default workload on them. Otherwise: two gloo processes, a small shape.
# The exit status is 0 when every check passed. Logs and records: build/demo/.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
out=$root/build/demo
mkdir -p "$out" && rm -f "$out"/*.log "$out"/*.json

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0)
ranks=2
if ((gpus >= 2)); then
  if ((gpus >= 8)); then ranks=8; elif ((gpus >= 4)); then ranks=4; fi
  where="$ranks GPUs"
  shape=(512 64 1280 6)
  common=(--warmup 5 --num-tests 20 --rounds 4 --full-batch-check)
  limit=600
else
  where="CPU, two gloo processes"
  # One compile thread: Inductor's worker pool costs more than it gives on few cores, and 2.6.0 can wait for it at exit.
  export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}
  export CUDA_VISIBLE_DEVICES= GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  # Two rows: the checks' min(B,2) rows are the whole batch then, and each mode compiles once.
  shape=(2 16 128 2)
  common=(--device cpu --modes none,kernel --warmup 2 --num-tests 12 --rounds 3 --no-l2-flush)
  limit=900
fi
common+=(--batch-size "${shape[0]}" --tokens "${shape[1]}" --dim "${shape[2]}" --k "${shape[3]}")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} A2A_FFN_STRICT=1 # an error, should the layer delegate to the sequential one

torchrun=("$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$ranks")
compare=("${torchrun[@]}" "$root/research_topic_2/compare.py" "${common[@]}")
verdicts=()
number=0

step() { # name, what it shows, lines of the log to print (sed script), command...
  local name=$1 what=$2 show=$3 begin=$SECONDS pid
  shift 3
  number=$((number + 1))
  echo
  echo "== [$number/$steps] $what ($SECONDS s so far)"
  timeout "$limit" "$@" >"$out/$name.log" 2>&1 &
  pid=$!
  trap 'kill $pid 2>/dev/null; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    (((SECONDS - begin) % 20 == 0)) && echo "   running, $((SECONDS - begin)) s"
  done
  wait "$pid"
  local status=$?
  if ((status == 0)); then
    sed -n "$show" "$out/$name.log"
    verdicts+=("passed  $what ($((SECONDS - begin)) s)")
  else
    tail -n 25 "$out/$name.log"
    local how=FAILED
    ((status != 124)) || how="FAILED  (stopped after $limit s)"
    verdicts+=("$how  $what: build/demo/$name.log")
    failed=1
  fi
}

failed=0
steps=$((gpus >= 2 ? 5 : 4))
table='s/^check: /&/p; s/^full-batch comparison/&/p; /slowest-rank medians/,$p'
echo "== demo on $where: B=${shape[0]} per rank, T=${shape[1]}, D=${shape[2]}, k=${shape[3]}, bf16, P=$ranks"
step explain "what the layer does for this call" '/^layout/,/^compiled/p' \
  "${torchrun[@]}" "$root/scripts/explain_demo.py" "${shape[@]}"
step eager_forward "eager reference, forward" "$table" \
  "${compare[@]}" --no-compile --check-correctness bitwise --json "$out/eager_forward.json"
step eager_backward "eager reference, forward and backward" "$table" \
  "${compare[@]}" --no-compile --backward --check-correctness approx --json "$out/eager_backward.json"
step compiled_forward "whole block compiled, forward" "$table" \
  "${compare[@]}" --check-correctness bitwise --json "$out/compiled_forward.json"
((gpus < 2)) || step compiled_backward "whole block compiled, forward and backward" "$table" \
  "${compare[@]}" --backward --check-correctness approx --json "$out/compiled_backward.json"

echo
echo "== results after $SECONDS s"
printf '%s\n' "${verdicts[@]}"
((gpus >= 2)) || echo "On CPU the exchanges and the GEMMs share the cores: the checks count here, the times do not."
cat <<TEXT

Where to look next
  build/demo/*.json                    every rank's samples, versions, settings; *.log beside them
  research_topic_2/benchmark.py        one mode at a time: NPROC=2 bash research_topic_2/scripts/run_prod_local.sh --help
  compile_overlap/layer.py, passes/    the layer, and the passes that schedule it
  README.md                            how to use it in your own model and in the original archive
TEXT
exit $failed
