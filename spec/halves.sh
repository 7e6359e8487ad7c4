#!/bin/sh
# Runs specs in two processes at the same time; the second process's output comes last. Files that
# start ranks all run in the first process, because two mpiruns at once can fail over Open MPI's
# folder in /tmp.
# Called by `make test`. Usage: sh spec/halves.sh SECONDS ENGINE FILE-OR-FOLDER [BUSTED OPTIONS].
# Exit code: 0 if all specs passed.
seconds=$1 engine=$2 specs=$3
shift 3

# KILL, because busted continues after TERM, and then all remaining specs fail.
run() {
  timeout -s KILL "$seconds" "$engine" spec/run.lua "$@"
  case $? in
    0) return 0 ;;
    124 | 137) echo "make test: out of time after $seconds s; hint: make test TEST_SECONDS=1800" >&2
  esac
  return 1
}

[ -d "$specs" ] || { run "$@" "$specs"; exit; }
files=$(find "$specs" -name '*_spec.lua' | sort)
ranks=$(grep -lE 'dist\.start|MPIRUN|GUIDES' $files)
others=$(echo "$files" | grep -vxF "$ranks")
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
[ -z "$others" ] || run "$@" $others >"$log" 2>&1 &
other=$!
[ -z "$ranks" ] || run "$@" $ranks
code=$?
wait $other || code=1
cat "$log"
exit $code
