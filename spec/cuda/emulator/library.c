// How the emulated card configures cublaslt.c: one algorithm for every product, with the workspace
// that a sum in four parts needs; another one without a workspace, for when memory is short; and
// FP8 sums as on Hopper.
#include "../card.h"

fake_card card = {.offered = 1, .sample = 1, .hopper = true, .workspace = {16}};
