# Sourced by eight_gpus.sh and cross_kit.sh: named steps within one time budget, their logs, and what is handed back.
#   work      folder of logs and records; out: the folder that is handed back
#   budget    seconds for all steps; a step for which less than half of its limit is left is skipped, and said to be
#   patience  what limits are multiplied by, on slow machines
#   only      names of steps separated by commas, where not all are wanted
#   dry_run   1: print the commands, run nothing
# `pack` follows every step, so that a run which is ended from outside leaves what it had.

failed=0

say() { # a line of the table
  echo "$*"
  ((dry_run)) || echo "$*" >>"$work/table.log"
}

wanted() { # name of a step
  [[ -z $only || ,$only, == *,$1,* ]]
}

step() { # name, limit in seconds, command...; the status is the command's
  local name=$1 limit=$(($2 * patience)) begin=$SECONDS left=$((budget - SECONDS)) status text
  shift 2
  wanted "$name" || return 0
  if ((dry_run)); then
    printf -v text ' %q' "$@" # one write: steps side by side print at the same time
    echo "$name (at most $limit s):$text"
    return
  fi
  if ((left < limit / 2)); then
    say "skip  $name: $left s are left of $budget"
    failed=1
    return 1
  fi
  timeout --kill-after=20 "$((limit < left ? limit : left))" "$@" >"$work/$name.log" 2>&1
  status=$?
  if ((status == 0)); then say "ok    $name ($((SECONDS - begin)) s)"
  else
    say "FAIL  $name ($((SECONDS - begin)) s, status $status)"
    grep -vE '^\s*(File|Traceback|frame #)' "$work/$name.log" | tail -n 12
    failed=1
  fi
  sed -n '/slowest-rank medians/,/^hidden = /p; /^full-batch comparison/p; /^rank [0-9]*: span/p; /^SIMULATED/,$p' "$work/$name.log" |
    tee -a "$work/table.log"
  pack
  return $status
}

pack() { # everything as pieces of 15 MiB, and the table beside them; of steps side by side one after the other
  (
    flock 9
    rm -f "$out"/results.tar.gz.*
    tar -C "$work" --exclude=lock -czf - . | split -b 15M -d -a 1 - "$out/results.tar.gz."
    cp "$work/table.log" "$out/table.log"
  ) 9>"$work/lock"
}
