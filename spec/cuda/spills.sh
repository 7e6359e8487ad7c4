#!/bin/sh
# make spills: sh spec/cuda/spills.sh build/cuda/*.ptxas
#
# Reads what ptxas -v told of every kernel when it was compiled, prints those that keep registers in memory (bytes stored, bytes loaded,
# architecture, name) and fails when one of them is not in the list below. A stack frame without spills, an array with an index that is
# found at run time, is no matter.

# Kernels that may, extended regular expressions, one a line; the reason stands behind #.
allowed='
plain_(forward|delta|grad_keys|grad_queries)<   # attention of f64 and of odd formats, by functions with frames of their own
lanes_kernel<doubles<[12]> >                 # max and min of f64
(held|long)_grad_kernel<float_lanes<1>       # softmax of rows that are no multiple of 4: number by number
warp_row_kernel<32>                          # topk: two words, once a row
'

[ $# -gt 0 ] && [ -e "$1" ] || { echo "spills.sh: expected files written by nvcc -Xptxas -v, got ${1:-none}; hint: make cuda" >&2; exit 1; }
patterns=$(echo "$allowed" | sed -e 's/ *#.*//' -e '/^$/d')

cat "$@" | awk '
  /Compiling entry function/ { split($0, part, "\047"); name = part[2]; card = part[4] }   # \047: a quote
  /bytes spill stores/ && name { if ($5 + $9) print $5, $9, card, name; name = "" }' |
c++filt | sed 's/ void / /; s/(.*//' | sort | {
  bad=0
  while read -r line; do
    if echo "$line" | grep -qE "$patterns"; then echo "$line  (allowed)"; else echo "$line"; bad=1; fi
  done
  exit $bad
}
