// Predicts which weights a pass uses next. A pass ends when all weights are dropped (parted_drop),
// usually after an update. The prediction follows the previous pass as long as the current pass
// repeats it. An evaluation or a branch of the model breaks this order. Then the last two entries
// are searched for in the older entries, and the prediction continues from their most recent
// earlier occurrence. So it soon follows an earlier pass of the same kind. If the two entries have
// not occurred before, there is no prediction.
//
// Ranks that use the same weights in the same order make the same predictions, because a prediction
// depends only on this order. Owns nothing. Called by params_parted.c.
#include "parted_order.h"

static int32_t number_at(const parted_order *o, int64_t i) { return o->came[i % ORDER_KEPT]; }

static bool is_kept(const parted_order *o, int64_t i)
{ return i >= 0 && i < o->n && i > o->n - ORDER_KEPT; }

int32_t order_next(const parted_order *o)
{ return is_kept(o, o->at) ? number_at(o, o->at) : ORDER_UNKNOWN; }

void order_note(parted_order *o, int32_t number)
{
  int32_t before = o->n > 0 ? number_at(o, o->n - 1) : ORDER_UNKNOWN;
  if (number == ORDER_END && before == ORDER_END) return;
  bool as_predicted = order_next(o) == number;
  o->came[o->n++ % ORDER_KEPT] = number;
  if (as_predicted) {
    o->at++;
    return;
  }
  for (o->at = o->n - 1; is_kept(o, o->at - 2); o->at--)
    if (number_at(o, o->at - 1) == number && number_at(o, o->at - 2) == before) return;
  o->at = o->n;
}
