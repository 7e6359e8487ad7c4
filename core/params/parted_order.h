// Records the order in which passes use the divided weights of ZeRO-3, and predicts which weights a
// pass uses next. See parted_order.c. Included by params_parted.h.
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { ORDER_KEPT = 4096, ORDER_UNKNOWN = -1, ORDER_END = -2 };

/// The last ORDER_KEPT entries of the order. An entry is a number >= 0 that the caller has chosen
/// for some weights, or ORDER_END.
typedef struct parted_order {
  int32_t came[ORDER_KEPT];
  int64_t n;                  // entries so far; entry i is came[i % ORDER_KEPT]
  int64_t at;                 // index of the entry that predicts entry n; equal to n: no prediction
} parted_order;

/// Appends the number of the weights that were used, or ORDER_END at the end of a pass.
void order_note(parted_order *o, int32_t number);
/// Predicts the next entry: a number, ORDER_END, or ORDER_UNKNOWN.
int32_t order_next(const parted_order *o);
