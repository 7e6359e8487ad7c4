// What cublaslt.c asks of a card: the emulated one offers one algorithm for everything, and sums FP8 as Hopper does.
#include "../card.h"

fake_card card = {.offered = 1, .sample = 1, .hopper = true};
