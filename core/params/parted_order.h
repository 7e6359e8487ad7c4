// Records the order in which a pass uses the divided weights of ZeRO-3, and predicts which it uses
// next. See parted_order.c.
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { ORDER_KEPT = 4096, ORDER_UNKNOWN = -1, ORDER_END = -2 };

/// What came, as numbers that the caller chooses, from 0 on; the last ORDER_KEPT of them.
typedef struct parted_order {
  int32_t came[ORDER_KEPT];
  int64_t n;                  // numbers so far; number i is came[i % ORDER_KEPT]
  int64_t at;                 // the earlier number that the next one probably equals; n: none
} parted_order;

/// Records what came, or ORDER_END where a pass ended.
void order_note(parted_order *o, int32_t number);
/// What probably comes next: a number, ORDER_END, or ORDER_UNKNOWN.
int32_t order_next(const parted_order *o);
