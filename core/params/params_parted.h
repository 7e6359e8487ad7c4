// Weights that come and go (ZeRO-3): each rank keeps its own elements of every weight, and has the
// others only while an operation needs them. See params_parted.c.
#pragma once

#include "params.h"
#include "parted_order.h"

/// The forms of a unit's weights. Each form comes and goes by itself:
///   COMPUTE   what operations read: the low-precision copy, or the f32 weights without one
///   MASTER    the f32 weights that have a low-precision copy
///   DERIVED   FP8 copies; a parameter that has one is a unit of its own
typedef enum parted_form {
  PARTED_COMPUTE, PARTED_MASTER, PARTED_DERIVED, PARTED_FORMS
} parted_form;

typedef struct parted_pages { char *at; int64_t bytes; } parted_pages;

/// Parameters that are used together, such as those of a block.
typedef struct parted_unit {
  bool    here[PARTED_FORMS];          // its pages are in memory
  bool    made;                        // its derived copy was made since parted_drop
  int64_t used;                        // params_parted.clock at the last use
  int32_t n_pages[PARTED_FORMS];
  parted_pages *pages[PARTED_FORMS];   // whole pages that hold nothing of this rank's own
} parted_unit;

/// The link to the ranks that have the other weights. Fills one unit at a time; all ranks fill the
/// same units in the same order.
typedef struct parted_link {
  eng_status (*start)(void *data, int unit, int form);   // begins to fill a unit
  eng_status (*advance)(void *data);                     // moves its messages; never waits
  eng_status (*finish)(void *data);                      // waits until the unit is complete
} parted_link;

typedef struct params_parted {
  int32_t       n_units;
  int32_t      *unit_of;               // [n members]; -1: this member stays
  parted_unit  *unit;                  // [n_units]
  int64_t       clock;
  bool          whole;                 // everything is here until params_leave
  bool          imagined;              // a prediction: no page is touched
  const parted_link *link;             // NULL: the trainer is gone
  void         *data;
  // a unit and form is the number unit * PARTED_FORMS + form; -1: none
  int32_t       coming;                // is being filled
  int32_t       ahead;                 // was started before an operation needed it
  int64_t       used_ahead;            // units that were used and were ahead; dist/ clears it
  parted_order  order;                 // in which units were used
  tensor      **piece;                 // [n members] this rank's elements of the masters
  int64_t       away;                  // bytes of all pages that come and go
  int64_t       here, most;            // bytes of those that are here; the most at one time
} params_parted;

/// Makes the table of a set. This rank owns the elements [own[2 * i], own[2 * i + 1]) of member i;
/// all weights are still here. units [n]: the unit of each member. apart [n]: whether a member
/// stays, such as an expert, because the ranks have divided the experts already.
eng_status parted_new(params_parted **out, const eng_params *set, const int64_t *own,
                      const int32_t *units, const uint8_t *apart);
void parted_free(params_parted *q);
/// Brings the forms form[n] of the units unit[n], drops the others, and begins to fill the unit
/// that is probably used next.
eng_status parted_need(params_parted *q, const int *unit, const int *form, int n);
/// Drops all units; a pass has ended.
eng_status parted_drop(params_parted *q);
/// Whether operations can use a unit without asking for it.
static inline bool parted_here(const params_parted *q, int unit, int form)
{
  return q->unit[unit].here[form] && q->ahead != unit * PARTED_FORMS + form;
}
/// The tensors of member i in this form; returns their number.
int parted_tensors(tensor *out[PARAMS_DERIVED], const eng_params *set, int i, int form);
/// Whether `store` is memory of member p, and in which form.
bool parted_holds(int *form, const parameter *p, const storage *store);
/// Bytes of weights that stay on this rank.
int64_t parted_kept(const eng_params *set, const params_parted *q);

/// Divides the weights of a set. The set takes ownership of the table, also after an error. Drops
/// nothing yet.
eng_status params_part(eng_params *set, params_parted *q);
/// Drops the weights that this rank does not own.
eng_status params_leave(eng_params *set);
/// Brings all weights, which stay until params_leave.
eng_status params_bring_all(eng_params *set);
