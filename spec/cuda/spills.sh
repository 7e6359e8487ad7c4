#!/bin/sh
# make spills: sh spec/cuda/spills.sh build/cuda/*.ptxas
#
# Reads the output of ptxas -v for every kernel and prints the kernels that spill registers (bytes
# stored and loaded, architecture, name). Fails when one of them is not in the list below, and when
# ptxas says that it ends each product on Hopper's tensor cores before it starts the next. A stack
# frame without spills (an array with a run-time index) is fine.

# Kernels that may spill: extended regular expressions, one a line, each with its reason after #.
allowed='
plain_(rows|delta)<                         # attention of f64 and unusual formats
lanes_kernel<singles<[12], double> >         # max and min of f64
(held|long)_grad_kernel<float_lanes<1>       # softmax of rows not a multiple of 4: scalar
warp_row_kernel<32>                          # topk: two words, once a row
pool(_grad)?_kernel<                         # bounds of windows: 64-bit divisions, which are calls
(repair|finish_weights)                      # conv2d: results that are NaN, one by one
quantize_in_registers<.*, (true, false|false, true)>   # a few registers for 64 elements a thread
'

[ $# -gt 0 ] && [ -e "$1" ] || {
  echo "spills.sh: expected files written by nvcc -Xptxas -v, got ${1:-none}; hint: make cuda" >&2
  exit 1
}
bad=0
serialized=$(grep -h "wgmma.mma_async instructions are serialized" "$@" | c++filt)
[ -z "$serialized" ] || { echo "$serialized"; bad=1; }
patterns=$(echo "$allowed" | sed -e 's/ *#.*//' -e '/^$/d')

cat "$@" | awk '
  # \047: a quote
  /Compiling entry function/ { split($0, part, "\047"); name = part[2]; card = part[4] }
  /bytes spill stores/ && name { if ($5 + $9) print $5, $9, card, name; name = "" }' |
c++filt | sed 's/ void / /; s/(anonymous namespace):://g; s/(.*//' | sort | {
  while read -r line; do
    if echo "$line" | grep -qE "$patterns"; then echo "$line  (allowed)"
    else echo "$line"; bad=1; fi
  done
  exit $bad
}
