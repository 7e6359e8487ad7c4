// What cublaslt.c asks of a card: the emulated one offers one algorithm for everything, which wants a workspace as one does that makes a sum in
// four parts, or another, which wants none, where that is too much; and sums FP8 as Hopper does.
#include "../card.h"

fake_card card = {.offered = 1, .sample = 1, .hopper = true, .workspace = {16}};
