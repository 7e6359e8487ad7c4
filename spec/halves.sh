#!/bin/sh
# Runs specs in two processes, each with every second file; the second one's output comes last.
# Called by `make test`.  Usage: sh spec/halves.sh SECONDS ENGINE FILE-OR-FOLDER... [-- OPTIONS]
# (busted's options). Exit code: 0 if all specs passed.
seconds=$1 engine=$2
shift 2
files=
while [ $# -gt 0 ] && [ "$1" != -- ]; do files="$files $1"; shift; done
[ $# -gt 0 ] && shift
# shellcheck disable=SC2086
files=$(find $files -name '*.lua' \( -name '*_spec.lua' -o -path "${files# }" \) | sort)
half() { echo "$files" | awk "NR % 2 == $1"; }

# KILL: after TERM busted continues, and all remaining specs fail
run() {
  # shellcheck disable=SC2046
  timeout -s KILL "$seconds" "$engine" spec/run.lua "$@"
  case $? in
    0) return 0 ;;
    124 | 137) echo "make test: out of time after $seconds s; hint: make test TEST_SECONDS=1800" >&2
  esac
  return 1
}

if [ "$(echo "$files" | wc -l)" = 1 ]; then run "$@" "$files"; exit; fi
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2046
run "$@" $(half 0) >"$log" 2>&1 &
other=$!
# shellcheck disable=SC2046
run "$@" $(half 1)
code=$?
wait $other || code=1
cat "$log"
exit $code
