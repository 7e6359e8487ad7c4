// Divided weights (ZeRO-3): each rank keeps its own elements of every weight, and has the other
// elements only while an operation needs them. See params_parted.c. Included by this folder and
// dist/.
#pragma once

#include "params.h"
#include "parted_order.h"

/// The forms of a unit's weights. Each form is fetched and dropped separately:
///   COMPUTE   the weights that operations read: the low-precision copy, else the master weights
///   MASTER    the master weights that have a low-precision copy
///   DERIVED   FP8 copies; a parameter that has one is a unit of its own
typedef enum parted_form {
  PARTED_COMPUTE, PARTED_MASTER, PARTED_DERIVED, PARTED_FORMS
} parted_form;

typedef struct parted_pages { char *at; int64_t bytes; } parted_pages;

/// Parameters that are used together, such as the parameters of a transformer block.
typedef struct parted_unit {
  bool    here[PARTED_FORMS];          // its pages are in memory
  bool    made;                        // its derived copy was made since parted_drop
  int64_t used;                        // params_parted.clock at the last use
  int32_t n_pages[PARTED_FORMS];
  parted_pages *pages[PARTED_FORMS];   // whole pages that hold no elements of this rank
} parted_unit;

/// Functions of dist/ that fill a unit with the elements that other ranks own. One unit is filled
/// at a time; all ranks fill the same units in the same order.
typedef struct parted_link {
  eng_status (*start)(void *data, int unit, int form);   // begins to fill a unit
  eng_status (*advance)(void *data);                     // advances its messages; never waits
  eng_status (*finish)(void *data);                      // waits until the unit is complete
} parted_link;

typedef struct params_parted {
  heap          memory;                // of the lists below
  int32_t       n_units;
  int32_t      *unit_of;               // [n members] the unit of each member; -1: the member stays
                                       // in memory
  parted_unit  *unit;                  // [n_units]
  int64_t       clock;
  bool          whole;                 // all weights are in memory, until params_leave
  bool          imagined;              // the table only predicts memory use; no page is touched
  const parted_link *link;             // NULL: the trainer was freed
  void         *data;
  // The next two are numbers unit * PARTED_FORMS + form: a unit in one form; -1: none.
  int32_t       coming;                // the unit that is being filled
  int32_t       ahead;                 // the unit whose fetch began before an operation needed it
  int64_t       used_ahead;            // number of units that were fetched ahead and then needed;
                                       // dist/ resets it
  parted_order  order;                 // the order in which units were used
  tensor      **piece;                 // [n members] this rank's elements of the masters
  int64_t       away;                  // bytes of all pages that can be dropped
  int64_t       here, most;            // bytes of these pages that are in memory: now, and the
                                       // maximum
} params_parted;

/// Makes the table of a set. This rank owns the elements [own[2 * i], own[2 * i + 1]) of member i;
/// all weights are still in memory. units [n]: the unit of each member. apart [n]: 1 for a member
/// that stays in memory, such as an expert, because the ranks have already divided the experts.
eng_status parted_new(params_parted **out, const eng_params *set, const int64_t *own,
                      const int32_t *units, const uint8_t *apart);
void parted_free(params_parted *q);
/// Fetches each unit unit[k] in the form form[k], k < n. Drops all other units, and begins to fill
/// the unit that is probably used next.
eng_status parted_need(params_parted *q, const int *unit, const int *form, int n);
/// Drops all units. This ends a pass (parted_order.c).
eng_status parted_drop(params_parted *q);
/// Returns whether operations can use a unit without a call of parted_need.
static inline bool parted_here(const params_parted *q, int unit, int form)
{ return q->unit[unit].here[form] && q->ahead != unit * PARTED_FORMS + form; }
/// Lists the tensors of member i in this form; returns their number.
int parted_tensors(tensor *out[PARAMS_DERIVED], const eng_params *set, int i, int form);
/// Returns whether `store` is memory of member p. If it is, sets *form to the form.
bool parted_holds(int *form, const parameter *p, const storage *store);
/// Removes the derived copy of p from the table of its set, if the set has one. Call this before
/// the copy is freed.
void params_derived_freed(parameter *p);
/// Returns how many bytes of weights always stay on this rank.
int64_t parted_kept(const eng_params *set, const params_parted *q);

/// Divides the weights of a set. The set takes ownership of the table, also after an error. Does
/// not drop any weights yet.
eng_status params_part(eng_params *set, params_parted *q);
/// Drops the weights that this rank does not own.
eng_status params_leave(eng_params *set);
/// Fetches all weights. They stay in memory until params_leave.
eng_status params_bring_all(eng_params *set);
