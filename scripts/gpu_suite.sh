#!/usr/bin/env bash
# The commands of the assignment on two GPUs, with their records: gpu_suite.sh OUT [PART...]
#   public    public_check.py and the quick-start commands
#   default   the default workload with two ranks: all four modes interleaved, compiled and not, forward and backward
#   overlap   NVLink: none against the default, the plan's and four chunks through NCCL; host shared memory: against Inductor's own passes
#   peers     exchanges through the peers' memory beside NCCL's, compiled and not, forward and backward
#   ablation  what each piece is worth: it switched off, beside the whole
#   graphs    the same under CUDA graphs
#   small     three small shapes, eager
#   sweep     all modes over all shapes, both passes, compiled and not: one file, in which an earlier run goes on
#   sanitizer memory errors and races of the kernels that run alone (needs compute-sanitizer; the one of
#             the package nvidia-cuda-sanitizer-api has to be made executable, all its files)
#   traces    what runs beside what, over both links
#   measure   what is hidden, in times and traces, over both links, also communication-bound and compute-bound
#   tests     tests/gpu
#   stress    2,000 calls with other chunks, batch sizes and delays each, between buffers full of junk
# $PYTHON (default python3) must hold torch, triton and numpy. A step is ended after $STEP_LIMIT seconds (default 400).
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
usage="usage: gpu_suite.sh OUT [PART...]"
case ${1:-} in
  "") echo "$usage" >&2; exit 2 ;;
  -h | --help) sed -n '2,/^# \$PYTHON/s/^# //p' "$0"; exit 0 ;;
  -*) echo "$usage" >&2; exit 2 ;;
esac
if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
  echo "gpu_suite.sh: no GPU was found" >&2
  exit 2
