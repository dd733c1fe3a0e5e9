#!/usr/bin/env bash
# The commands of the assignment on two GPUs, with their records: gpu_suite.sh OUT [PART...]
#   public    public_check.py and the quick-start commands
#   default   the default workload with two ranks: all four modes interleaved, compiled and not, forward and backward
#   overlap   NVLink: none against the default plan and four chunks; host shared memory: against Inductor's own passes
#   peers     exchanges through the peers' memory beside NCCL's, compiled and not, forward and backward
#   traces    what runs beside what, over both links
#   tests     tests/gpu
# $PYTHON (default python3) must hold torch, triton and numpy.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=$(mkdir -p "${1:?usage: gpu_suite.sh OUT [PART...]}" && cd "$1" && pwd)
shift
parts=${*:-public default tests}
python=${PYTHON:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHON=$python PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 NPROC=2
failed=0

step() { # name, command...
  local name=$1 begin=$SECONDS
  shift
  if timeout 400 "$@" >"$out/$name.log" 2>&1; then echo "ok    $name ($((SECONDS - begin)) s)"
  else echo "FAIL  $name ($((SECONDS - begin)) s)"; tail -n 15 "$out/$name.log"; failed=1; fi
}
bench="bash $root/research_topic_2/scripts/run_prod_local.sh"
compare="$python -m torch.distributed.run --standalone --nproc-per-node 2 $root/research_topic_2/compare.py"

for part in $parts; do
  case $part in
    public)
      small="--batch-size 4 --tokens 16 --dim 128 --k 2 --gemm-backend bmm --no-compile --warmup 5 --num-tests 20"
      step public_check "$python" "$root/research_topic_2/public_check.py" --json "$out"
      step quick_none $bench $small --overlap none --json "$out/quick_none.json"
      step quick_kernel $bench $small --overlap kernel --check-correctness bitwise --json "$out/quick_kernel.json"
      step quick_backward $bench $small --overlap kernel --backward --check-correctness approx --json "$out/quick_backward.json"
      ;;
    default)
      common="--warmup 5 --num-tests 20 --rounds 4 --check-correctness approx --full-batch-check --own-comp-only"
      for compile in "" --no-compile; do
        for pass in "" --backward; do
          name=default${compile:+_eager}${pass:+_backward}
          step "$name" $compare $common $compile $pass --json "$out/$name.json"
          grep -E "us|none|with-sm|sm-free|kernel|comp-only|exchanges|full" "$out/$name.log" | tail -n 24
        done
      done
      ;;
    overlap)
      peers="kernel:naive,kernel:inductor-reorder,none:inductor-reorder,kernel:inductor-overlap,none:inductor-overlap"
      for pass in "" --backward; do
        common="--warmup 5 --num-tests 20 --rounds 5 $pass"
        name=overlap_nvlink${pass:+_backward}
        step "$name" $compare --modes none,kernel,kernel:chunks=4,kernel:naive $common --json "$out/$name.json"
        tail -n 9 "$out/$name.log"
        name=overlap_shm${pass:+_backward}
        step "$name" env NCCL_P2P_DISABLE=1 $compare --modes "none,kernel,$peers" $common --json "$out/$name.json"
        tail -n 12 "$out/$name.log"
      done
      ;;
    peers)
      modes=none,with-sm,sm-free,kernel,kernel:sequential,kernel:peers=1,kernel:peers=4+28,kernel:peers=8+24
      common="--modes $modes --warmup 5 --num-tests 20 --rounds 4 --check-correctness approx"
      for compile in "" --no-compile; do
        for pass in "" --backward; do
          name=peers${compile:+_eager}${pass:+_backward}
          step "$name" $compare $common $compile $pass --json "$out/$name.json"
          tail -n 12 "$out/$name.log"
        done
      done
      ;;
    traces)
      trace="$python -m torch.distributed.run --standalone --nproc-per-node 2 $root/scripts/trace_overlap.py --warmup 5"
      for pass in "" --backward; do
        step "trace_nvlink${pass:+_backward}" $trace --modes kernel,kernel:chunks=4,kernel:naive $pass --output "$out/nvlink"
        step "trace_shm${pass:+_backward}" env NCCL_P2P_DISABLE=1 $trace $pass --output "$out/shm"
      done
      grep -h ^rank "$out"/*/*.trace.txt
      ;;
    tests) step tests_gpu "$python" -m pytest -q -p no:cacheprovider "$root/tests/gpu" ;;
    *) echo "unknown part $part" >&2; exit 2 ;;
  esac
done
exit $failed
