// Steps and scopes, which end the lifetime of tensors. A step owns its tape and the tensors created
// in it. The end of a step drops both, and waits for transfers of weights (ZeRO-3). A scope is a
// mark, inside or outside a step; its end drops the tensors created since the mark. Called by Lua
// and tensor_calls.c.
#include "step.h"

#include "base/error.h"
#include "backward.h"
#include "params/params.h"

static int n_scopes;   // number of open scopes

arena_id step_home(void) { return tensor_step_open() || n_scopes > 0 ? ARENA_STEP : ARENA_KEPT; }

eng_status eng_step_begin(void)
{
  FAIL_IF(tensor_step_open(), ENG_ERR_STATE, "step %lld is still open, and steps do not nest; "
          "hint: call engine.end_step() first", (long long)tensor_step_number());
  tensor_begin_step();
  return ENG_OK;
}

eng_status eng_step_end(void)
{
  backward_end_step();
  tensor_drop_since(0, true);
  tensor_next_step();
  n_scopes = 0;                   // the tensors of scopes that are still open have been dropped
  return params_wait();
}

int64_t eng_step_count(void) { return tensor_step_number(); }

// A mark is the step number and the length of the step's list of tensors.
eng_status eng_scope_begin(int64_t *mark)
{
  *mark = tensor_step_number() << 31 | tensor_mark();
  n_scopes++;
  return ENG_OK;
}

// Tensors from before the scope keep their gradients, because backward() may have run inside the
// scope.
eng_status eng_scope_end(int64_t mark)
{
  int place = (int)(mark & INT32_MAX);
  bool same_step = mark >> 31 == tensor_step_number();
  if (same_step && n_scopes > 0) n_scopes--;
  FAIL_IF(!same_step || place > tensor_mark(), ENG_ERR_STATE,
          "this scope began in an earlier step, or an enclosing scope has already ended; hint: end "
          "scopes in the reverse order of their beginnings, within one step");
  FAIL_IF(tape_reaches(place), ENG_ERR_GRADIENT, "the tape has operations of this scope; hint: "
          "wrap them in engine.no_grad() or run backward() before the scope ends");
  tensor_drop_since(place, false);
  return ENG_OK;
}