fi
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
parts=${*:-public default tests}
python=${PYTHON:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHON=$python PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 NPROC=2
failed=0

step() { # name, command...
  local name=$1 begin=$SECONDS
  shift
  if timeout "${STEP_LIMIT:-400}" "$@" >"$out/$name.log" 2>&1; then echo "ok    $name ($((SECONDS - begin)) s)"
  else echo "FAIL  $name ($((SECONDS - begin)) s)"; tail -n 15 "$out/$name.log"; failed=1; fi
}
bench="bash $root/research_topic_2/scripts/run_prod_local.sh"
torchrun="$python -m torch.distributed.run --standalone --nproc-per-node 2"
compare="$torchrun $root/research_topic_2/compare.py"
sweep="$torchrun $root/research_topic_2/sweep.py"
nccl=kernel:TRANSPORT=collectives # kernel alone goes through the peers' memory where it can

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
        step "$name" $compare --modes none,kernel,$nccl,$nccl+CHUNKS=4,kernel:naive $common --json "$out/$name.json"
        tail -n 9 "$out/$name.log"
        name=overlap_shm${pass:+_backward}
        step "$name" env NCCL_P2P_DISABLE=1 $compare --modes "none,kernel,$peers" $common --json "$out/$name.json"
        tail -n 12 "$out/$name.log"
      done
      ;;
    peers)
      modes=none,with-sm,sm-free,$nccl,kernel:sequential,kernel:peers,kernel:peers=4+28,kernel:peers=8+24
      common="--modes $modes --warmup 5 --num-tests 20 --rounds 4 --check-correctness approx --full-batch-check"
      for compile in "" --no-compile; do
        for pass in "" --backward; do
          name=peers${compile:+_eager}${pass:+_backward}
          step "$name" $compare $common $compile $pass --json "$out/$name.json"
          tail -n 12 "$out/$name.log"
        done
      done
      ;;
    ablation)
      peers=kernel:TRANSPORT=peers
      modes=none,kernel:peers,kernel:sequential,$nccl,$peers+CHUNKS=4,$peers+GEMMS=cublas,$peers+DISABLE_PASSES=reorder,$peers+NORM=inductor
      modes+=,$peers+HEAD=0,$peers+OWN_FIRST=1,$peers+DISABLE_PASSES=one-call
      for compile in "" --no-compile; do
        for pass in "" --backward; do
          name=ablation${compile:+_eager}${pass:+_backward}
          exact=${pass:+${compile:+,$peers+GRADIENTS=exact}}
          common="--warmup 5 --num-tests 20 --rounds 4 $compile $pass"
          step "$name" $compare --modes "$modes$exact" $common --json "$out/$name.json"
          tail -n 13 "$out/$name.log"
        done
      done
      ;;
    graphs)
      for compile in "" --no-compile; do
        name=graphs${compile:+_eager}
        common="--warmup 5 --num-tests 20 --rounds 4 --check-correctness approx --cuda-graph"
        step "$name" $compare --modes none,kernel,$nccl $common $compile --json "$out/$name.json"
        tail -n 7 "$out/$name.log"
      done
      ;;
    small)
      step small_eager $sweep --shapes "$root/reports/shapes/development.json" --modes none,kernel,$nccl \
        --no-compile --full-batch-check --output "$out/small_eager.jsonl"
      grep -A 40 "T_none" "$out/small_eager.log"
      ;;
    sweep)
      for compile in "" --no-compile; do
        for pass in "" --backward; do
          name=sweep${compile:+_eager}${pass:+_backward}
          step "$name" $sweep --check-correctness approx --full-batch-check $compile $pass --output "$out/sweep.jsonl"
          grep -E "geometric mean|T_none" "$out/$name.log"
        done
      done
      ;;
    sanitizer)
      small="bfloat16 and (2x3x132 or 2x7x390 or 1x2x256 or 3x37x390 or 2x8x9x80x10 or 5x2x2x96x36 or 2x5x40x72) or (all_have_stored and (4-1 or 3-1))" # sanitizers are slow
      for tool in memcheck racecheck; do
        kernels="test_exact_gated_norm.py test_gated_norm_grad.py test_gemm_combine.py test_chunk_gemm_triton.py test_meeting.py"
        step "sanitizer_$tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --error-exitcode 9 \
          "$python" -m pytest -q -p no:cacheprovider -k "$small" \
          $(printf "$root/tests/gpu/%s " $kernels)
        grep -E "ERROR SUMMARY|RACECHECK SUMMARY|passed|failed" "$out/sanitizer_$tool.log"
      done
      ;;
    traces)
      trace="$torchrun $root/scripts/trace_overlap.py --warmup 5"
      for pass in "" --backward; do
        step "trace_nvlink${pass:+_backward}" $trace --modes kernel,$nccl,$nccl+CHUNKS=4,kernel:naive $pass --output "$out/nvlink"
        step "trace_shm${pass:+_backward}" env NCCL_P2P_DISABLE=1 $trace $pass --output "$out/shm"
      done
      grep -h ^rank "$out"/*/*.trace.txt
      ;;
    measure)
      measure="$torchrun $root/scripts/measure.py --warmup 5 --num-tests 20 --rounds 4"
      for pass in "" --backward; do
        for scale in "" --comm-scale --compute-scale; do
          options="$pass ${scale:+$scale 2}" kind=${scale:+_${scale#--}}
          name=$kind${pass:+_backward}
          step "measure_nvlink$name" $measure --modes none,kernel:sequential,kernel,$nccl $options \
            --output "$out/measure_nvlink$kind"
          step "measure_shm$name" env NCCL_P2P_DISABLE=1 $measure $options --output "$out/measure_shm$kind"
          tail -n 12 "$out/measure_nvlink$name.log" "$out/measure_shm$name.log"
        done
      done
      ;;
    tests) step tests_gpu "$python" -m pytest -q -p no:cacheprovider "$root/tests/gpu" ;;
    stress) step stress "$python" -m pytest -q -p no:cacheprovider -m slow "$root/tests/gpu/test_peers.py" ;;
    *) echo "unknown part $part" >&2; exit 2 ;;
  esac
done
exit $failed
